"""Coefficients that follow a target: explicit values that a trainer keeps, never state inside a loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlobjectives.checks import check_number
from rlobjectives.options import bounds, check_fields, option

__all__ = ["AdaptiveCoefficient", "SteppedCoefficient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveCoefficient:
    """A KL coefficient in proportional control: it grows while the divergence is above target.

        β ← β·(1 + clip(KL/target − 1, ±clip)·n / horizon)

    A plain value: `update` returns the next one. Feed it a metric of `Window.summarize`, which is the same
    number on every rank, and build the next step's penalty with the new coefficient.

    Args:
        coef: β > 0 now.
        target: Divergence to hold, in the unit of what is fed (nats a token for ``policy/kl_to_ref``).
        horizon: Sequences over which a full error multiplies β by about e^clip.
        clip: Bound on the relative error of one update.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        Ziegler et al., arXiv:1909.08593, Sec. 2.2; verl, OpenRLHF and TRL's PPO use these numbers.

    Example:
        >>> coefficient = AdaptiveCoefficient(coef=0.1, target=0.06)
        >>> coefficient.update(0.09, sequences=256)
        AdaptiveCoefficient(coef=0.100512, target=0.06, horizon=10000, clip=0.2)

        A trainer's step ends with::

            coefficient = coefficient.update(metrics["policy/kl_to_ref"], sequences=256)
            objective = replace(objective, kl=replace(objective.kl, coef=coefficient.coef))
    """

    coef: float = field(metadata=bounds(low=0, open_low=True))
    target: float = field(metadata=bounds(low=0, open_low=True))
    horizon: float = option(10_000, low=0, open_low=True)
    clip: float = option(0.2, low=0, open_low=True)

    def __post_init__(self) -> None:
        check_fields(self)

    def update(self, divergence: float, *, sequences: float) -> AdaptiveCoefficient:
        """The coefficient after a step.

        Args:
            divergence: What the step measured.
            sequences: Sequences in the step.
        """
        check_number("divergence", divergence)
        check_number("sequences", sequences, low=0.0)
        error = min(max(divergence / self.target - 1.0, -self.clip), self.clip)
        return replace(self, coef=self.coef * (1.0 + error * sequences / self.horizon))


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedCoefficient:
    """An entropy coefficient that moves by a fixed step, and rests while entropy is above its target.

        c ← c + step  where H ≤ target, else c − step, within [low, high]        in force: c·[H ≤ target]

    A plain value, like `AdaptiveCoefficient`: the objective of the next step takes `active`.

    Args:
        coef: c ≥ 0 now.
        target: Entropy to keep, in nats a token.
        step: Change of one update.
        low: Smallest coefficient.
        high: Largest coefficient.
        entropy: What the last step measured; None before the first.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        Skywork-OR1, arXiv:2505.22312, Eq. 3-4; TRL's adaptive entropy.

    Example:
        >>> coefficient = SteppedCoefficient(target=0.3, step=0.01).update(0.2)
        >>> coefficient.coef, coefficient.active, coefficient.update(0.4).active
        (0.01, 0.01, 0.0)

        A trainer's step ends with::

            coefficient = coefficient.update(metrics["policy/entropy"])
            objective = replace(objective, entropy_coef=coefficient.active)
    """

    target: float = field(metadata=bounds(low=0))
    coef: float = 0.0
    step: float = option(0.005, low=0, open_low=True)
    low: float = option(0.0, low=0)
    high: float = 1.0
    entropy: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("high", self.high, low=self.low)
        check_number("coef", self.coef, low=self.low, high=self.high)

    @property
    def active(self) -> float:
        """The coefficient in force: 0 while the last measured entropy is above target."""
        return self.coef if self.entropy is None or self.entropy <= self.target else 0.0

    def update(self, entropy: float) -> SteppedCoefficient:
        """The coefficient after a step that measured this entropy."""
        check_number("entropy", entropy)
        moved = self.coef + (self.step if entropy <= self.target else -self.step)
        return replace(self, coef=min(max(moved, self.low), self.high), entropy=entropy)
