"""Mergeable statistics: exact under any grouping, selective under masks, and the all-zero row changes nothing."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlobjectives import LogSum, Maximum, Mean, Minimum, Moments, ShapeError, Stat, Sum
from rlobjectives.statistics import fold

KINDS = [Sum, Mean, Moments, Maximum, LogSum]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
numbers = st.lists(st.floats(-1e3, 1e3, width=32), max_size=12)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reported(stat: Stat) -> list[float]:
    return [float(value) for value in stat.report("x/").values()]


@each_kind
@given(values=numbers, cuts=st.lists(st.integers(0, 12), max_size=4))
def test_any_cut_gives_the_whole(kind: Any, values: list[float], cuts: list[int]) -> None:
    whole = kind.of(tensor(values))
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [kind.of(tensor(values[a:b])) for a, b in zip(bounds, bounds[1:], strict=False)]
    folded = fold(kind, parts)
    stepwise = kind.identity()
    for part in reversed(parts):
        stepwise = part.merge(stepwise)
    for found in (folded, stepwise):
        assert bool(found.measured) == bool(whole.measured)
        assert reported(found) == pytest.approx(reported(whole), rel=1e-12, abs=1e-10)


@each_kind
def test_the_all_zero_row_is_the_identity(kind: Any) -> None:
    some = kind.of(tensor([-3.0, -2.0]))
    assert kind.identity().merge(some) == some
    assert some.merge(kind.identity()) == some
    assert fold(kind, []) == kind.identity() == kind.of(tensor([]))
    assert bool(kind.identity().measured) is (kind is Sum)


@each_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mask_selects(kind: Any, bad: float) -> None:
    values, mask = tensor([1.0, bad, -2.0]), torch.tensor([True, False, True])
    assert kind.of(values, mask) == kind.of(tensor([1.0, -2.0]))
    assert kind.of(values, torch.zeros(3, dtype=torch.bool)) == kind.identity()
    counted = kind.of(values)
    if not (kind is Maximum and bad < 0) and not (kind is LogSum and bad < 0):
        assert not all(math.isfinite(value) for value in reported(counted))  # a counted one stays visible
        merged = kind.of(tensor([5.0])).merge(counted)
        assert not all(math.isfinite(value) for value in reported(merged))


@each_kind
def test_round_trips(kind: Any) -> None:
    stat = kind.of(tensor([1.0, 2.5]))
    assert kind.unpack(stat.pack()) == stat
    assert pickle.loads(pickle.dumps(stat)) == stat
    assert repr(stat).startswith(f"{kind.__name__}(")
    assert stat != Sum.of(tensor([9.0]))
    with pytest.raises(ShapeError, match="row has shape"):
        kind(torch.zeros(kind.width + 1))
    with pytest.raises(TypeError):
        hash(stat)


@each_kind
def test_low_precision_and_integers_are_summed_in_float64(kind: Any) -> None:
    values = torch.full((4096,), 1.0009765625, dtype=torch.float16)
    assert kind.of(values) == kind.of(values.double())
    assert kind.of(torch.tensor([1, 2, 3])) == kind.of(tensor([1.0, 2.0, 3.0]))
    assert not kind.of(torch.ones(2, requires_grad=True)).row.requires_grad


@pytest.mark.parametrize("kind", [Sum, Mean, Moments, Maximum, Minimum], ids=lambda kind: kind.__name__)
def test_a_mask_keeps_integers_that_float32_does_not_hold(kind: Any) -> None:
    values = torch.tensor([2**24 + 1, 5, 2**24 + 5])
    mask = torch.tensor([True, False, True])
    assert torch.equal(kind.of(values, mask).row, kind.of(values.double(), mask).row)


def test_extremes_of_flags_and_unsigned_integers() -> None:
    flags, bytes_ = torch.tensor([True, False]), torch.tensor([3, 250], dtype=torch.uint8)
    assert (float(Maximum.of(flags).value), float(Minimum.of(flags).value)) == (1.0, 0.0)
    assert (float(Maximum.of(bytes_).value), float(Minimum.of(bytes_).value)) == (250.0, 3.0)


@each_kind
@pytest.mark.parametrize("count", [5, 5000])
def test_strides_do_not_matter(kind: Any, count: int) -> None:
    values, mask = torch.rand(3, count), torch.rand(3, count) > 0.3
    for turned in (mask.T, mask.T.contiguous()):
        found, expected = kind.of(values.T, turned), kind.of(values, mask)
        assert reported(found) == pytest.approx(reported(expected), rel=1e-12)
    assert reported(kind.of(values.T)) == pytest.approx(reported(kind.of(values)), rel=1e-12)


def test_moments_keep_the_variance_of_offset_numbers() -> None:
    """One-pass float32 gives 0 (and 21.3 at 1e4); the true standard deviations are far from that."""
    values = tensor([1000.0, 1000.01, 1000.02, 1000.03])
    assert float(Moments.of(values).std(ddof=1)) == pytest.approx(0.012909944487, rel=1e-9)
    assert float(Moments.of(values.float()).std(ddof=1)) == pytest.approx(0.012922551855, rel=1e-9)
    near = tensor([1e4, 1e4 + 0.001, 1e4 + 0.002, 1e4 + 0.003])
    halves = Moments.of(near[:1]).merge(Moments.of(near[1:]))
    assert float(halves.variance(ddof=1)) == pytest.approx(1.6666666e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "ddof", "expected"), [([], 0, 0.0), ([4.0], 1, 0.0), ([1.0, 3.0], 0, 1.0)]
)
def test_variance_without_freedom_is_zero(values: list[float], ddof: int, expected: float) -> None:
    assert float(Moments.of(tensor(values)).variance(ddof)) == expected


def test_the_maximum_of_negative_numbers_is_negative() -> None:
    parts = [Maximum.identity(), Maximum.of(tensor([-3.0])), Maximum.of(tensor([-5.0]))]
    assert float(fold(Maximum, parts).value) == -3.0


def test_log_sums_neither_overflow_nor_vanish() -> None:
    high, low = LogSum.of(tensor([1000.0])), LogSum.of(tensor([-1000.0]))
    assert float(high.merge(high).log) == pytest.approx(1000.0 + math.log(2.0))
    assert float(low.merge(low).log) == pytest.approx(-1000.0 + math.log(2.0))
    assert float(low.merge(high).log) == 1000.0
    assert float(LogSum.identity().log) == -math.inf


def test_log_sums_of_exact_zeros() -> None:
    """``exp(−∞)`` is a term of exactly zero: it is counted, has no scale, and hides no other."""
    zero = LogSum.of(tensor([-math.inf, -math.inf]))
    assert (float(zero.count), float(zero.log)) == (2.0, -math.inf)
    low = LogSum.of(tensor([-1000.0]))
    for merged in (zero.merge(low), low.merge(zero)):
        assert (float(merged.count), float(merged.log)) == (3.0, -1000.0)
    assert float(LogSum.of(tensor([-math.inf, 0.0])).log) == 0.0


@pytest.mark.parametrize("kind", [*KINDS, Minimum], ids=lambda kind: kind.__name__)
def test_a_mask_of_another_shape_is_refused(kind: Any) -> None:
    with pytest.raises(ShapeError, match="mask has shape"):
        kind.of(torch.ones(2, 3), torch.ones(3, dtype=torch.bool))


def test_reports_name_mean_and_std() -> None:
    assert list(Moments.of(tensor([1.0])).report("reward/")) == ["reward/mean", "reward/std"]
    assert list(Mean.of(tensor([1.0])).report("reward")) == ["reward"]
