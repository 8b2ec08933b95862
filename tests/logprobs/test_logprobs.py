"""Token log-probabilities and entropy: against plain Python, finite differences and memory limits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlobjectives import CapabilityError, ShapeError
from rlobjectives.logprobs import hidden_logprobs, sequence_logprobs, token_logprobs

Rows = list[list[float]]


def oracle(logits: Rows, ids: list[int], temperature: float) -> tuple[list[float], list[float]]:
    """Log-probabilities and entropies in plain Python."""
    logprobs, entropies = [], []
    for row, chosen in zip(logits, ids, strict=True):
        z = [value / temperature for value in row]
        total = math.fsum(math.exp(value - max(z)) for value in z)
        logs = [value - max(z) - math.log(total) for value in z]
        logprobs.append(logs[chosen])
        entropies.append(-math.fsum(math.exp(one) * one for one in logs))
    return logprobs, entropies


def example(rows: int = 7, vocabulary: int = 11, width: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocabulary, (rows,), generator=generator)
    return hidden, weight, ids


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
def test_both_routes_match_plain_python(temperature: float) -> None:
    hidden, weight, ids = example()
    logits = hidden @ weight.T
    expected = oracle(logits.tolist(), ids.tolist(), temperature)
    for found in (
        token_logprobs(logits, ids, temperature=temperature, entropy=True),
        hidden_logprobs(hidden, weight, ids, temperature=temperature, entropy=True),
    ):
        for column, want in zip(found, expected, strict=True):
            assert column is not None
            assert column.tolist() == pytest.approx(want, rel=1e-12)


def test_case_give_19_temperature_in_both_logprobs() -> None:
    inputs = {"logits": [2.0, 1.0, 0.0], "token": 0, "temperature": 0.6}
    logits = torch.tensor([inputs["logits"]], dtype=torch.float64, requires_grad=True)
    found, _ = token_logprobs(logits, torch.tensor([0]), temperature=0.6)
    found.sum().backward()
    assert found.item() == pytest.approx(-0.20257309980325733, abs=1e-12)
    assert math.exp(found.item() + 0.20257309980325733) == pytest.approx(1.0, abs=1e-12)
    assert logits.grad is not None
    assert logits.grad[0, 0].item() == pytest.approx(0.30562202473521316, abs=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_match_finite_differences(temperature: float) -> None:
    hidden, weight, ids = example()
    logits = (hidden @ weight.T).requires_grad_()
    mask = torch.tensor([True, True, False, True, True, True, False])

    def from_logits(table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return token_logprobs(table, ids, temperature=temperature, mask=mask, entropy=True)  # type: ignore[return-value]

    def from_hidden(states: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return hidden_logprobs(  # type: ignore[return-value]
            states, head, ids, temperature=temperature, mask=mask, entropy=True
        )

    assert torch.autograd.gradcheck(from_logits, (logits,))
    assert torch.autograd.gradcheck(from_hidden, (hidden.requires_grad_(), weight.requires_grad_()))


def test_tiles_and_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many row chunks and vocabulary tiles give what one gives, in value and gradient."""
    hidden, weight, ids = example(rows=70, vocabulary=300, width=8)
    hidden.requires_grad_()
    weight.requires_grad_()
    reference = torch.log_softmax(hidden @ weight.T / 0.8, 1)
    chosen = reference.gather(1, ids[:, None])[:, 0]
    entropy = -(reference.exp() * reference).sum(1)
    slopes = torch.randn(2, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((slopes[0] * chosen + slopes[1] * entropy).sum(), (hidden, weight))
    monkeypatch.setattr("rlobjectives.logprobs.from_hidden._ROWS", 16)
    monkeypatch.setattr("rlobjectives.logprobs.from_logits._CHUNK_ELEMENTS", 900)
    for found in (
        hidden_logprobs(hidden, weight, ids, temperature=0.8, entropy=True, scratch_bytes=1),
        token_logprobs(hidden @ weight.T, ids, temperature=0.8, entropy=True),
    ):
        assert found[1] is not None
        torch.testing.assert_close(found[0], chosen)
        torch.testing.assert_close(found[1], entropy)
        loss = (slopes[0] * found[0] + slopes[1] * found[1]).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected)


def test_masked_rows_may_hold_nan() -> None:
    hidden, weight, ids = example()
    mask = torch.tensor([True, False, True, True, False, True, True])
    dirty = hidden.masked_fill(~mask[:, None], torch.nan).requires_grad_()
    head = weight.clone().requires_grad_()
    logits = (hidden @ weight.T).masked_fill(~mask[:, None], torch.nan).requires_grad_()
    for found in (
        hidden_logprobs(dirty, head, ids, mask=mask, entropy=True),
        token_logprobs(logits, ids, mask=mask, entropy=True),
    ):
        assert found[1] is not None
        (found[0].sum() + found[1].sum()).backward()
        assert found[0][~mask].eq(0).all()
        assert found[0].isfinite().all()
    for gradient in (dirty.grad, head.grad, logits.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
    assert logits.grad is not None
    assert logits.grad[~mask].eq(0).all()


def test_a_row_without_gradient_is_skipped_even_if_it_is_nan() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]], requires_grad=True)
    found, _ = token_logprobs(logits, torch.tensor([0, 0]))
    found[0].backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0, 0.0]


