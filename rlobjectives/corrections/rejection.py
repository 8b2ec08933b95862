"""Tests that tokens or whole sequences must pass to stay in the policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlobjectives.checks import check_number, check_options, shown
from rlobjectives.corrections.mismatch import Mismatch
from rlobjectives.errors import CapabilityError
from rlobjectives.maths.ratios import log_bound
from rlobjectives.options import check_fields, option

__all__ = ["Rejection", "as_rejection"]

_LARGEST_EXPONENT = 700.0  # float64 ends at 709


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A test that tokens or whole sequences must pass to stay in the policy loss.

    With ``x = log w`` of each token the measure is k1 = x, k2 = x²/2 or k3 = e^x − 1 − x. For k1 the bounds
    are on the ratio ``exp(·)``, for k2 and k3 on the measure itself.

    Args:
        measure: ``"k1"``, ``"k2"`` or ``"k3"``.
        over: ``"token"``: each token by itself. ``"sum"`` and ``"mean"``: of the sequence. ``"max"``: every
            token of the sequence must pass.
        high: Largest value that passes; None for no bound.
        low: Smallest value that passes; None for no bound. For k2 and k3, which are never negative, leave it
            out.

    Raises:
        CapabilityError: If there is no bound, or the bounds are out of order.

    Source:
        verl's ``rollout_rs`` (whose single k1 threshold u means [1/u, u]), AReaL's rejection sampling; k1
        over the mean with bounds around 1 is the sequence mask of NeMo-RL (0.999, 1.002), slime and OpenRLHF.

    Example:
        >>> Rejection(measure="k1", over="mean", low=0.999, high=1.002).token_level
        False
    """

    measure: Literal["k1", "k2", "k3"] = "k1"
    over: Literal["token", "sum", "mean", "max"] = "token"
    high: float | None = None
    low: float | None = option(None, low=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.high is None and self.low is None:
            raise CapabilityError("Rejection has no bound. Give high, low, or both.")
        if self.low is not None and self.measure != "k1":
            raise CapabilityError(
                f"low is {shown(self.low)}; {self.measure} is never negative, so give high alone."
            )
        if self.high is not None:
            check_number("high", self.high, low=self.low or 0.0)

    @property
    def token_level(self) -> bool:
        """Whether tokens of one sequence may fare differently."""
        return self.over == "token"

    def passes(self, mismatch: Mismatch) -> Tensor:
        """Which tokens pass, bool, shaped like the mask."""
        x = mismatch.log
        if self.measure == "k1":
            score = x
        elif self.measure == "k2":
            score = x.square() / 2.0
        else:
            score = torch.expm1(x.clamp_max(_LARGEST_EXPONENT)) - x
        if self.over in ("sum", "mean"):
            score = mismatch.spread(mismatch.sum(score) / (mismatch.counts if self.over == "mean" else 1.0))
        passed = self._within(score)
        if self.over == "max":
            failures = mismatch.sum((~passed).to(x.dtype))
            return mismatch.spread(failures) == 0
        return passed

    def _within(self, score: Tensor) -> Tensor:
        # k1's bounds are on a ratio, and compared as logarithms: none is then beyond what exp can reach.
        low, high = self.low, self.high
        if self.measure == "k1":
            low, high = (None if bound is None else log_bound(bound) for bound in (low, high))
        passed = torch.ones_like(score, dtype=torch.bool)
        if high is not None:
            passed = passed & (score <= high)
        if low is not None:
            passed = passed & (score >= low)
        return passed


def as_rejection(test: object) -> Rejection:
    """A test, made from its options where a file gives them."""
    if isinstance(test, Mapping):
        check_options("reject", Rejection, test)
        return Rejection(**test)
    if not isinstance(test, Rejection):
        raise CapabilityError(
            f"reject holds {shown(test)}; expected Rejection(measure=..., over=..., high=...)."
        )
    return test
