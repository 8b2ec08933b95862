"""Length-power weights: unbiased, of least variance, and the same for any cut of the window."""

from __future__ import annotations

import math

import pytest
import torch

from rlobjectives import (
    GRPO,
    CapabilityError,
    LengthPower,
    Objective,
    PackedLayout,
    PaddedLayout,
    SequenceMean,
    SequenceSum,
    TokenMean,
)

LENGTHS = [1, 4, 0, 9, 2]


def layout_of(lengths: list[int]) -> PaddedLayout:
    return PaddedLayout(torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1))


def weights(reduction: object, lengths: list[int]) -> list[float]:
    """One number per sequence: what each of its tokens' losses is multiplied by."""
    layout = layout_of(lengths)
    window = Objective(estimator=GRPO(), reduction=reduction).freeze([(torch.zeros(len(lengths)), layout)])
    found = window.weights(layout)
    return [float(row[0]) if n else 0.0 for row, n in zip(found, lengths, strict=True)]


@pytest.mark.parametrize("power", [0.0, 0.5, 0.75, 1.0])
def test_weights_are_the_formula(power: float) -> None:
    total = math.fsum(n**-power for n in LENGTHS if n)
    expected = [n**-power / total / 8 if n else 0.0 for n in LENGTHS]
    assert weights(LengthPower(power=power, max_tokens=8), LENGTHS) == pytest.approx(expected, rel=1e-14)


def test_power_zero_is_the_sequence_sum() -> None:
    assert weights(LengthPower(power=0.0), LENGTHS) == pytest.approx(
        weights(SequenceSum(count="nonempty"), LENGTHS), rel=1e-15
    )


def test_unbiased_for_any_lengths_where_others_are_not() -> None:
    """With E[gᵢ] = G whatever the length, the estimate's mean is G·Σw."""
    for lengths in ([1, 1, 1], [1, 10, 100], [50, 70, 90, 300], [7]):
        for power in (0.0, 0.5, 1.0):
            assert math.fsum(weights(LengthPower(power=power), lengths)) == pytest.approx(1.0, rel=1e-14)
    short, long = [10, 20, 30], [100, 200, 300]
    for biased in (SequenceMean(), TokenMean()):
        assert math.fsum(weights(biased, short)) > 5 * math.fsum(weights(biased, long))


def variance(w: list[float], lengths: list[int]) -> float:
    """Of Σ w·g with independent Var(gᵢ) = Tᵢ."""
    return math.fsum(x * x * n for x, n in zip(w, lengths, strict=True))


def test_variance_falls_with_the_power_and_power_one_is_least() -> None:
    lengths = [12, 40, 333, 512, 2000]
    by_power = [
        variance(weights(LengthPower(power=p), lengths), lengths) for p in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert by_power == sorted(by_power, reverse=True)
    assert by_power[-1] == pytest.approx(1.0 / math.fsum(1 / n for n in lengths), rel=1e-12), "Cramér's bound"
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):  # any other weights that add up to 1 vary more
        other = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
        assert variance((other / other.sum()).tolist(), lengths) > by_power[-1]


def test_sampled_gradients_have_that_mean_and_variance() -> None:
    """Summed gradients of T independent token terms each: mean G and variance proportional to T."""
    generator = torch.Generator().manual_seed(1)
    lengths, truth, draws = [4, 16, 64, 256], 3.0, 20_000
    noise = torch.randn(draws, len(lengths), generator=generator, dtype=torch.float64)
    sums = truth + noise * torch.tensor(lengths, dtype=torch.float64).sqrt()
    spread = {}
    for power in (0.0, 1.0):
        w = torch.tensor(weights(LengthPower(power=power), lengths), dtype=torch.float64)
        estimates = (sums * w).sum(1)
        error = 4 * math.sqrt(variance(w.tolist(), lengths) / draws)
        assert abs(estimates.mean().item() - truth) < error
        spread[power] = estimates.var().item()
        assert spread[power] == pytest.approx(variance(w.tolist(), lengths), rel=0.05)
    assert spread[1.0] < spread[0.0] / 5


def test_cuts_layouts_and_dummies_agree() -> None:
    layout = layout_of(LENGTHS)
    objective = Objective(estimator=GRPO(), reduction=LengthPower())
    whole = objective.freeze([(torch.zeros(5), layout)]).weights(layout)
    pieces = [layout.rows(slice(0, 2)), layout.rows(slice(2, 5))]
    dummy = PaddedLayout(torch.zeros(1, 3, dtype=torch.bool), sequence_mask=torch.tensor([False]))
    window = objective.freeze([(torch.zeros(p.num_sequences), p) for p in (*pieces, dummy)])
    assert torch.equal(torch.cat([window.weights(piece) for piece in pieces]), whole)
    packed = PackedLayout(torch.tensor([0, *LENGTHS]).cumsum(0), torch.ones(sum(LENGTHS), dtype=torch.bool))
    found = objective.freeze([(torch.zeros(5), packed)]).weights(packed)
    assert torch.equal(found, whole[layout.mask])


def test_context_ranks_count_a_sequence_once() -> None:
    layout = layout_of([4, 2])
    facts = {"total_tokens": torch.tensor([4.0, 2.0])}
    mine = PaddedLayout(layout.mask[:, :2], **facts)
    objective = Objective(estimator=GRPO(), reduction=LengthPower())
    whole = objective.freeze([(torch.zeros(2), layout)]).weights(layout)
    assert torch.equal(objective.freeze([(torch.zeros(2), mine)]).weights(mine), whole[:, :2])
    other = PaddedLayout(layout.mask[:, 2:], sequence_mask=torch.tensor([False, False]), **facts)
    window = objective.freeze([(torch.zeros(2), mine), (torch.zeros(2), other)])
    assert torch.equal(window.weights(mine), whole[:, :2])


def test_options_out_of_range_are_refused() -> None:
    for options in ({"power": -0.1}, {"power": 1.5}, {"max_tokens": 0}):
        with pytest.raises(CapabilityError):
            LengthPower(**options)