def test_a_forbidden_token_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    found = token_logprobs(logits, torch.tensor([1]), entropy=True)
    assert found[1] is not None
    (found[0] + found[1]).sum().backward()
    assert found[1].item() == pytest.approx(math.log(2.0))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_large_logits_keep_float32_precision() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(3, 4, generator=generator), torch.randn(300, 4, generator=generator)
    ids = torch.tensor([1, 2, 299])
    shifted = torch.cat([hidden, torch.ones(3, 1)], 1), torch.cat([weight, torch.full((300, 1), 2048.0)], 1)
    logits = (shifted[0] @ shifted[1].T).double()  # the rounding of the logits is not at stake here
    expected = torch.log_softmax(logits, 1)
    entropy = -(expected.exp() * expected).sum(1)
    found = hidden_logprobs(*shifted, ids, entropy=True, scratch_bytes=1)
    assert found[1] is not None
    torch.testing.assert_close(found[0].double(), expected.gather(1, ids[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1].double(), entropy, rtol=0, atol=1e-5)


def test_bfloat16_weights_sum_in_float32() -> None:
    """Over 4,096 rows a bfloat16 sum would lose whole per cents of the weight's gradient."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4096, 16, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(96, 16, generator=generator)).bfloat16().requires_grad_()
    ids = torch.randint(96, (4096,), generator=generator)
    exact = weight.detach().double().requires_grad_()
    torch.log_softmax(hidden.double() @ exact.T, 1).gather(1, ids[:, None]).sum().backward()
    found, _ = hidden_logprobs(hidden, weight, ids)
    assert found.dtype is torch.float32
    found.sum().backward()
    assert weight.grad is not None
    assert exact.grad is not None
    error = (weight.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < 0.01


def test_a_frozen_head_gets_no_gradient_and_half_precision_logits_are_widened() -> None:
    hidden, weight, ids = (one.float() if one.is_floating_point() else one for one in example())
    hidden.requires_grad_()
    found, nothing = hidden_logprobs(hidden, weight, ids)
    assert nothing is None
    found.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    logits = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    wide, _ = token_logprobs(logits, torch.tensor([0, 1]))
    assert wide.dtype is torch.float32
    wide.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype is torch.bfloat16


def test_sequences_are_aligned_with_their_ids() -> None:
    logits = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 2, 3, 4], [0, 1, 0, 2]])
    mask = torch.tensor([[False, False, True, True], [False, True, True, False]])
    expected = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    found, entropies = sequence_logprobs(logits, ids, mask=mask, entropy=True)
    torch.testing.assert_close(found[:, 1:], torch.where(mask[:, 1:], expected, 0.0))
    assert entropies is not None
    assert entropies[~mask].eq(0).all()
    slope = torch.autograd.grad(found.sum(), logits)[0]
    want = torch.autograd.grad(torch.where(mask[:, 1:], expected, 0.0).sum(), logits)[0]
    torch.testing.assert_close(slope, want)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ids": torch.zeros(3, dtype=torch.long)}, ShapeError, "ids has shape [3]; expected [2]"),
        ({"ids": torch.zeros(2)}, ShapeError, "expected integers"),
        ({"temperature": 0.0}, CapabilityError, "temperature is 0.0"),
        ({"mask": torch.ones(2)}, ShapeError, "expected torch.bool"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    given = {"ids": torch.zeros(2, dtype=torch.long)} | arguments
    with pytest.raises(error) as caught:
        token_logprobs(torch.zeros(2, 4), **given)
    assert words in str(caught.value)
    with pytest.raises(ShapeError, match="gather it first"):
        hidden_logprobs(torch.zeros(2, 4), torch.zeros(0), torch.zeros(2, dtype=torch.long))


_PEAK = Path(__file__).with_name("peak_memory.py")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("route", "limit_mib"), [("hidden", 17.0), ("hidden_entropy", 17.0), ("logits_entropy", 5.0)]
)
def test_peak_memory_beyond_the_gradients(route: str, limit_mib: float) -> None:
    """2,048 tokens × 32,000 words: the logits alone would be 250 MiB."""
    output = subprocess.run(
        [sys.executable, str(_PEAK), route], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert json.loads(output)["peak_mib"] <= limit_mib
