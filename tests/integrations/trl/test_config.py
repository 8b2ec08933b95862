"""`ObjectiveConfig` through `TrlParser`: YAML files and flags, as TRL's own scripts read them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

from trl import TrlParser

from rlobjectives import (
    GDPO,
    OPSM,
    CapabilityError,
    EntropyMask,
    ImportanceCorrection,
    KLPenalty,
    Rejection,
    SequenceMean,
)
from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.integrations.trl import tiny

YAML = """
output_dir: {folder}
use_cpu: true
bf16: false
gradient_checkpointing: false
report_to: none
num_generations: 4
per_device_train_batch_size: 8
max_steps: 1
save_strategy: "no"
disable_tqdm: true
objective: gdpo
objective_args:
  estimator: {{weights: [1.0, 0.5]}}
  policy_loss: {{clip_high: 0.28}}
dynamic_sampling: drop
"""


def parsed(folder: Path, lines: str) -> ObjectiveConfig:
    file = folder / "own.yaml"
    file.write_text(YAML.format(folder=folder).split("objective: gdpo")[0] + lines)
    (config,) = TrlParser((ObjectiveConfig,)).parse_args_and_config(["--config", str(file)])
    return config


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("off_policy_mask: {threshold: 0.5, against: behavior}", OPSM(threshold=0.5, against="behavior")),
        ("entropy_mask: {fraction: 0.2}", EntropyMask(fraction=0.2)),
        ("correction: {weight: token, high: 1.5}", ImportanceCorrection(weight="token", high=1.5)),
        (
            "correction: {weight: none, reject: [{over: sum, high: 2.0}, {measure: k2, high: 1.0}]}",
            ImportanceCorrection(
                weight="none", reject=(Rejection(over="sum", high=2.0), Rejection(measure="k2", high=1.0))
            ),
        ),
        (
            "correction: {class_path: ImportanceCorrection, init_args: {reject: [{over: sum, high: 2.0}]}}",
            ImportanceCorrection(reject=(Rejection(over="sum", high=2.0),)),
        ),
        ("kl: {coef: 0.1}", KLPenalty(coef=0.1)),
        ("off_policy_mask: rlobjectives:OPSM", OPSM()),
        (
            "entropy_mask: {class_path: rlobjectives.EntropyMask, init_args: {fraction: 0.3}}",
            EntropyMask(fraction=0.3),
        ),
        ("reduction: {class_path: SequenceMean}", SequenceMean()),
    ],
)
def test_parts_that_the_algorithm_does_not_have(options: str, part: object, tmp_path: Path) -> None:
    config = parsed(tmp_path, f"objective: grpo\nobjective_args:\n  {options}\n")
    trained = tiny.trainer(ObjectiveGRPOTrainer, config, model=tiny.saved())
    assert part in trained.objective.parts().values()


def test_off_without_quotes_is_off(tmp_path: Path) -> None:
    config = parsed(tmp_path, "objective: gdpo\ndynamic_sampling: off\n")
    assert config.dynamic_sampling == "off"
    assert tiny.trainer(ObjectiveGRPOTrainer, config).dynamic_sampling == "off"


def test_a_number_that_yaml_takes_for_text(tmp_path: Path) -> None:
    config = parsed(tmp_path, "objective: gspo\nobjective_args:\n  policy_loss: {clip_high: 4e-4}\n")
    with pytest.raises(CapabilityError, match=r"clip_high is '4e-4'.* In YAML write 4.0e-4"):
        tiny.trainer(ObjectiveGRPOTrainer, config)


def test_yaml_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "gdpo.yaml"
    file.write_text(YAML.format(folder=tmp_path))
    (config,) = TrlParser((ObjectiveConfig,)).parse_args_and_config(["--config", str(file)])
    assert config.objective == "gdpo"
    trained = tiny.trainer(ObjectiveGRPOTrainer, config)
    assert trained.objective.estimator == GDPO(weights=(1.0, 0.5))
    assert trained.objective.policy_loss.clip_high == 0.28
    assert trained.dynamic_sampling == "drop"
    trained.train()
    flags = [
        "--config",
        str(file),
        "--objective",
        "grpo",
        "--objective_args",
        '{"estimator": {"scale": "none"}}',
    ]
    (config,) = TrlParser((ObjectiveConfig,)).parse_args_and_config(flags)
    assert tiny.trainer(ObjectiveGRPOTrainer, config).objective.estimator.scale == "none"


def test_wrong_values_are_errors(tmp_path: Path) -> None:
    usual = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    with pytest.raises(CapabilityError, match="dynamic_sampling"):
        ObjectiveConfig(**usual, objective="gdpo", dynamic_sampling="maybe")
    with pytest.raises(CapabilityError, match="max_resamples"):
        ObjectiveConfig(**usual, objective="gdpo", max_resamples=-1)
    with pytest.raises(CapabilityError, match="without objective"):
        ObjectiveConfig(**usual, objective_args={"estimator": {}})
