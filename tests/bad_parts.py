"""Parts that each break one law, and how they would be right: what `check_part` must catch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives import (
    Capabilities,
    Estimator,
    LossReduction,
    Mean,
    Metric,
    Moments,
    PolicyLoss,
    Rollouts,
    Stat,
    Sum,
    TokenBatch,
    TokenLayout,
    TokenLoss,
    TokenMetric,
    WindowContext,
)


class Plain(PolicyLoss):
    """The score-function loss, right: what the bad ones are made from."""

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        advantages = tokens.need("advantages", "Plain")
        return TokenLoss(-advantages * tokens.logprobs, -advantages)


class WrongSign(PolicyLoss):
    """The slope of the loss that is to be maximised."""

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        advantages = tokens.need("advantages", "WrongSign")
        return TokenLoss(-advantages * tokens.logprobs, advantages)


class HalfDetached(PolicyLoss):
    """A ratio against the wrong tensor: one of two factors has lost its graph."""

    def value(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        ratio = (tokens.logprobs - tokens.old()).exp()
        return -tokens.need("advantages", "HalfDetached") * ratio * ratio.detach()


class NoGraph(PolicyLoss):
    """A value from detached log-probabilities: it would train nothing."""

    def value(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        return -tokens.need("advantages", "NoGraph") * tokens.logprobs.detach()


class BatchCentred(PolicyLoss):
    """Subtracts the mean of its micro-batch, and does not say so."""

    def value(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        advantages = tokens.layout.select(tokens.need("advantages", "BatchCentred"))
        return -(advantages - advantages.sum() / tokens.layout.mask.sum().clamp_min(1)) * tokens.logprobs


class SaidBatchCentred(BatchCentred):
    """Says so."""

    capabilities: ClassVar[Capabilities] = Capabilities(depends_on_cut=True)


class OwnSequenceSums(PolicyLoss):
    """Adds up the tokens at hand, which is not the sequence where ranks share it."""

    def value(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        layout = tokens.layout
        total = layout.segment_sum(tokens.logprobs - tokens.old())
        return -tokens.need("advantages", "OwnSequenceSums") * layout.expand(total.clamp(-1, 1).exp())


class MaskByProduct(PolicyLoss):
    """Multiplies by the mask before a sum over the sequence: NaN times 0 is NaN."""

    def value(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        size = (tokens.old() * tokens.layout.mask).sum() * 0.0
        return -tokens.need("advantages", "MaskByProduct") * tokens.logprobs + size


class PaddedMetric(PolicyLoss):
    """Reports a mean that counts padding."""

    metrics: ClassVar[Mapping[str, Metric]] = {"own/mean": Metric(Mean, "nats", "a mean")}

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        found = Plain().value_and_slope(tokens, context)
        return found._replace(metrics={"own/mean": Mean.of(tokens.logprobs.detach())})


class Whitened(Estimator):
    """Standardises over every sequence it sees, dropped ones included."""

    window_statistics: ClassVar[Mapping[str, type[Stat]]] = {"rewards": Moments}

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return rollouts.rewards.sum(1)

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        return {"rewards": Moments.of(estimate)}

    def finalize(self, estimate: Tensor, layout: TokenLayout, context: WindowContext) -> Tensor:
        rewards = context["rewards"]
        assert isinstance(rewards, Moments)
        return (estimate - rewards.mean) / (rewards.std(ddof=1) + 1e-6)


class GoodWhitened(Whitened):
    """Over those that count."""

    def statistics(self, estimate: Tensor, layout: TokenLayout) -> dict[str, Stat]:
        return {"rewards": Moments.of(estimate, layout.sequence_mask())}


class GroupMean(Estimator):
    """The mean of a group over all of its rows, dropped ones included."""

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2)

    def estimate(self, rollouts: Rollouts) -> Tensor:
        total, index = rollouts.rewards.sum(1), rollouts.groups.index
        zero = total.new_zeros(rollouts.groups.count)
        sums = zero.index_add(0, index, total)
        counts = zero.index_add(0, index, torch.ones_like(total))
        return total - (sums / counts)[index]


class ByPosition(Estimator):
    """Weighs a reward by where its sequence stands in the batch."""

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return rollouts.rewards.sum(1) * torch.arange(1, rollouts.num_sequences + 1)


class Rounded(Estimator):
    """A sum of squares minus a square of sums: not quite 0 for equal rewards, and lost at an offset."""

    capabilities: ClassVar[Capabilities] = Capabilities(min_group_size=2)

    def estimate(self, rollouts: Rollouts) -> Tensor:
        total = rollouts.rewards.sum(1)
        mean = rollouts.group_mean(total)
        spread = (rollouts.group_mean(total.square()) - mean.square()).clamp_min(0).sqrt()
        return torch.where(rollouts.counted, (1.1 * total - 1.1 * mean) / (spread + 1e-6), 0.0)


class RunningMean(Estimator):
    """Subtracts a mean over all rewards that this rank has ever seen."""

    def __init__(self) -> None:
        self.total = self.count = 0.0

    def estimate(self, rollouts: Rollouts) -> Tensor:
        baseline = self.total / max(self.count, 1.0)
        self.total += float(rollouts.rewards.sum())
        self.count += float(rollouts.rewards.shape[0])
        return rollouts.rewards.sum(1) - baseline


class HiddenRunningMean(RunningMean):
    """The same, and keeps the ranks from comparing it."""

    may_differ: ClassVar[frozenset[str]] = frozenset({"total", "count"})


class Hidden(PolicyLoss):
    """Has an option that ranks are told not to compare."""

    may_differ: ClassVar[frozenset[str]] = frozenset({"coef"})

    def __init__(self, coef: float = 0.5) -> None:
        self.coef = coef

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        advantages = self.coef * tokens.need("advantages", "Hidden")
        return TokenLoss(-advantages * tokens.logprobs, -advantages)


_COEFS: dict[int, float] = {}


class Elsewhere(Plain):
    """Keeps its option where nobody looks."""

    def __init__(self, coef: float = 0.5) -> None:
        _COEFS[id(self)] = coef

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        found, coef = super().value_and_slope(tokens, context), _COEFS.get(id(self), 0.5)
        return TokenLoss(coef * found.value, coef * found.slope)


class Unchecked(Plain):
    """Takes anything for its option."""

    def __init__(self, coef: float = 0.5) -> None:
        self.coef = coef


class Locked(Plain):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Waits(PolicyLoss):
    """Reads a number back from the device."""

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        advantages = tokens.need("advantages", "Waits")
        largest = max(float(tokens.layout.select(advantages).abs().sum()), 0.0)
        return TokenLoss(-advantages * tokens.logprobs + 0.0 * largest, -advantages)


class ReadsMore(PolicyLoss):
    """Reads a column that it does not declare."""

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        found = Plain().value_and_slope(tokens, context)
        teacher = tokens.need("teacher_logprobs", "ReadsMore")
        return found._replace(value=found.value + teacher - teacher.detach())


class EstimatesFromMore(Estimator):
    """Reads a column of rollouts that it does not declare."""

    token_level = True

    def estimate(self, rollouts: Rollouts) -> Tensor:
        layout = rollouts.tokens("EstimatesFromMore")
        return layout.select(layout.expand(rollouts.rewards.sum(1)) + rollouts.need("values", self))


class PaddedTokenMetric(TokenMetric):
    """Reports a mean over padding too."""

    metrics: ClassVar[Mapping[str, Metric]] = {"own/mean": Metric(Mean, "nats", "over padding too")}

    def measure(self, tokens: TokenBatch, context: WindowContext) -> Mapping[str, Stat]:
        del context
        return {"own/mean": Mean.of(tokens.logprobs)}


class GoodTokenMetric(PaddedTokenMetric):
    """Over the tokens that count."""

    def measure(self, tokens: TokenBatch, context: WindowContext) -> Mapping[str, Stat]:
        del context
        return {"own/mean": Mean.of(tokens.logprobs, tokens.layout.mask)}


class CountsEmpty(LossReduction):
    """Divides by the sequences at hand."""

    averages: ClassVar[bool] = True

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        return 1.0 / (layout.num_sequences * layout.token_counts().clamp_min(1.0))


class NoMean(LossReduction):
    """Says that it averages, and counts one token too many."""

    averages: ClassVar[bool] = True

    def weights(self, layout: TokenLayout, context: WindowContext) -> Tensor:
        return 1.0 / (context.sequences * (1.0 + layout.token_counts()))


def padded_metric(rollouts: Rollouts) -> dict[str, Stat]:
    """Counts dropped sequences, and reports nothing where there is none."""
    if not rollouts.num_sequences:
        return {}
    return {"own/reward_": Moments.of(rollouts.rewards[:, 0])}


def good_metric(rollouts: Rollouts) -> dict[str, Stat]:
    """Over the sequences that count."""
    assert rollouts.scored is not None
    return {
        "own/reward_": Moments.of(rollouts.rewards[:, 0], rollouts.scored[:, 0]),
        "own/n": Sum.of(rollouts.counted),
    }
