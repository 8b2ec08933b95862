"""Selection keeps every bit of what counts, and nothing of the rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from rlobjectives import masking
from rlobjectives.checks import nonfinite_count
from rlobjectives.masking import count, select

NUMBERS = torch.tensor([0.0, -0.0, 1.5, -3e38, 1e-45, torch.inf, -torch.inf, torch.nan])


@pytest.fixture(autouse=True)
def _on_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_WORTHWHILE", 0)


def bits(values: torch.Tensor) -> list[int]:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.contiguous().view(kind).flatten().tolist()


@given(
    data=st.lists(st.tuples(st.sampled_from(NUMBERS.tolist()), st.booleans()), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    other=st.sampled_from([0.0, -torch.inf, torch.inf, 1.25, -2.0]),
)
def test_every_bit_is_where_would_put_it(
    data: list[tuple[float, bool]], dtype: torch.dtype, other: float
) -> None:
    values = torch.tensor([value for value, _ in data]).to(dtype)
    mask = torch.tensor([counts for _, counts in data])
    found = select(values, mask, other)
    assert found.dtype is dtype
    assert bits(found) == bits(torch.where(mask, values, torch.tensor(other, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_and_one_number_for_many_places(dtype: torch.dtype) -> None:
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    values = torch.arange(6, dtype=dtype).view(2, 3).T
    assert select(values, mask).tolist() == [[0.0, 0.0], [1.0, 4.0], [0.0, 0.0]]
    row = torch.tensor([[7.0], [8.0], [torch.nan]], dtype=dtype).expand(3, 2)
    assert select(row, mask, -torch.inf).tolist() == [[7.0, -torch.inf], [8.0, 8.0], [-torch.inf] * 2]
    assert values[0, 1] == 3.0, "the input was written to"


def test_gradient_goes_to_what_counts() -> None:
    leaf = torch.ones(3, requires_grad=True)
    mask = torch.tensor([True, False, True])
    (select(leaf, mask) * torch.tensor([2.0, torch.nan, 3.0])).nansum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 0.0, 3.0]
    with torch.no_grad():
        assert select(leaf, mask).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
def test_so_does_a_tangent() -> None:
    values, direction = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, torch.nan, 5.0])
    mask = torch.tensor([True, False, True])
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(select(forward_ad.make_dual(values, direction), mask))
    assert found.tangent is not None
    assert (found.primal.tolist(), found.tangent.tolist()) == ([1.0, 0.0, 3.0], [4.0, 0.0, 5.0])


def test_integers_are_selected_and_anything_is_counted() -> None:
    mask = torch.tensor([True, False, True])
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        found = select(torch.tensor([3, 4, 5]).to(dtype), mask)
        assert found.dtype is dtype
        assert found.tolist() == torch.tensor([3, 0, 5]).to(dtype).tolist()
    assert select(torch.tensor([3, 4, 5]), mask, -torch.inf).tolist() == [3.0, -torch.inf, 5.0]
    assert int(count(mask)) == 2
    assert int(count(torch.tensor([0.0, torch.nan, 1.0]))) == 2
    assert int(nonfinite_count(mask)) == int(nonfinite_count(mask.long())) == 0
