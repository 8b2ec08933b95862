"""Rollouts: the facts about finished sequences that an estimator reads. No gradient anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlobjectives.checks import (
    check_device,
    check_finite,
    check_floating,
    check_logprobs,
    check_mask,
    check_reward_names,
    check_shape,
    check_tensor,
    refuse_booleans,
)
from rlobjectives.columns import COLUMNS, LOGPROBS
from rlobjectives.errors import MissingColumnError, NonFiniteError, ShapeError
from rlobjectives.extra import extra_of_rollouts, missing
from rlobjectives.groups import Groups
from rlobjectives.layouts import TokenLayout
from rlobjectives.layouts.base import check_layout
from rlobjectives.masking import select
from rlobjectives.scores import stray_rewards

__all__ = ["Groups", "Rollouts", "check_rollouts"]

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """What an estimator reads: rewards, groups and, for token-level credit, columns of tokens.

    This is the boundary where data enter: shapes, dtypes and finiteness are checked here, once,
    so that estimators need no host sync. Every tensor is detached.

    Args:
        rewards: Real numbers ``[n, r]`` (or ``[n]`` for one reward), each in its own unit. Booleans
            are refused; integers and low precision are widened to float64.
        group_ids: Integer prompt of each sequence, ``[n]``. Need not be sorted or contiguous.
        layout: Token layout of the same ``n`` sequences. Needed by estimators that look at tokens.
        reward_names: Names of the ``r`` rewards; ``reward_0 …`` by default.
        scored: Bool ``[n, r]``, False where a reward is missing. A missing entry is
            excluded from that reward's statistics and adds nothing; whatever it holds is ignored. None: every cell is scored. Dummies, which the
            layout's ``sequence_mask`` leaves out, are never scored and no members of the group they repeat.
        values: Critic values of each token, shaped like the layout's mask (as every token column).
        token_rewards: Rewards given at tokens, on top of `rewards`. A number other than 0 at a place that is no action is
            an error of whoever reads it, unless its ``on_observation_reward`` says what becomes of it.
        old_logprobs: Log-probability of each token, in nats, under the policy before any update.
        ref_logprobs: The same under the frozen reference policy, for KL-shaped rewards.
        behavior_logprobs: The same under the policy that sampled, as the sampler saw it.
        teacher_logprobs: The same under a teacher.
        squared_probs: ``Σᵥ π(v)²`` of the policy's distribution at each token.
        session_ids: Integer session of each sequence, ``[n]``, for credit across turns. The sequences of
            one session are given in the order of time.
        truncated: Bool ``[n]``, True where a sequence was cut off rather than finished. Never guessed.
        bootstrap_values: Value of the state after a truncated sequence, ``[n]``; ignored elsewhere. Who credits tokens
            with a critic needs them as soon as a sequence that counts is marked truncated.
        greedy_rewards: Rewards of the greedy answer to each sequence's prompt, shaped like `rewards`. Ignored where
            ``scored`` is False: a reward counts on both sides of the comparison or on neither.
        reward_dtype: Precision the rewards came in, which says how far rounding may have moved them: sums of rewards that
            differ by no more are the same (`RewardSum`). By default that of `rewards`; kept by copies, whose rewards are
            float64. Give it where the rewards were rounded before (a reward model in bfloat16 behind float32 tensors).
            Of this, the rewards' and the greedy rewards' precision the coarsest counts.
        extra: Columns of your own, which an estimator of yours reads (`Column`): one entry per sequence, ``[n]``, or
            shaped like the layout's mask. Real numbers are finite where they count.
        groups: Filled in from ``group_ids``; leave it out.
        sessions: Filled in from ``session_ids``; leave it out.
        unscored: Filled in: whether some genuine sequence has no scored reward at all.
        uncredited: Filled in: whether some sequence has a reward other than 0 and no token to carry it.
        unbootstrapped: Filled in: whether some sequence is truncated and nothing says what follows it.
        misplaced: Filled in: whether some token reward stands at a place that is no action.
        unanchored: Filled in: whether some of those has no action before it in its sequence.

    Raises:
        ShapeError: If shapes disagree, or rewards are boolean.
        NonFiniteError: If a scored reward is NaN, infinite, or beyond float32, or a column that is given
            is not finite at a place that counts, or a log-probability above 0.
        MissingColumnError: If a token column comes without a layout, or one half of a pair is missing.

    Example:
        >>> rollouts = Rollouts(rewards=torch.tensor([1, 0]), group_ids=torch.tensor([3, 3]))
        >>> rollouts.rewards.shape, rollouts.reward_names
        (torch.Size([2, 1]), ('reward_0',))
    """

    rewards: Tensor
    group_ids: Tensor
    layout: TokenLayout | None = None
    reward_names: tuple[str, ...] | None = None
    scored: Tensor | None = None
    values: Tensor | None = None
    token_rewards: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    squared_probs: Tensor | None = None
    session_ids: Tensor | None = None
    truncated: Tensor | None = None
    bootstrap_values: Tensor | None = None
    greedy_rewards: Tensor | None = None
    reward_dtype: torch.dtype | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    groups: Groups = None  # type: ignore[assignment]  # filled below, from group_ids
    sessions: Groups | None = None  # filled below, from session_ids
    unscored: bool = False  # filled below, with the look at the rewards
    uncredited: bool = False  # filled below, from rewards and layout
    unbootstrapped: bool = False  # filled below, from truncated and bootstrap_values
    misplaced: bool = False  # filled below, from token_rewards and layout
    unanchored: bool = False  # filled below, with it

    def __post_init__(self) -> None:
        for name in ("rewards", "group_ids"):
            check_tensor(name, getattr(self, name))
        if self.layout is not None:
            check_layout(self.layout)
            check_device("layout.mask", self.layout.mask, self.rewards.device, "rewards")
        for name in ("group_ids", "scored", *_TOKEN_COLUMNS, *_SEQUENCE_COLUMNS):
            if (column := getattr(self, name)) is not None:
                check_tensor(name, column)
                check_device(name, column, self.rewards.device, "rewards")
        rewards = self.rewards.detach()
        refuse_booleans("rewards", rewards)
        self._set("reward_dtype", self._coarsest(rewards))
        rewards = (rewards.unsqueeze(1) if rewards.dim() == 1 else rewards).to(torch.float64)
        if rewards.dim() != 2:
            raise ShapeError(f"rewards has shape {list(self.rewards.shape)}; expected [n, r] or [n].")
        count, width = rewards.shape
        if not width:
            raise ShapeError(f"rewards has shape {list(rewards.shape)}; expected at least one reward column.")
        self._set("rewards", rewards)
        scored = self.scored
        if scored is None:
            scored = torch.ones_like(rewards, dtype=torch.bool)
        elif scored.dim() == 1:
            scored = scored.unsqueeze(1)
        check_shape("scored", scored, (count, width), "one flag per reward cell")
        if scored.dtype is not torch.bool:
            raise ShapeError(f"scored has dtype {scored.dtype}; expected torch.bool.")
        genuine = None
        if self.layout is not None and "sequence_mask" in self.layout.facts:
            self._check_count(count)
            genuine = self.genuine
            scored = scored & genuine.unsqueeze(1)
        self._set("scored", scored)
        self._set("reward_names", check_reward_names(self.reward_names, width))
        check_shape("group_ids", self.group_ids, (count,), "one prompt id per sequence")
        self._set("groups", Groups.of(self.group_ids, genuine=genuine))
        self._check_scored_rewards(genuine)
        self._check_tokens(count)
        self._check_sequences(count)
        self._set("extra", extra_of_rollouts(self.extra, self))

    def _coarsest(self, rewards: Tensor) -> torch.dtype:
        found = [rewards.dtype] + ([] if self.greedy_rewards is None else [self.greedy_rewards.dtype])
        if self.reward_dtype is not None:
            if not isinstance(self.reward_dtype, torch.dtype):
                raise ShapeError(
                    f"reward_dtype is {self.reward_dtype!r}; expected a torch.dtype such as torch.bfloat16."
                )
            found.append(self.reward_dtype)
        return max(found, key=lambda one: torch.finfo(one).eps if one.is_floating_point else 0.0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_scored_rewards(self, genuine: Tensor | None) -> None:
        assert self.scored is not None and self.reward_names is not None
        bad = self.scored & ~(self.rewards.abs() <= _FLOAT32_MAX)
        told = self.scored.any(1) if genuine is None else self.scored.any(1) | ~genuine
        broken, unscored = torch.stack([bad.any(), ~told.all()]).tolist()
        self._set("unscored", unscored)
        if broken:
            columns = bad.any(0).nonzero().flatten().tolist()
            names = ", ".join(self.reward_names[column] for column in columns)
            raise NonFiniteError(
                f"rewards has {int(bad.sum()):,} values that are NaN, infinite or beyond float32 "
                f"among {bad.numel():,}, in: {names}. If a reward is missing, say so with `scored` "
                "(reward_matrix turns None and NaN into unscored cells); it is never guessed."
            )
        self._set("rewards", torch.where(self.scored, self.rewards, 0.0))

    def _check_count(self, count: int) -> None:
        if self.layout is not None and self.layout.num_sequences != count:
            raise ShapeError(
                f"layout has {self.layout.num_sequences} sequences; rewards has {count} rows. "
                "Both describe the same sequences, in the same order."
            )

    def _check_tokens(self, count: int) -> None:
        self._check_count(count)
        if self.layout is not None:
            lost = (self.rewards != 0).any(1) & (self.layout.local_counts() == 0)
            self._set("uncredited", bool(lost.any()))
        for name in _TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is None:
                continue
            layout = self.tokens(f"rollouts.{name}")
            layout.check(name, column)
            check_floating(name, column)
            check = check_logprobs if name in LOGPROBS else check_finite
            check(name, column, layout.mask)
            low = column.dtype in (torch.float16, torch.bfloat16)
            self._set(name, column.detach().float() if low else column.detach())
        self._look_for_stray_rewards()

    def _look_for_stray_rewards(self) -> None:
        misplaced = unanchored = False
        if self.token_rewards is not None and self.layout is not None:
            stray = stray_rewards(self.layout, self.token_rewards)
            misplaced = bool(stray.any())
            if misplaced:
                actions = self.layout.cumulative_sum(self.layout.mask.double())
                unanchored = bool((stray & (actions == 0)).any())
        self._set("misplaced", misplaced)
        self._set("unanchored", unanchored)

    def _check_sequences(self, count: int) -> None:
        if self.session_ids is not None:
            check_shape("session_ids", self.session_ids, (count,), "one session id per sequence")
            self._set("sessions", Groups.of(self.session_ids, "session_ids", meaning="one id per session"))
        if self.truncated is not None:
            check_mask("truncated", self.truncated, meaning="the sequence was cut off")
            check_shape("truncated", self.truncated, (count,), "one flag per sequence")
        self._set("unbootstrapped", self._cut_without_value())
        if self.bootstrap_values is not None:
            truncated = self.need("truncated", "rollouts.bootstrap_values")
            refuse_booleans("bootstrap_values", self.bootstrap_values)
            check_shape("bootstrap_values", self.bootstrap_values, (count,), "one value per sequence")
            check_finite("bootstrap_values", self.bootstrap_values, truncated)
            self._set("bootstrap_values", self.bootstrap_values.detach())
        if self.greedy_rewards is not None:
            refuse_booleans("greedy_rewards", self.greedy_rewards)
            greedy, scored = self.greedy_rewards.detach().to(torch.float64), self.scored
            greedy = greedy.unsqueeze(1) if greedy.dim() == 1 else greedy
            check_shape("greedy_rewards", greedy, tuple(self.rewards.shape), "the shape of rewards")
            check_finite("greedy_rewards", greedy, scored)
            assert scored is not None
            self._set("greedy_rewards", torch.where(scored, greedy, 0.0))

    def _cut_without_value(self) -> bool:
        if self.truncated is None or self.bootstrap_values is not None:
            return False  # without a look at the device
        counted = self.truncated if self.layout is None else self.truncated & self.layout.sequence_mask()
        return bool(counted.any())

    def need(self, name: str, reader: object) -> Tensor:
        """A column that an estimator cannot do without.

        Args:
            name: Of the library's columns or of your own.
            reader: The estimator, or its name, for the message.

        Raises:
            MissingColumnError: If it was not given.
        """
        column: Tensor | None = getattr(self, name) if name in _COLUMNS else self.extra.get(name)
        if column is None:
            raise MissingColumnError(missing(name, reader, "Rollouts", name in _COLUMNS))
        return column

    @property
    def num_sequences(self) -> int:
        """Number of sequences ``n``."""
        return self.rewards.shape[0]

    @property
    def genuine(self) -> Tensor:
        """Bool ``[n]``, False for dummies: sequences that the layout's sequence mask leaves out."""
        if self.layout is None:
            return torch.ones(self.num_sequences, dtype=torch.bool, device=self.rewards.device)
        return self.layout.sequence_mask().to(self.rewards.device)

    @property
    def counted(self) -> Tensor:
        """Bool ``[n]``: the sequences that have a reward and count.

        Not dummies, nor what the layout's sequence mask drops (dynamic sampling), nor what no reward scored. Take
        statistics of rewards over these.
        """
        assert self.scored is not None
        return self.scored.any(1)

    def group_mean(self, values: Tensor) -> Tensor:
        """Mean over the `counted` members of each sequence's group.

        Args:
            values: Of the sequences, ``[n]``; whatever sequences that do not count hold is ignored.

        Returns:
            Float64 ``[n]``; 0 where no member of the group counts. Scope: group. Gradient: none.

        Raises:
            ShapeError: If there is not one value per sequence.

        Example:
            >>> rewards, scored = torch.tensor([1.0, 0.0, 9.0]), torch.tensor([[True], [True], [False]])
            >>> rollouts = Rollouts(rewards=rewards, scored=scored, group_ids=torch.tensor([0, 0, 0]))
            >>> rollouts.group_mean(rewards)
            tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
        """
        check_shape("values", values, (self.num_sequences,), "one value per sequence")
        counted, index = self.counted, self.groups.index
        zeros = torch.zeros(self.groups.count, dtype=torch.float64, device=values.device)
        total = zeros.index_add(0, index, select(values.detach().double(), counted))
        return (total / zeros.index_add(0, index, counted.double()).clamp_min(1.0))[index]

    @property
    def group_mask(self) -> Tensor:
        """Bool ``[g]``: the groups with a genuine member."""
        members = torch.zeros(self.groups.count, dtype=torch.float64, device=self.rewards.device)
        return members.index_add(0, self.groups.index, self.genuine.double()) > 0

    def tokens(self, reader: str) -> TokenLayout:
        """The layout, which ``reader`` needs.

        Raises:
            MissingColumnError: If the rollouts came without one.
        """
        if self.layout is None:
            raise MissingColumnError(
                f"{reader} reads tokens, but the rollouts carry no layout. "
                "Give Rollouts(layout=PaddedLayout(mask)) or a PackedLayout."
            )
        return self.layout


_COLUMNS = tuple(one.name for one in dataclasses.fields(Rollouts) if one.name in COLUMNS)
_TOKEN_COLUMNS = tuple(name for name in _COLUMNS if COLUMNS[name].per == "token")
_SEQUENCE_COLUMNS = tuple(name for name in _COLUMNS if COLUMNS[name].per == "sequence")


def check_rollouts(rollouts: object) -> None:
    """Raise a `ShapeError` unless these are `Rollouts`."""
    if not isinstance(rollouts, Rollouts):
        raise ShapeError(
            f"rollouts is {type(rollouts).__name__}; expected Rollouts. Give Rollouts(rewards=..., group_ids=...)."
        )
