"""Wrong configurations end in one message before anything is trained."""

import copy
import functools
import subprocess
import sys
import warnings
from pathlib import Path

import lightning.pytorch  # noqa: F401  # its log handler keeps the stream it finds, which must outlive a test
import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from rlobjectives import __version__
from rlobjectives.cli import main
from rlobjectives.cli.training import ObjectiveCLI, check_checkpoint
from rlobjectives.registry import ALGORITHMS
from tests.causal_lm.small_model import ROWS, save_small_model

CONFIG = {
    "model": {
        "class_path": "tests.cli.project.TablePolicy",
        "init_args": {
            "objective": {
                "estimator": {"class_path": "GDPO", "init_args": {"weights": [1.0, 0.5]}},
                "policy_loss": {"class_path": "ClippedSurrogate", "init_args": {"clip_high": 0.28}},
                "reduction": {"class_path": "FixedBudget", "init_args": {"max_tokens": 16}},
            },
            "micro_batch_size": 2,
        },
    },
    "data": {"class_path": "tests.cli.project.CountingData", "init_args": {"num_generations": 2}},
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}
OBJECTIVE = "--model.init_args.objective"


@pytest.fixture
def config(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    monkeypatch.setattr(sys, "argv", ["rlobjectives"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "--model.init_args.micro_batch_size=two",
            "model.micro_batch_size: Expected a <class 'int'>. Got value: two",
        ),
        ("--model.init_args.micro_batchsize=2", "Did you mean micro_batch_size? TablePolicy takes:"),
        (
            f"{OBJECTIVE}.estimator.init_args.epsilon=1{'0' * 400}",
            "a whole number is too large where a number is expected; write one below 1e308",
        ),
        (
            f"{OBJECTIVE}.estimator.init_args.epsilon=abc",
            "estimator.epsilon: Expected a <class 'float'>. Got value: abc",
        ),
        ("--trainer.max_stepz=1", "unrecognized arguments: --trainer.max_stepz=1"),
        (f"{OBJECTIVE}.estimator=GDP0", "no class 'GDP0' is known. Did you mean GDPO?"),
        (
            f"{OBJECTIVE}.policy_loss.init_args.clip_hi=0.3",
            "Option 'clip_hi' is not accepted. Did you mean clip_high? ClippedSurrogate takes: clip_low, clip_high, ",
        ),
        (f"{OBJECTIVE}.policy_loss=TokenMean", "TokenMean is a LossReduction; expected a PolicyLoss"),
        (f"{OBJECTIVE}.policy_loss=CausalLMPolicy", "is a LightningModule; expected a PolicyLoss"),
        (f"{OBJECTIVE}.policy_loss=TokenMaen", "no class 'TokenMaen' is known. Or give"),
        ("--model=CausalLMPolcy", "no class 'CausalLMPolcy' is known. Did you mean CausalLMPolicy?"),
        ("--data=PromptDatModule", "no class 'PromptDatModule' is known. Did you mean PromptDataModule?"),
        (f"{OBJECTIVE}=gdpoo", "no objective is named 'gdpoo'. Did you mean gdpo?"),
        (
            f'{OBJECTIVE}={{"policy_los": {{"class_path": "Reinforce"}}}}',
            "Option 'policy_los' is not accepted. Did you mean policy_loss? Objective takes: estimator, policy_loss, ",
        ),
        (f"{OBJECTIVE}.reduction.init_args.max_tokens=0", "max_tokens is 0; expected a positive integer"),
        (
            "--data.init_args.num_generations=1",
            "needs at least 2 completions per prompt; num_generations is 1",
        ),
        ("--model.init_args.top_p=0.9", "sampling is cut (top_p = 0.9)"),
        ("--trainer.gradient_clip_val=1.0", "Give model.init_args.gradient_clip_val instead"),
        ("--trainer.accumulate_grad_batches=4", "micro_batch_size decides how much one backward holds"),
        ("--trainer.strategy=deepspeed_stage_3_offload", "this run has no GPU"),
    ],
)
def test_one_message_and_status_two(config, capsys, option, expected):
    assert main(["fit", "--config", config, option]) == 2
    captured = capsys.readouterr()
    messages = captured.err.split("rlobjectives: error: ")[1:]
    assert len(messages) == 1
    assert expected in messages[0]
    assert "Traceback" not in captured.err + captured.out
    assert len(messages[0].strip().splitlines()) <= 3


