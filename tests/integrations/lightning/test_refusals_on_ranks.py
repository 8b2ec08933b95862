"""What goes wrong on one of two ranks ends the run on both, at the same point, with the reason on its own."""

from __future__ import annotations

import pytest

from tests.causal_lm.small_model import save_small_model
from tests.integrations.lightning.refusal_runs import own_lists, refused, refused_samples
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(200)


def test_both_ranks_stop(tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = save_small_model(tmp_path / "model")
    first, second = run_ranks(refused, 2, folder, str(tmp_path / "file" / "deeper"), timeout=150, fresh=True)
    assert "SaveCompletions cannot write to" in first["folder"]
    assert second["folder"].startswith("RankError")
    assert first["logits"].startswith("RankError")
    assert second["logits"].startswith("NonFiniteError: 4 of 4 sequences have no next token to draw")
    assert first["validation"].startswith("RankError")
    assert second["validation"] == "ValueError: no verifier here after 3 transcripts"
    assert first["truncated"].startswith("RankError")
    assert second["truncated"].startswith("MissingColumnError: bootstrap_truncated reads truncated")


def test_only_one_rank_has_a_logger(tmp_path):
    """Loggers and callbacks that only write are often given to rank 0 alone: ranks need not have the same lists."""
    (tmp_path / "file").write_text("in the way")
    place = str(tmp_path / "file" / "deeper")
    first, second = run_ranks(own_lists, 2, str(tmp_path / "runs"), place, timeout=120, fresh=True)
    assert first["written"] == second["written"] == 1
    assert [one.name for one in (tmp_path / "runs" / "written").iterdir()] == ["version_0"]
    assert first["refused"].startswith("CapabilityError: SaveCompletions cannot write to"), first
    assert second["refused"].startswith("RankError: rank 0 stopped with CapabilityError: SaveCompletions"), (
        second
    )


@pytest.mark.parametrize("strategies", [("ddp", "fsdp2"), ("zero3",)])
def test_what_fails_before_or_while_ranks_sample_together(tmp_path, strategies):
    """The rank that fails does not leave the other waiting for its share of the weights."""
    folder = save_small_model(tmp_path)
    found = run_ranks(refused_samples, 2, folder, strategies, timeout=120, fresh=True)
    for strategy in strategies:
        first, second = (rank[strategy] for rank in found)
        for part in ("training", "validation"):  # which rank draws the long prompt is up to the shuffle
            too_long, other = sorted([first[part], second[part]])
            assert too_long.startswith("CapabilityError: A prompt has 13 tokens"), (strategy, part)
            assert other.startswith("RankError"), (strategy, part)
        assert first["sampling"].startswith("RankError"), strategy
        assert second["sampling"] == "ValueError: no engine here", strategy
