"""Mutated configurations: whatever is wrong ends in one message, and nothing nonsensical is accepted.

Most cases go through a parser of the mutated part alone, which is what the command uses inside; some through the whole
command, up to the first step. `pytest -m long` runs thousands of the latter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  # its log handler keeps the stream it finds, which must outlive a test
import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from rlobjectives import Component, Objective
from rlobjectives.cli import main, training
from rlobjectives.cli.failures import DEBUG, ConfigurationError, one_message
from rlobjectives.cli.named import names_in_files
from rlobjectives.cli.training import check_trainer_options
from rlobjectives.errors import RLObjectivesError
from tests.causal_lm.small_model import ROWS, save_small_model
from tests.cli.fuzz import OBJECTIVES, Case, cases, dumped

# Others' warnings; test_configuration.py looks for this library's.
pytestmark = pytest.mark.filterwarnings("ignore")
SEED = 20_261_201
NAMED = sum(isinstance(one, str) for one in OBJECTIVES)
LONGEST = 3000
"""Characters of a message; a part lists its options, a module its names."""
POLICY = {
    "rewards": ["tests.causal_lm.small_model.long_answer", "tests.causal_lm.small_model.has_digit"],
    "model_name_or_path": "model", "max_new_tokens": 6, "micro_batch_size": 4, "max_prompt_tokens": 8, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "learning_rate": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.99], "warmup_steps": 1, "dtype": "float32", "snapshots": None,
    "old_logprobs": "recomputed", "val_samples": 0, "epochs_per_rollout": 1, "windows_per_rollout": 1, "gradient_clip_val": 1.0, "seed": 1,
    "accuracy_threshold": 1.0, "reference": None, "policy_temperature": None, "model_options": None, "model_config": None,
}  # fmt: skip
DATA = {
    "dataset": ROWS[:4], "prompts_per_step": 2, "num_generations": 4, "prompt_column": "prompt", "val_dataset": None,
    "dataset_options": None, "shuffle": True, "seed": 0, "split": "train", "val_batch_size": 4,
}  # fmt: skip
QUIET = {
    "accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
WHOLE = {
    "model": {"class_path": "CausalLMPolicy", "init_args": {**POLICY, "objective": OBJECTIVES[11]}},
    "data": {"class_path": "PromptDataModule", "init_args": DATA},
    "seed_everything": 1,
    "trainer": QUIET,
}

# What is sensible, in plain Python, of every number that a configuration can set.
COUNT = (
    "micro_batch_size", "max_new_tokens", "max_prompt_tokens", "epochs_per_rollout", "windows_per_rollout", "prompts_per_step",
    "num_generations", "val_batch_size", "max_tokens",
)  # fmt: skip
NOT_NEGATIVE = (
    "learning_rate",
    "weight_decay",
    "clip_low",
    "clip_high",
    "epsilon",
    "coef",
    "warmup_steps",
    "top_k",
    "val_samples",
)
POSITIVE = ("temperature", "policy_temperature", "ratio_cap", "gradient_clip_val", "high")
FRACTION = ("top_p", "fraction")


def sensible(name: str, value: Any) -> bool:
    """Whether nobody would call it nonsense."""
    if isinstance(value, (list, tuple)):
        return all(sensible(name, one) for one in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return name not in (*COUNT, *NOT_NEGATIVE, *POSITIVE, *FRACTION) or value is None
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if name in COUNT:
        return isinstance(value, int) and value >= 1
    if name in NOT_NEGATIVE:
        return value >= 0
    return value > 0 if name in POSITIVE else 0 < value <= 1 if name in FRACTION else True


def nonsense(part: Any, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Options of a part, or attributes of another object, that differ from their default and make no sense."""
    if isinstance(part, (Component, Objective)) and dataclasses.is_dataclass(part):
        for one in dataclasses.fields(part):
            value = getattr(part, one.name)
            if value != one.default and not sensible(one.name, value):
                yield f"{type(part).__name__}.{one.name} = {value!r}"
            for inner in value if isinstance(value, tuple) else (value,):
                yield from nonsense(inner)
    for name in names:
        if not sensible(name, value := getattr(part, name)):
            yield f"{type(part).__name__}.{name} = {value!r}"