def test_a_torn_checkpoint_is_named(config, tmp_path, capsys):
    whole, torn = tmp_path / "whole.ckpt", tmp_path / "torn.ckpt"
    torch.save({"state_dict": {"weight": torch.zeros(1000)}}, whole)
    torn.write_bytes(whole.read_bytes()[:3000])
    assert main(["fit", "--config", config, f"--ckpt_path={torn}"]) == 2
    assert "torn.ckpt' is no whole checkpoint (3,000 bytes)" in capsys.readouterr().err
    check_checkpoint(whole)
    check_checkpoint(tmp_path)


def test_hyper_parameters_of_a_checkpoint_overrule_nothing(config, tmp_path, monkeypatch):
    """LightningCLI takes them for options of the model, which would load code that the checkpoint names."""
    from tests.cli import project

    built = []
    monkeypatch.setattr(project, "uneven", lambda *_: built.append("trained"))
    path = tmp_path / "crafted.ckpt"
    torch.save({"hyper_parameters": {"_class_path": "tests.cli.project.Intruder", "top_p": 0.5}}, path)
    monkeypatch.setattr(project, "Intruder", type("Intruder", (project.TablePolicy,), {}), raising=False)
    seen = []
    monkeypatch.setattr(
        ObjectiveCLI, "before_fit", lambda cli: seen.append((type(cli.model), cli.model.top_p))
    )
    assert main(["fit", "--config", config, f"--ckpt_path={path}"]) == 2  # no checkpoint of a trainer
    assert seen == [(project.TablePolicy, 1.0)]


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_checkpoints_are_opened_without_running_code(config, tmp_path, monkeypatch, command):
    """Whatever Lightning's default is for where they lie."""
    asked = {}

    @functools.wraps(getattr(Trainer, command))
    def watched(*_, **options):
        asked.update(options)

    monkeypatch.setattr(Trainer, command, watched)
    assert main([command, "--config", config, "--ckpt_path=http://localhost/some.ckpt"]) == 0
    assert asked["weights_only"] is True


def test_a_second_normalisation_is_refused(config, capsys):
    options = [f'{OBJECTIVE}.estimator={{"class_path": "GRPO", "init_args": {{"scale": "none"}}}}']
    assert main(["fit", "--config", config, *options, "--model.init_args.normalize_advantages=true"]) == 2
    assert "normalize_advantages would rescale them" in capsys.readouterr().err


def test_a_right_configuration_trains(config):
    assert main(["fit", "--config", config]) == 0


def test_errors_of_training_keep_their_traceback(config, monkeypatch):
    from tests.cli import project

    def broken(*_):
        raise ZeroDivisionError("in the reward function")

    monkeypatch.setattr(project, "uneven", broken)
    with pytest.raises(ZeroDivisionError, match="reward function"):
        main(["fit", "--config", config])


def test_help_version_and_unknown_commands(capsys):
    assert main(["--help"]) == 0
    assert "rlobjectives fit --config run.yaml" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlobjectives {__version__}\n"
    assert main(["train"]) == 2
    assert "unknown command 'train'" in capsys.readouterr().err


