"""Mergeable distributions: any grouping folds to the same, and the empty row changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlobjectives.statistics import fold
from rlobjectives.statistics.distributions import BINS, EffectiveSize, Histogram


@given(st.lists(st.floats(-600, 600), min_size=1, max_size=12), st.integers(0, 12))
def test_effective_size_merges_and_does_not_overflow(logs, cut):
    values = torch.tensor(logs, dtype=torch.float64)
    whole = EffectiveSize.of(values)
    parts = [EffectiveSize.of(values[:cut]), EffectiveSize.identity(), EffectiveSize.of(values[cut:])]
    assert float(fold(EffectiveSize, parts).value()) == pytest.approx(float(whole.value()), rel=1e-12)
    top = max(logs)
    first, second = (math.fsum(math.exp(p * (x - top)) for x in logs) for p in (1, 2))
    assert float(whole.value()) == pytest.approx(first**2 / (len(logs) * second), rel=1e-12)
    assert 1 / len(logs) - 1e-12 <= float(whole.value()) <= 1.0


def test_effective_size_selects_and_reports():
    values = torch.tensor([0.0, float("nan"), math.log(2.0)])
    stat = EffectiveSize.of(values, torch.tensor([True, False, True]))
    assert float(stat.value()) == pytest.approx(9 / 10)
    assert stat.report("ess").keys() == {"ess"}
    assert float(stat.count) == 2.0
    empty = EffectiveSize.identity()
    assert not empty.measured
    assert float(empty.value()) == 1.0
    assert torch.equal(fold(EffectiveSize, [empty, empty]).row, empty.row)


@given(st.integers(0, 100), st.integers(0, 20))
def test_histograms_merge(seed, cut):
    generator = torch.Generator().manual_seed(seed)
    bins = torch.randint(0, BINS, (20,), generator=generator)
    values = torch.rand(20, generator=generator, dtype=torch.float64)
    mask = torch.rand(20, generator=generator) > 0.3
    whole = Histogram.of(bins, values, mask)
    parts = [
        Histogram.of(bins[:cut], values[:cut], mask[:cut]),
        Histogram.of(bins[cut:], values[cut:], mask[cut:]),
    ]
    torch.testing.assert_close(fold(Histogram, [*parts, Histogram.identity()]).row, whole.row)
    assert float(whole.counts.sum()) == float(mask.sum())
    assert float(whole.sums.sum()) == pytest.approx(float(values[mask].sum()))
    if mask.any():
        assert float(whole.peaks.max()) == float(values[mask].max())
