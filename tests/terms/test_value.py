"""The critic's loss against the published numbers, the two branches written out, and central differences."""

import math

import pytest
import torch

from rlobjectives import (
    GAE,
    CapabilityError,
    ClippedValueLoss,
    MissingColumnError,
    Objective,
    PaddedLayout,
    TokenBatch,
)
from rlobjectives.functional import clipped_value_loss

NAN = float("nan")


def plain(v, r, old, clip, delta):
    def error(d):
        if delta is None or abs(d) <= delta:
            return d * d / 2
        return delta * (abs(d) - delta / 2)

    free = error(v - r)
    if old is None or clip is None:
        return free
    return max(free, error(min(max(v, old - clip), old + clip) - r))


def layout_of(count):
    return PaddedLayout(torch.ones(1, count, dtype=torch.bool))


def test_published_numbers():
    loss, _, clipped = clipped_value_loss(
        values=torch.tensor([[0.9, 0.2, 0.5]], dtype=torch.float64),
        old_values=torch.tensor([[0.5, 0.3, 0.4]], dtype=torch.float64),
        returns=torch.tensor([[1.0, 0.0, 0.1]], dtype=torch.float64),
        layout=layout_of(3),
    )
    assert (2 * loss).tolist()[0] == pytest.approx([0.09, 0.04, 0.16], abs=1e-15)
    assert loss.mean().item() == pytest.approx(0.048333333333, abs=1e-12)
    assert clipped.double().mean().item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("clip", [None, 0.1, 0.5])
@pytest.mark.parametrize("delta", [None, 0.3, 10.0])
@pytest.mark.parametrize("scale", [0.3, 50.0])
def test_value_and_slope(clip, delta, scale):
    torch.manual_seed(0)
    values, old, returns = (torch.randn(1, 64, dtype=torch.float64) * scale for _ in range(3))
    loss, slope, _ = clipped_value_loss(
        values=values, old_values=old, returns=returns, layout=layout_of(64), clip=clip, huber_delta=delta
    )
    step = 1e-6
    for place in range(64):
        v, o, r = (column[0, place].item() for column in (values, old, returns))
        assert loss[0, place].item() == pytest.approx(plain(v, r, o, clip, delta), rel=1e-12)
        up, down = plain(v + step, r, o, clip, delta), plain(v - step, r, o, clip, delta)
        assert slope[0, place].item() == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-7)


def window_loss(values, cuts=None, value_loss=None, **columns):
    objective = Objective(estimator=GAE(), value_loss=value_loss or ClippedValueLoss(coef=0.5))
    mask = columns.pop("mask")
    layout = PaddedLayout(mask)
    estimate = torch.zeros(mask.shape, dtype=torch.float64)
    cuts = cuts or [slice(0, len(mask))]
    window = objective.freeze((estimate[cut], layout.rows(cut)) for cut in cuts)
    outputs = [
        window.loss(
            TokenBatch(
                layout=layout.rows(cut),
                logprobs=torch.zeros(mask.shape, dtype=torch.float64)[cut],
                advantages=torch.zeros(mask.shape, dtype=torch.float64)[cut],
                values=values[cut],
                **{name: column[cut] for name, column in columns.items()},
            )
        )
        for cut in cuts
    ]
    total = sum(output.loss for output in outputs)
    total.backward()
    return total.item(), window.summarize(outputs)


def test_it_joins_the_window_and_its_reduction_whatever_the_cut():
    torch.manual_seed(1)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    start, old, returns = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    expected = (
        0.5
        * math.fsum(
            plain(start[i, j].item(), returns[i, j].item(), old[i, j].item(), 0.2, None)
            for i in range(3)
            for j in range(4)
            if mask[i, j]
        )
        / 8
    )
    gradients = []
    for cuts in (None, [slice(0, 1), slice(1, 3)], [slice(2, 3), slice(0, 2)]):
        values = start.clone().requires_grad_()
        loss, metrics = window_loss(values, cuts, mask=mask, old_values=old, returns=returns)
        assert loss == pytest.approx(expected, rel=1e-12)
        assert metrics["loss/value_loss"] == pytest.approx(expected, rel=1e-12)
        gradients.append(values.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=0)


def test_masked_values_change_nothing():
    mask = torch.tensor([[1, 0]]).bool()
    clean = torch.tensor([[0.3, 0.0]], dtype=torch.float64, requires_grad=True)
    dirty = torch.tensor([[0.3, NAN]], dtype=torch.float64, requires_grad=True)
    one = {"old_values": torch.tensor([[0.1, 0.0]]).double(), "returns": torch.tensor([[1.0, 0.0]]).double()}
    two = {
        "old_values": torch.tensor([[0.1, math.inf]]).double(),
        "returns": torch.tensor([[1.0, NAN]]).double(),
    }
    assert window_loss(clean, mask=mask, **one) == window_loss(dirty, mask=mask, **two)
    assert torch.equal(clean.grad, dirty.grad)


def test_what_is_missing_or_out_of_range_is_said():
    with pytest.raises(MissingColumnError, match="reads returns"):
        window_loss(
            torch.zeros(1, 1, dtype=torch.float64, requires_grad=True),
            mask=torch.ones(1, 1, dtype=torch.bool),
        )
    column = torch.zeros(1, 1, dtype=torch.float64)
    given = {"values": column.clone().requires_grad_(), "mask": torch.ones(1, 1, dtype=torch.bool)}
    with pytest.raises(MissingColumnError, match="reads old_values"):
        window_loss(**given, returns=column)
    assert window_loss(**given, returns=column, value_loss=ClippedValueLoss(clip=None))[0] == 0.0
    plain_columns = {"values": column, "returns": column, "layout": layout_of(1)}
    with pytest.raises(MissingColumnError, match="clips around old_values"):
        clipped_value_loss(**plain_columns, old_values=None)
    assert clipped_value_loss(**plain_columns, old_values=None, clip=None)[0].item() == 0.0
    for options in ({"coef": -1.0}, {"clip": 0.0}, {"huber_delta": 0.0}, {"clip": True}):
        with pytest.raises(CapabilityError):
            ClippedValueLoss(**options)