def test_algorithms_lists_every_named_objective(capsys):
    assert main(["algorithms"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in ALGORITHMS)
    assert main(["algorithms", "extra"]) == 2


def test_algorithms_needs_torch_alone_and_fit_says_what_to_install():
    hide = "import sys; sys.modules.update(dict.fromkeys(['lightning', 'jsonargparse', 'deepspeed'])); "
    table = subprocess.run(
        [sys.executable, "-c", hide + "from rlobjectives.cli import main; sys.exit(main(['algorithms']))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "gdpo" in table.stdout
    hide = (
        "import sys, importlib.util as util; find = util.find_spec; "
        "util.find_spec = lambda name: None if name == 'lightning' else find(name); "
    )
    refused = subprocess.run(
        [sys.executable, "-c", hide + "from rlobjectives.cli import main; sys.exit(main(['fit']))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert 'pip install "rlobjectives[lightning]"' in refused.stderr


@pytest.mark.filterwarnings("always")
def test_runs_warn_of_no_deprecation_that_is_ours(tmp_path, monkeypatch):
    """Lightning warns of its own; whatever this library calls, and its own names, are current."""
    monkeypatch.setattr(sys, "argv", ["rlobjectives"])
    monkeypatch.chdir(tmp_path)
    rewards = [f"tests.causal_lm.small_model.{name}" for name in ("long_answer", "has_digit")]
    policy = {
        "model_name_or_path": save_small_model(tmp_path / "model"),
        "max_new_tokens": 3,
        "objective": "gdpo",
    }
    data = {"dataset": ROWS[:4], "val_dataset": ROWS[4:6], "prompts_per_step": 2, "num_generations": 4}
    config = {
        "model": {"class_path": "CausalLMPolicy", "init_args": {**policy, "rewards": rewards}},
        "data": {"class_path": "PromptDataModule", "init_args": data},
        "trainer": {**CONFIG["trainer"], "max_steps": 2, "val_check_interval": 1, "log_every_n_steps": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main(["fit", "--config", "run.yaml"]) == 0
    kinds = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)
    ours = [one for one in said if issubclass(one.category, kinds) and "/lightning/" not in one.filename]
    assert not ours, [f"{one.filename}:{one.lineno}: {one.message}" for one in ours]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ((), "Option 'trianer' is not accepted. Did you mean trainer?"),
        (("trainer",), "trainer: Option 'trianer' is not accepted."),
        (("model", "init_args"), "model.init_args: Option 'trianer' is not accepted."),
        (("model", "init_args", "objective"), "model.init_args.objective: Option 'trianer' is not accepted."),
        (
            ("model", "init_args", "objective", "estimator", "init_args"),
            "estimator.init_args: Option 'trianer'",
        ),
    ],
)
def test_an_empty_section_that_nothing_reads(config, capsys, path, expected):
    """The parser drops it, and with it the reader's belief that something was set."""
    written = copy.deepcopy(CONFIG)
    place = written
    for key in path:
        place = place[key]
    place["trianer"] = {}
    Path(config).write_text(yaml.safe_dump(written))
    assert main(["fit", "--config", config]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "model",
    [
        {"objective": "gdpo", "objective_args": {}},
        {"objective": {"estimator": "GRPO", "reduction": {"class_path": "TokenMean", "init_args": {}}}},
    ],
)
def test_an_empty_section_that_something_reads(config, monkeypatch, model):
    written = copy.deepcopy(CONFIG)
    written["model"]["init_args"] |= model
    Path(config).write_text(yaml.safe_dump(written))
    monkeypatch.setattr(Trainer, "fit", functools.wraps(Trainer.fit)(lambda *_, **__: None))
    assert main(["fit", "--config", config]) == 0


def test_what_a_part_of_ones_own_says_is_the_message(config, capsys):
    """Two classes are tried for the place, and the parser shows the reason of the first alone."""
    option = f"{OBJECTIVE}.correction={{class_path: tests.own_parts.OwnCorrection, init_args: {{scale: -1}}}}"
    assert main(["fit", "--config", config, option]) == 2
    message = capsys.readouterr().err
    assert "error: scale is -1" in message
    assert "expected a finite number in [0, inf)" in message
    assert "ImportanceCorrection" not in message
