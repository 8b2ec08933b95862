"""Weights for the mismatch between the engine that samples and the one that trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.checks import check_number, shown
from rlobjectives.columns import Read, read
from rlobjectives.component import Component, Metric, WindowContext
from rlobjectives.corrections.base import PolicyCorrection, TokenWeights, denominator_conflict
from rlobjectives.corrections.mismatch import MISMATCH_METRICS, Mismatch, mismatch_metrics
from rlobjectives.corrections.rejection import Rejection, as_rejection
from rlobjectives.errors import CapabilityError
from rlobjectives.layouts import TokenLayout
from rlobjectives.masking import select
from rlobjectives.maths.ratios import LOG_RATIO_CLAMP, clamp_around, log_bound
from rlobjectives.options import option
from rlobjectives.statistics import Mean, Moments, Stat
from rlobjectives.token_parts import TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["ImportanceCorrection"]


_METRICS: Mapping[str, Metric] = {
    "correction/weight_": Metric(
        Moments, "ratio", "weights on the policy loss, dropped tokens as 0, mean and std"
    ),
    "correction/outside_fraction": Metric(Mean, "fraction", "tokens whose raw weight is outside the bounds"),
    "correction/dropped_fraction": Metric(Mean, "fraction", "tokens dropped from the policy loss"),
}


@dataclass(frozen=True, kw_only=True)
class ImportanceCorrection(PolicyCorrection):
    """Weights the policy loss by the ratio of the trainer's old policy to the policy that sampled.

        wₜ = exp(ℓₜᵒˡᵈ − ℓₜᵇ), held constant        policy lossₜ ← wₜ · policy lossₜ

    The sampler computes other numbers than the trainer even with the same weights; this corrects for it.
    Value and slope are multiplied, so it is exact for every loss that treats tokens one by one. A loss with
    one number per sequence (GSPO) cannot take weights that differ inside a sequence: that is refused, weights
    of whole sequences are not.

    Args:
        weight: ``"token"``: each token's own w. ``"sequence"``: the product over the sequence.
            ``"geometric"``: its geometric mean. ``"none"``: 1, to use the rejections alone.
        low: Smallest weight inside the bounds.
        high: Largest weight inside the bounds; None for no bound.
        outside: What happens outside the bounds: ``"truncate"`` to them (TIS), or ``"mask"`` (IcePop): the
            token, or with a sequence's weight the whole sequence, is dropped.
        reject: Further tests; whatever fails one is dropped. In a file, a test is the mapping of its options.
        veto: Drop every sequence with a token whose w is below this.
        normalize: Divide by the mean weight of the window's kept tokens, so that the mean becomes 1.
        denominator: ``"original"``: dropped tokens still count in the reduction's denominators. ``"kept"``:
            the policy loss is reduced as if they had been masked. Penalties and entropy are never touched.
        missing: What to do where `TokenBatch.behavior_known` is False: ``"error"``, or ``"one"``: weight 1,
            in no test and no metric.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        TIS: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
        IcePop: Ring-1T. verl bounds from above alone (2.0), OpenRLHF from both sides; TRL's default masks
        sequences by the product (``weight="sequence", outside="mask", high=3.0``). verl's rejection shrinks
        the mask and with it the denominators (``denominator="kept"``); AReaL keeps the original count. A NaN
        of the sampler becomes weight 1 in TRL and 0 in NeMo-RL; here it is an error unless `missing` and
        `behavior_known` say otherwise.

    Example:
        >>> ImportanceCorrection(outside="mask", low=0.5, high=5.0).declared_reads()[0].unknown
        False
    """

    metrics: ClassVar[Mapping[str, Metric]] = {**_METRICS, **MISMATCH_METRICS}
    examples = (
        {"reject": (Rejection(over="sum", high=1.0),)},
        {"reject": (Rejection(high=0.5),), "denominator": "kept"},
    )

    weight: Literal["token", "sequence", "geometric", "none"] = "token"
    low: float = option(0.0, low=0)
    high: float | None = 2.0
    outside: Literal["truncate", "mask"] = "truncate"
    reject: tuple[Rejection, ...] = ()
    veto: float | None = option(None, low=0, open_low=True)
    normalize: bool = False
    denominator: Literal["original", "kept"] = "original"
    missing: Literal["error", "one"] = "error"

    def check(self) -> None:
        """The interval is one, tests are tests, and something is left to do."""
        if self.high is not None:
            check_number("high", self.high, low=self.low, open_low=self.low == 0.0)
        if not isinstance(self.reject, (tuple, list)):
            raise CapabilityError(
                f"reject is {shown(self.reject)}; expected a list of tests, each a Rejection or its options."
            )
        object.__setattr__(self, "reject", tuple(as_rejection(test) for test in self.reject))
        if self.weight == "none" and (self.normalize or not (self.reject or self.veto)):
            raise CapabilityError(
                "weight is 'none', so the correction only drops tokens: give reject or veto, leave normalize "
                "off."
            )

    @property
    def token_level(self) -> bool:
        """Whether tokens of one sequence may get different weights."""
        return (
            self.weight == "token" or self.missing == "one" or any(test.token_level for test in self.reject)
        )

    @property
    def shrinks_denominator(self) -> bool:
        """Whether dropped tokens leave the denominators."""
        return self.denominator == "kept"

    def required(self) -> Capabilities:
        """The sampler's log-probabilities; those of the whole window first where weights depend on it."""
        sums = self.weight in ("sequence", "geometric") or bool(self.veto)
        own = Capabilities(
            requires_sampled_distribution=True,
            communicates_in_loss=sums
            or self.shrinks_denominator
            or any(not one.token_level for one in self.reject),
        )
        return super().required().merge(own)

    def declared_reads(self) -> tuple[Read, ...]:
        """The sampler's log-probabilities, which may be missing where that is weight 1."""
        return (read("behavior_logprobs", unknown=self.missing == "one"),)

    def declared_statistics(self) -> Mapping[str, type[Stat]]:
        """The mean weight, when normalising."""
        return {"weight": Mean} if self.normalize else {}

    def conflicts(self, parts: Mapping[str, Component], facts: TrainerFacts) -> Iterable[str]:
        """A loss that corrects by itself, and weights that a loss or a reduction cannot take, are refused; and correcting twice."""
        if facts.old_logprobs == "behavior":
            yield (
                "the policy loss already takes its ratio against the sampler's log-probabilities "
                '(old_logprobs = "behavior"), and ImportanceCorrection would count the same mismatch twice. '
                "Recompute old_logprobs with the trainer, or leave the correction out."
            )
        if facts.importance_correction:
            yield (
                "the trainer already weights tokens for the mismatch with the sampler, and "
                "ImportanceCorrection would do it again. Turn one of them off."
            )
        policy, reduction = parts.get("policy_loss"), parts.get("reduction")
        if policy is not None and "behavior_logprobs" in policy.required().reads:
            yield (
                f"{type(policy).__name__} takes its ratio against the policy that sampled, and "
                "ImportanceCorrection would count the same mismatch twice. Leave the correction out."
            )
        if isinstance(policy, TokenTerm) and policy.sequence_level and self.token_level:
            yield (
                f"{type(policy).__name__} has one number per sequence, and the correction's weights differ "
                "inside a sequence, so its slope would be wrong. Use weight='sequence' or 'geometric', and "
                "tests over sequences."
            )
        yield from denominator_conflict(self, reduction)

    def statistics(self, tokens: TokenBatch, context: WindowContext) -> dict[str, Stat]:
        """Weights of one micro-batch, before normalising."""
        mismatch = Mismatch.of(tokens, context)
        weight, keep, _ = self._weights(mismatch, tokens.layout)
        return {"weight": Mean.of(weight, keep)}

    def token_weights(self, tokens: TokenBatch, context: WindowContext) -> TokenWeights:
        """Weight, verdict and metrics of each token."""
        _refuse_double(tokens)
        mismatch, mask = Mismatch.of(tokens, context), tokens.layout.mask
        weight, keep, outside = self._weights(mismatch, tokens.layout)
        if self.normalize:
            mean = context.get("weight", Mean)
            weight = weight / torch.where(mean.value > 0, mean.value, 1.0)
        weight = select(weight, keep)
        metrics: dict[str, Stat] = {
            "correction/weight_": Moments.of(weight, mask),
            "correction/outside_fraction": Mean.of(outside, mask),
            "correction/dropped_fraction": Mean.of(~keep, mask),
            **mismatch_metrics(mismatch, tokens),
        }
        return TokenWeights(weight, keep, metrics)

    def keep(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        """Which tokens stay."""
        return self._weights(Mismatch.of(tokens, context), tokens.layout)[1]

    def _weights(self, mismatch: Mismatch, layout: TokenLayout) -> tuple[Tensor, Tensor, Tensor]:
        log, keep = mismatch.log, layout.mask
        if self.weight == "sequence":
            log = mismatch.spread(mismatch.sum(log))
        elif self.weight == "geometric":
            log = mismatch.spread(mismatch.sum(log) / mismatch.counts)
        clamp = clamp_around(LOG_RATIO_CLAMP, self.low, self.high)
        assert clamp is not None
        weight = log.clamp(-clamp, clamp).exp()
        high = torch.inf if self.high is None else self.high
        # As logarithms: a weight that was held before exp says nothing about a bound beyond.
        outside = layout.mask & ((log < log_bound(self.low)) | (log > log_bound(self.high)))
        if self.weight == "none":
            weight, outside = torch.ones_like(weight), torch.zeros_like(outside)
        elif self.outside == "mask":
            keep = keep & ~outside
        weight = weight.clamp(self.low, high) if self.weight != "none" else weight
        for test in self.reject:
            keep = keep & (
                test.passes(mismatch) | ~mismatch.known if test.token_level else test.passes(mismatch)
            )
        if self.veto is not None:
            keep = keep & Rejection(over="max", low=self.veto).passes(mismatch)
        return weight, keep, outside


def _refuse_double(tokens: TokenBatch) -> None:
    old, behavior = tokens.old_logprobs, tokens.behavior_logprobs
    same = old is not None and behavior is not None and old.numel() > 0
    if same and old is not None and behavior is not None and old.data_ptr() == behavior.data_ptr():
        raise CapabilityError(
            "old_logprobs and behavior_logprobs are the same tensor: every weight is 1, and the policy loss "
            "takes its ratio against the sampler already. Recompute old_logprobs with the trainer, or leave "
            "the correction out."
        )
