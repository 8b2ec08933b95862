"""What estimators and losses read is checked where it enters."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from rlobjectives import (
    GRPO,
    Groups,
    MissingColumnError,
    NonFiniteError,
    Objective,
    PackedLayout,
    PaddedLayout,
    Rollouts,
    ShapeError,
    TokenBatch,
    reward_matrix,
)

LAYOUT = PaddedLayout(torch.tensor([[True, True], [True, False]]))
REWARDS, IDS = torch.tensor([1.0, 0.0]), torch.tensor([3, 3])


def test_rewards_become_a_float64_matrix() -> None:
    for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float32):
        rollouts = Rollouts(rewards=REWARDS.to(dtype), group_ids=IDS)
        assert rollouts.rewards.dtype == torch.float64
        assert rollouts.rewards.tolist() == [[1.0], [0.0]]
        assert rollouts.reward_names == ("reward_0",)
        assert rollouts.scored.tolist() == [[True], [True]]
    assert rollouts.num_sequences == 2


def test_unscored_cells_hold_nothing_whatever_they_held() -> None:
    table = torch.tensor([[1.0, torch.nan], [torch.inf, 1e300]], dtype=torch.float64)
    scored = torch.tensor([[True, False], [False, False]])
    assert Rollouts(rewards=table, group_ids=IDS, scored=scored).rewards.tolist() == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"rewards": torch.ones(2, 1, 1)}, ShapeError, "rewards has shape"),
        ({"group_ids": torch.tensor([1.0, 2.0])}, ShapeError, "expected integers, one id per prompt"),
        ({"group_ids": torch.tensor([1])}, ShapeError, "one prompt id per sequence"),
        ({"scored": torch.ones(2, 2, dtype=torch.bool)}, ShapeError, "one flag per reward cell"),
        ({"scored": torch.ones(2)}, ShapeError, r"torch\.bool"),
        ({"reward_names": ("a", "b")}, ShapeError, "reward_names"),
        ({"layout": PaddedLayout(torch.ones(3, 2, dtype=torch.bool))}, ShapeError, "3 sequences"),
        ({"values": torch.zeros(2, 2)}, MissingColumnError, "carry no layout"),
        ({"layout": LAYOUT, "values": torch.zeros(2, 1)}, ShapeError, "values has shape"),
        (
            {"layout": LAYOUT, "values": torch.full((2, 2), torch.nan)},
            NonFiniteError,
            "3 non-finite values among 3",
        ),
        ({"session_ids": torch.tensor([1.0, 2.0])}, ShapeError, "session_ids.*integers, one id per session"),
        ({"truncated": torch.tensor([1, 0])}, ShapeError, "truncated.*True where the sequence was cut off"),
    ],
)
def test_bad_rollouts_are_refused(columns: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Rollouts(**{"rewards": REWARDS, "group_ids": IDS, **columns})


def test_masked_token_columns_may_hold_anything() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
    assert Rollouts(rewards=REWARDS, group_ids=IDS, layout=LAYOUT, values=values).values is not None


def test_groups_are_any_ids_in_any_order() -> None:
    groups = Groups.of(torch.tensor([9, -4, 9, 2**60]))
    assert groups.ids.tolist() == [-4, 9, 2**60]
    assert groups.index.tolist() == [1, 0, 1, 2]
    assert (groups.sizes.tolist(), groups.smallest, groups.count) == ([1, 2, 1], 1, 3)
    assert Groups.of(torch.tensor([], dtype=torch.int32)).smallest == 0


def test_dummies_are_unscored_members_of_no_group() -> None:
    flags = torch.tensor([True, True, False, False])
    layout = PaddedLayout(flags[:, None].expand(4, 2), sequence_mask=flags)
    rewards = torch.tensor([1.0, 0.0, torch.nan, 5.0])
    rollouts = Rollouts(rewards=rewards, group_ids=torch.tensor([7, 7, 7, 3]), layout=layout)
    assert rollouts.scored is not None
    assert rollouts.scored.flatten().tolist() == flags.tolist()
    assert rollouts.rewards.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert not rollouts.unscored and not rollouts.uncredited
    groups = rollouts.groups
    assert (groups.ids.tolist(), groups.sizes.tolist(), groups.smallest) == ([3, 7], [0, 2], 2)
    nobody = Rollouts(
        rewards=rewards, group_ids=torch.arange(4), layout=layout.with_facts(sequence_mask=flags & False)
    )
    assert nobody.groups.smallest == 0


def test_rollouts_pickle_and_replace() -> None:
    rollouts = Rollouts(rewards=REWARDS, group_ids=IDS, layout=LAYOUT)
    again = pickle.loads(pickle.dumps(rollouts))
    assert torch.equal(again.rewards, rollouts.rewards)
    other = dataclasses.replace(rollouts, group_ids=torch.tensor([1, 2]))
    assert other.groups.count == 2
    with pytest.raises(MissingColumnError, match="GAE reads tokens"):
        Rollouts(rewards=REWARDS, group_ids=IDS).tokens("GAE")


def test_missing_rewards_become_unscored_cells() -> None:
    rewards, scored, names = reward_matrix({"a": [1, None, float("nan")], "b": [0.5, 2, -1e300]})
    assert rewards.tolist() == [[1.0, 0.5], [0.0, 2.0], [0.0, -1e300]]
    assert scored.tolist() == [[True, True], [False, True], [False, True]]
    assert names == ("a", "b")
    with pytest.raises(NonFiniteError, match="in: b"):
        Rollouts(
            rewards=rewards, scored=scored, reward_names=names, group_ids=torch.zeros(3, dtype=torch.long)
        )
    with pytest.raises(NonFiniteError):  # an infinity is a mistake, not an absence
        infinite = reward_matrix({"a": [float("inf")]})[0]
        Rollouts(rewards=infinite, group_ids=torch.tensor([0]))
    with pytest.raises(ShapeError):
        reward_matrix({})
    assert reward_matrix({"a": [], "b": []})[0].shape == (0, 2)


def test_only_current_columns_carry_gradient() -> None:
    columns = {
        name: torch.zeros(2, 2, requires_grad=True)
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "behavior_logprobs", "advantages", "entropy")
    }
    tokens = TokenBatch(layout=LAYOUT, **columns)
    kept = {name for name in columns if getattr(tokens, name).requires_grad}
    assert kept == {"logprobs", "entropy"}
    assert not tokens.detach().logprobs.requires_grad
    assert not tokens.detach().entropy.requires_grad


def test_half_precision_is_widened_with_its_gradient() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        leaf = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
        tokens = TokenBatch(logprobs=leaf, layout=LAYOUT)
        assert tokens.logprobs.dtype == torch.float32
        tokens.logprobs.sum().backward()
        assert leaf.grad.dtype == dtype


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages"])
@pytest.mark.parametrize("bad", [torch.zeros(2, 1), torch.zeros(2), torch.zeros(2, 2, dtype=torch.long)])
def test_columns_must_match_the_mask(name: str, bad: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match=name):
        TokenBatch(**{"logprobs": torch.zeros(2, 2), "layout": LAYOUT, name: bad})


def test_a_missing_column_is_named_with_its_reader() -> None:
    tokens = TokenBatch(logprobs=torch.ones(2, 2), layout=LAYOUT)
    with pytest.raises(MissingColumnError, match="KLPenalty reads ref_logprobs"):
        tokens.need("ref_logprobs", "KLPenalty")
    assert torch.equal(tokens.old(), torch.ones(2, 2))
    assert torch.equal(tokens.replace(old_logprobs=torch.zeros(2, 2)).old(), torch.zeros(2, 2))


ONES = torch.ones(2, 3)
FLAT = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("mask is list", lambda: PaddedLayout([[True, False]])),
        ("mask is list", lambda: PackedLayout(torch.tensor([0, 1]), [True])),
        ("cu_seqlens is list", lambda: PackedLayout([0, 1], torch.tensor([True]))),
        ("rewards is list", lambda: Rollouts(rewards=[1.0, 0.0], group_ids=FLAT)),
        ("rewards is ndarray", lambda: Rollouts(rewards=ONES[:, 0].numpy(), group_ids=FLAT)),
        ("rewards is NoneType", lambda: Rollouts(rewards=None, group_ids=FLAT)),
        ("at least one reward", lambda: Rollouts(rewards=torch.ones(2, 0), group_ids=FLAT)),
        ("group_ids is list", lambda: Rollouts(rewards=ONES[:, 0], group_ids=["a", "a"])),
        ("scored is list", lambda: Rollouts(rewards=ONES[:, 0], group_ids=FLAT, scored=[True, True])),
        ("truncated is list", lambda: Rollouts(rewards=ONES[:, 0], group_ids=FLAT, truncated=[True, True])),
        ("greedy_rewards is list", lambda: Rollouts(rewards=ONES[:, 0], group_ids=FLAT, greedy_rewards=[1.0, 0.0])),
        ("layout is Tensor", lambda: Rollouts(rewards=ONES[:, 0], group_ids=FLAT, layout=ONES > 0)),
        ("layout is Tensor", lambda: TokenBatch(logprobs=ONES, layout=ONES > 0)),
        ("logprobs is ndarray", lambda: TokenBatch(logprobs=ONES.numpy(), layout=PaddedLayout(ONES > 0))),
        ("estimate is ndarray", lambda: Objective(estimator=GRPO()).freeze([(ONES[:, 0].numpy(), PaddedLayout(ONES > 0))])),
        ("layout is Tensor", lambda: Objective(estimator=GRPO()).freeze([(ONES[:, 0], ONES > 0)])),
    ],
)  # fmt: skip
def test_what_is_no_tensor_or_layout_is_named(name, make):
    with pytest.raises(ShapeError, match=name):
        make()
