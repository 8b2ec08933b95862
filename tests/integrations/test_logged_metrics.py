"""docs/metrics.md has every key that a host logs: compared with what real runs log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlobjectives import ALGORITHMS, GDPO, GRPO, EntropyMask, ImportanceCorrection, KLPenalty, Objective
from rlobjectives.integrations.host_metrics import LIGHTNING_METRICS, TRL_METRICS
from rlobjectives.testing.cases import draw_case
from rlobjectives.testing.simulate import whole
from tests.parts import OBJECTIVES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NAMES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def pattern(name: str) -> str:
    """A key that the page lists, as a regular expression: `x/` and `x_` are two, `<name>` is any."""
    text = re.escape(name).replace(re.escape("<name>"), "[^/]+")
    return f"{text}(mean|std)" if name.endswith(("/", "_")) else text


PATTERNS = {name: re.compile(pattern(name)) for name in NAMES}


def unlisted(keys: set[str]) -> set[str]:
    return {key for key in keys if not any(one.fullmatch(key) for one in PATTERNS.values())}


def unseen(names: dict[str, Any], keys: set[str]) -> set[str]:
    return {name for name in names if not any(PATTERNS[name].fullmatch(key) for key in keys)}


def test_an_own_loop() -> None:
    keys: set[str] = set()
    for name in (*ALGORITHMS, "everything"):
        objective = OBJECTIVES[name]
        case = draw_case(1, (3, 2, 4)).without(objective.estimator.refused())
        keys |= {*whole(objective, case).metrics}
    assert {"window/tokens", "loss/total", "loss/kl", "policy/ratio_mean"} <= keys
    assert unlisted(keys) == set()


@pytest.fixture(scope="module")
def lightning_keys(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Of a policy with a reference, validation and test; of one with stale samples and a pre-pass; of an actor-critic."""
    pytest.importorskip("lightning")
    from lightning.pytorch import Callback, Trainer

    from rlobjectives.causal_lm import PolicySnapshots, PromptDataModule
    from tests.causal_lm.critic_runs import agent
    from tests.causal_lm.small_model import ROWS, policy, save_small_model

    folder = save_small_model(tmp_path_factory.mktemp("model"))
    keys: set[str] = set()

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            keys.update(trainer.callback_metrics)

        on_validation_end = on_test_end = on_train_batch_end

    def run(module: Any, *, test: bool = False) -> None:
        data = PromptDataModule(
            ROWS, prompts_per_step=2, num_generations=4, val_dataset=ROWS[:2], test_dataset=ROWS[2:4], seed=1
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=4,
            val_check_interval=2,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Watch()],
        )
        trainer.fit(module, data)
        if test:
            trainer.test(module, data, verbose=False)

    with_reference = Objective(estimator=GDPO(weights=(1.0, 0.5)), kl=KLPenalty(coef=0.1), entropy_coef=0.01)
    run(policy(folder, objective=with_reference, val_samples=2), test=True)
    stale = Objective(
        estimator=GRPO(), correction=ImportanceCorrection(), entropy_mask=EntropyMask(fraction=0.5)
    )
    run(
        policy(
            folder,
            objective=stale,
            epochs_per_rollout=2,
            snapshots=PolicySnapshots(interval=1, max_staleness=1),
        )
    )
    run(agent(folder, critic_warmup_steps=1, critic_epochs=1))
    return keys


@pytest.mark.filterwarnings("ignore")
def test_lightning(lightning_keys: set[str]) -> None:
    assert unlisted(lightning_keys) == set()
    assert unseen(LIGHTNING_METRICS, lightning_keys) == set()
    for name in ("value/explained_variance", "loss/value_loss", "rollout/policy_age", "mismatch/kl"):
        assert name in lightning_keys


TRL_S_OWN = re.compile(
    r"epoch|loss|grad_norm|learning_rate|num_tokens|kl|entropy|step_time|reward|reward_std|frac_reward_zero_std|total_flos"
    r"|rewards/.*|completions/.*|(train|eval)_.*|clip_ratio/.*|policy_loss|step|num_input_tokens_seen"
)


@pytest.mark.filterwarnings("ignore")
def test_trl() -> None:
    pytest.importorskip("trl")
    from trl import GRPOConfig

    from rlobjectives.integrations.trl import ObjectiveGRPOTrainer
    from tests.integrations.trl import tiny

    class Resampling(ObjectiveGRPOTrainer):
        dynamic_sampling = "resample"
        max_resamples = 1

    config = GRPOConfig(**tiny.options(max_steps=2))
    objective = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1), entropy_coef=0.01)
    trained = tiny.trainer(Resampling, config, objective=objective, model=tiny.saved())
    trained.train()
    keys = {key for entry in trained.state.log_history for key in entry if not TRL_S_OWN.fullmatch(key)}
    assert {"window/tokens", "loss/kl", "policy/kl_to_ref", "group/baseline_mean"} <= keys
    assert unlisted(keys) == set()
    assert unseen(TRL_METRICS, keys) == set()