def check_message(case: Case, message: str, *, foreign: bool = False) -> None:
    """One message of readable length, of this library or the parser; that of another library only where `foreign`."""
    what = case.what[:200]
    assert message.strip(), what
    length = len(message)
    assert length <= LONGEST, f"{what}: {length} characters"
    assert "Traceback" not in message, what
    foreigner = f"{DEBUG}=1" in message
    assert foreign or not foreigner, f"{what}: {message}"


def check_parts(
    found: Iterator[Case],
    parse: Callable[[list[str]], Any],
    judge: Callable[[Any], Iterator[str]],
    *,
    foreign: bool = False,
) -> tuple[int, int]:
    """Parse each case; give how many were accepted and refused."""
    counts = [0, 0]
    for case in found:
        Path("run.yaml").write_bytes(case.text)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                made = parse(["--config", "run.yaml", *case.options])
        except RLObjectivesError as error:
            check_message(case, str(error), foreign=foreign)
            counts[1] += 1
        except BaseException as error:
            raise AssertionError(f"{case.what[:200]}: a raw {type(error).__name__}") from error
        else:
            counts[0] += 1
            assert not [*judge(made)], case.what
    return counts[0], counts[1]


def instantiated(parser: Any, config: Any) -> Any:
    return (getattr(parser, "instantiate", None) or parser.instantiate_classes)(config)  # by release


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", range(len(OBJECTIVES) - NAMED))
def test_objectives(number: int) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Objective, "objective")

    def parse(arguments: list[str]) -> Objective:
        with one_message(), names_in_files():
            config = parser.parse_args(arguments)
        with one_message():
            config = instantiated(parser, config)
        made: Objective = config.objective
        return made

    base = {"objective": OBJECTIVES[NAMED + number]}
    accepted, refused = check_parts(cases(base, SEED + number, 170, within="objective"), parse, nonsense)
    assert accepted > 2 and refused > 80


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model for all cases that ask for the usual one."""
    from rlobjectives.causal_lm import language_models

    folder = save_small_model(Path("model"))
    tokenizer = language_models.build_tokenizer(folder, gguf_file=None)
    usual = {
        "model_name_or_path": "model",
        "model_config": None,
        "gguf_file": None,
        "dtype": "float32",
        "model_options": None,
    }
    model = language_models.build_model(**usual, seed=0)
    build_tokenizer, build_model = language_models.build_tokenizer, language_models.build_model
    monkeypatch.setattr(
        language_models,
        "build_tokenizer",
        lambda name, **more: tokenizer if name == "model" else build_tokenizer(name, **more),
    )
    monkeypatch.setattr(
        language_models,
        "build_model",
        lambda seed, **given: model if given == usual else build_model(seed=seed, **given),
    )


POLICY_NUMBERS = (
    "micro_batch_size",
    "max_prompt_tokens",
    "learning_rate",
    "weight_decay",
    "warmup_steps",
    "policy_temperature",
)
DATA_NUMBERS = ("prompts_per_step", "num_generations", "val_batch_size")


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("key", ["model", "data"])
def test_modules(key: str) -> None:
    from lightning.pytorch import LightningDataModule

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(LightningModule if key == "model" else LightningDataModule, key)

    def parse(arguments: list[str]) -> Any:
        with one_message(), names_in_files():
            config = parser.parse_args(arguments)
        with one_message():
            config = instantiated(parser, config)
        made = config[key]
        if key == "data" and made is not None:
            made.setup("fit")
        return made

    def judge(made: Any) -> Iterator[str]:
        if made is not None:
            yield from nonsense(made, POLICY_NUMBERS if key == "model" else DATA_NUMBERS)
            yield from nonsense(getattr(made, "objective", None))

    base = {key: {**WHOLE[key], "init_args": {**WHOLE[key]["init_args"]}}}
    if key == "model":
        base["model"]["init_args"]["objective"] = {"estimator": {"class_path": "GRPO"}}
    accepted, refused = check_parts(cases(base, SEED, 250, within=f"{key}.init_args"), parse, judge)
    assert accepted > 5 and refused > 150


def test_trainer_options() -> None:
    """Lightning's own messages are let through, behind the key of the configuration."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_lightning_class_args(Trainer, "trainer")

    def parse(arguments: list[str]) -> Any:
        with one_message():
            config = parser.parse_args(arguments)
        check_trainer_options(config["trainer"])
        with one_message("trainer"):
            config = instantiated(parser, config)
        return config["trainer"]

    accepted, refused = check_parts(
        cases({"trainer": QUIET}, SEED, 400, within="trainer"), parse, lambda made: iter(()), foreign=True
    )
    assert accepted > 40 and refused > 150


