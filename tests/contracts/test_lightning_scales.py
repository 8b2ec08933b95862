"""The scale of a local loss under every training path, and which micro-batches reach the optimizer."""

import pytest
import torch

from tests.contracts.scale_paths import MICRO_BATCHES, RANKS, measure_all
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(390)

W, K = RANKS, MICRO_BATCHES


@pytest.fixture(scope="module")
def found():
    ranks = run_ranks(measure_all, RANKS, timeout=380, fresh=True)
    return ranks[0]


def test_manual_optimization_needs_the_number_of_ranks_everywhere(found):
    for path in ("ddp manual", "torch ddp", "fsdp2 manual"):
        assert found[path] == {"kept": "all", "factor": W}, path


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_scales(found, stage):
    name = f"zero-{stage}"
    assert found[f"{name} engine"] == {"kept": "all", "factor": W * K}
    assert found[f"{name} engine unscaled"] == {"kept": "all", "factor": W}
    assert found[f"{name} engine boundary"] == {"kept": "all", "factor": W}
    # Lightning's automatic optimization divides once, the engine once more.
    assert found[f"{name} automatic"] == {"kept": "all", "factor": W * K * K}


def test_automatic_optimization_also_divides_by_the_accumulation(found):
    for path in ("ddp automatic", "fsdp2 automatic"):
        assert found[path] == {"kept": "all", "factor": W * K}, path


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_the_engine_forward_with_boundaries_keeps_every_micro_batch_at_every_stage(found, stage):
    assert found[f"zero-{stage} engine_with_boundary"] == {"kept": "all", "factor": W}
    assert found[f"zero-{stage} one_a_step"] == {"kept": "all", "factor": W}


def test_other_patterns_lose_micro_batches_without_a_word(found):
    lost = {"kept": "last only", "factor": W}
    kept = {"kept": "all", "factor": W}
    assert [found[f"zero-{stage} engine_without_boundary"] for stage in (1, 2, 3)] == [lost, lost, kept]
    assert [found[f"zero-{stage} module_with_boundary"] for stage in (1, 2, 3)] == [kept, kept, lost]


def test_deepspeed_clips_at_one_when_the_configuration_does_not_say(found):
    torch.testing.assert_close(float(found["default clipping"]), 1.0, rtol=1e-4, atol=0.0)
