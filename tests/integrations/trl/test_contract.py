"""What the adapter relies on in the installed TRL, and which versions it accepts."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("trl")

from transformers import Trainer
from trl import GRPOTrainer, RLOOTrainer

from rlobjectives.errors import RLObjectivesError
from rlobjectives.integrations.trl.columns import scoring_parameters
from rlobjectives.integrations.trl.host import CONTRACT
from rlobjectives.integrations.trl.versions import (
    BROKEN,
    FIRST,
    NEXT,
    RANGE,
    UnsupportedVersionError,
    check_version,
)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("name", CONTRACT)
def test_signature(kind: type, name: str) -> None:
    leading = list(inspect.signature(getattr(kind, name)).parameters)[1:]
    if name == "_get_per_token_logps_and_entropies":
        leading = scoring_parameters(kind)
    expected = list(CONTRACT[name])
    assert leading[: len(expected)] == expected, f"{kind.__name__}.{name} has another signature"


def test_completions_come_second_and_the_mask_of_tools_third() -> None:
    """RLOO, which has no tools, gives three things in all."""
    with_tools, without = (inspect.getsource(kind._generate).split() for kind in (GRPOTrainer, RLOOTrainer))
    assert "prompt_ids, completion_ids, tool_mask, completions," in " ".join(with_tools)
    assert " ".join(without).endswith("return prompt_ids, completion_ids, completions")


def test_the_trainer_collects_a_step_before_its_first_micro_batch() -> None:
    source = inspect.getsource(Trainer)
    assert "get_batch_samples(epoch_iterator, num_batches" in source
    assert source.index("= self.get_batch_samples(") < source.index("self.training_step(model, inputs")
    # A skipped optimizer step keeps the schedule, and a zero max_grad_norm is no clipping.
    assert "self.optimizer.step()" in source
    assert "self.lr_scheduler.step()" in source


@pytest.mark.parametrize("version", ["1.0.0", "1.4.0", "1.14.2", "1.16.0", "1.16.3.dev0"])
def test_supported(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.29.1", "lack the hooks"),
        ("1.15.0", "Triton"),
        ("1.17.0", "newer than any"),
        ("2.0.0", "newer than any"),
    ],
)
def test_unsupported(version: str, reason: str) -> None:
    with pytest.raises(ImportError, match=reason) as caught:
        check_version(version)
    assert isinstance(caught.value, UnsupportedVersionError)
    assert isinstance(caught.value, RLObjectivesError)
    assert "pip install" in str(caught.value)


def test_the_range_is_the_same_everywhere() -> None:
    root = Path(__file__).resolve().parents[3]
    for page in (
        "pyproject.toml",
        "docs/coming_from_trl.md",
        "docs/trl_versions.md",
        "tools/trl_versions.py",
    ):
        assert RANGE in (root / page).read_text(encoding="utf-8"), page
    first, broken, after = (".".join(map(str, one)) for one in (FIRST, BROKEN[0], NEXT))
    assert f"trl>={first},!={broken},<{after}" == RANGE


def test_import_fails_with_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    from importlib import metadata

    import rlobjectives.integrations.trl as package

    monkeypatch.setattr(metadata, "version", lambda name: "0.19.0")
    with pytest.raises(ImportError, match=r"TRL 0\.19\.0 is not supported"):
        importlib.reload(package)
    monkeypatch.undo()
    importlib.reload(package)