class Command(training.ObjectiveCLI):
    """The command up to the first step, with one parser for all runs, which takes longest to make."""

    kept: dict[str, Any] = {}

    def setup_parser(self, *args: Any) -> None:
        if not Command.kept:
            super().setup_parser(*args)
            names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
            Command.kept.update({name: vars(self)[name] for name in names})
        vars(self).update(Command.kept)
        self.parser._instantiators = None

    def _run_subcommand(self, subcommand: str) -> None:
        self.before_fit()
        self.datamodule.setup("fit")
        if hasattr(self.model, "encode"):
            self.model.encode([row[self.datamodule.prompt_column] for row in self.datamodule.rows("train")])
        judged = [(self.model, POLICY_NUMBERS), (self.datamodule, DATA_NUMBERS), (self.model.objective, ())]
        wrong = [text for part, names in judged for text in nonsense(part, names)]
        assert not wrong, wrong


def run_whole(count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    monkeypatch.setattr(training, "ObjectiveCLI", Command)
    monkeypatch.setattr("sys.argv", ["rlobjectives"])
    counts = [0, 0]
    for case in cases(WHOLE, seed, count):
        Path("run.yaml").write_bytes(case.text)
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
                status = main(["fit", "--config", "run.yaml", *case.options])
        except BaseException as error:
            raise AssertionError(f"{case.what[:200]}: a raw {type(error).__name__}") from error
        counts[status == 2] += 1
        if status:
            assert status == 2, case.what
            _, *messages = told.getvalue().split("rlobjectives: error: ")
            assert len(messages) == 1, case.what
            check_message(
                case, messages[0], foreign=messages[0].startswith("trainer: ") or "model_options" in case.what
            )
    return counts[0], counts[1]


@pytest.mark.usefixtures("light")
def test_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, refused = run_whole(40, SEED, monkeypatch)
    assert accepted > 3 and refused > 20


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("light")
def test_the_whole_command_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    run_whole(5000, SEED + 1, monkeypatch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"a: {", "did not find"),
        (b"a: [1\n", "did not find"),
        (b"\tx: 1", "found a tab"),
        (b"a: \x00", "control characters"),
        (b"a: \xff", "not UTF-8"),
        (b"a: &r [*r]", "inside its own anchor"),
        (b"a: 1\n---\nb: 2\n", "single document"),
        (b"a: !!python/object:os.system []", "constructor"),
        (b"trainer: 4.0e-4", "expected options by their names"),
        (b"trainer: {max_steps: null}", "trainer.max_steps is null"),
        (b"trainer: {strategy: dpp}", "trainer: You selected an invalid strategy name"),
        (b"trainer: {accelerator: gpuu}", "trainer: You selected an invalid accelerator name"),
        (b"trainer: {accelerator: cpu, devices: 0}", "trainer: "),
        (b"trainer: {num_nodes: -1}", "trainer: `num_nodes` must be a positive integer"),
        (b"seed_everything: -1", "seed_everything is -1; expected an integer from 0"),
        (
            b"model: {class_path: CausalLMPolicy, init_args: 3}",
            "init_args is a int; expected options by their names",
        ),
        (b"model: {class_path: null}", "class_path is a NoneType; expected the name of a class"),
    ],
)
def test_known_ones(
    text: bytes, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rlobjectives"])
    monkeypatch.setattr(training, "ObjectiveCLI", Command)
    rest = {key: value for key, value in WHOLE.items() if not text.startswith(key.encode())}
    rest["model"] = {
        "class_path": "tests.cli.project.TablePolicy",
        "init_args": {"objective": OBJECTIVES[11]},
    }
    if text.startswith(b"model"):
        del rest["model"]
    Path("run.yaml").write_bytes(dumped(rest) + text)
    assert main(["fit", "--config", "run.yaml"]) == 2
    _, message = capsys.readouterr().err.split("rlobjectives: error: ")
    assert expected in message


def test_long_values_are_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rlobjectives"])
    for value in ("x" * 5000, [*range(3000)], {"class_path": "y" * 5000}):
        config = {
            **WHOLE,
            "data": {"class_path": "PromptDataModule", "init_args": {**DATA, "val_batch_size": value}},
        }
        Path("run.yaml").write_bytes(dumped(config))
        assert main(["fit", "--config", "run.yaml"]) == 2
        told = capsys.readouterr().err
        assert "data.val_batch_size: Expected a <class 'int'>" in told
        assert len(told) < 1500 and "characters)" in told


def test_an_error_of_the_users_own_code_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli import project

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in a constructor")

    monkeypatch.setattr("sys.argv", ["rlobjectives"])
    monkeypatch.setattr(project.CountingData, "__init__", broken)
    with pytest.raises(ZeroDivisionError, match="in a constructor"), one_message():
        project.CountingData()
    with (
        pytest.raises(ConfigurationError, match=rf"Expecting value.*{DEBUG}=1"),
        one_message(),
    ):
        json.loads("")


def test_a_file_that_is_missing_does_not_hide_the_error_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli import project

    def falls_back(*_: Any, **__: Any) -> None:
        try:
            Path("cache.json").read_text()
        except OSError:
            raise ZeroDivisionError("in the fallback")  # noqa: B904  # with the context, as a bug has it

    def gives_up(*_: Any, **__: Any) -> None:
        try:
            Path("cache.json").read_text()
        except OSError:
            raise ValueError("no cache.json, and no data") from None

    for broken, kind in ((falls_back, ZeroDivisionError), (gives_up, ValueError)):
        monkeypatch.setattr(project.CountingData, "__init__", broken)
        with pytest.raises(kind), one_message():
            project.CountingData()


def test_a_context_that_is_suppressed_gives_no_message() -> None:
    """jsonargparse, for one, replaces the errors of its attempts by one that says what is wrong."""

    installed: dict[str, Any] = {}
    source = "def parse():\n try:\n  open('missing.json')\n except OSError:\n  raise TypeError('names no class') from None"
    exec(compile(source, "<parser>", "exec"), installed)
    with pytest.raises(ConfigurationError, match="names no class"), one_message():
        installed["parse"]()
    with pytest.raises(ConfigurationError, match="missing.json"), one_message():
        exec(compile("open('missing.json')", "<parser>", "exec"), installed)


def test_this_library_s_errors_in_a_run_need_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that the data lack is a wrong configuration (2); a NaN that counts is a wrong run (1)."""
    from rlobjectives import NonFiniteError

    save_small_model(Path("model"))
    monkeypatch.setattr("sys.argv", ["rlobjectives"])
    data = {"class_path": "PromptDataModule", "init_args": {**DATA, "prompt_column": "question"}}
    Path("run.yaml").write_bytes(dumped({**WHOLE, "data": data}))
    assert main(["fit", "--config", "run.yaml"]) == 2
    assert "has no column 'question'. It has: answer, prompt" in capsys.readouterr().err
    monkeypatch.setattr(
        training.ObjectiveCLI, "before_fit", lambda self: (_ for _ in ()).throw(NonFiniteError("loss is nan"))
    )
    Path("run.yaml").write_bytes(dumped(WHOLE))
    assert main(["fit", "--config", "run.yaml"]) == 1
    assert capsys.readouterr().err.endswith("rlobjectives: error: loss is nan\n")
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(NonFiniteError):
        main(["fit", "--config", "run.yaml"])


def test_python_s_own_functions_are_no_rewards(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_model(Path("model"))
    monkeypatch.setattr("sys.argv", ["rlobjectives"])
    for rewards, expected in (
        (["builtins.eval"], "is one of Python's own functions"),
        ([{"class_path": "builtins.eval"}], "Got value: Namespace(class_path='builtins.eval'"),
    ):
        policy = {
            "class_path": "CausalLMPolicy",
            "init_args": {**POLICY, "objective": "grpo", "rewards": rewards},
        }
        Path("run.yaml").write_bytes(dumped({**WHOLE, "model": policy}))
        assert main(["fit", "--config", "run.yaml"]) == 2
        assert expected in capsys.readouterr().err
