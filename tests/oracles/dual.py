"""Dual numbers: exact derivatives of plain-Python formulas, without any tensor library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


class Dual:
    """A value and its derivative in one chosen variable."""

    def __init__(self, value: float, slope: float = 0.0) -> None:
        self.value, self.slope = float(value), float(slope)

    def __add__(self, other: Dual | float) -> Dual:
        other = lift(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other: Dual | float) -> Dual:
        other = lift(other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.slope)

    def __sub__(self, other: Dual | float) -> Dual:
        return self + -lift(other)

    def __rsub__(self, other: float) -> Dual:
        return lift(other) - self

    def __truediv__(self, other: float) -> Dual:
        return Dual(self.value / other, self.slope / other)

    __radd__, __rmul__ = __add__, __mul__


def lift(number: Dual | float) -> Dual:
    return number if isinstance(number, Dual) else Dual(number)


def stop(number: Dual | float) -> Dual:
    """Stop-gradient."""
    return Dual(lift(number).value)


def exp(x: Dual | float) -> Dual:
    x = lift(x)
    return Dual(math.exp(x.value), math.exp(x.value) * x.slope)


def sigmoid(x: Dual) -> Dual:
    up, down = 1.0 / (1.0 + math.exp(-x.value)), 1.0 / (1.0 + math.exp(x.value))
    return Dual(up, up * down * x.slope)


def larger(x: Dual | float, y: Dual | float) -> Dual:
    """Maximum; at a tie the first argument rules."""
    x, y = lift(x), lift(y)
    return y if y.value > x.value else x


def smaller(x: Dual | float, y: Dual | float) -> Dual:
    """Minimum; at a tie the first argument rules."""
    x, y = lift(x), lift(y)
    return y if y.value < x.value else x


def clip(x: Dual, low: float, high: float) -> Dual:
    return smaller(larger(x, low), high)


def total(terms: Sequence[Dual]) -> Dual:
    return Dual(math.fsum(term.value for term in terms), math.fsum(term.slope for term in terms))


def value_and_slope(
    loss: Callable[[list[Dual]], list[Dual]], logprobs: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Token losses of one sequence, and the derivative of their sum in each log-probability."""
    values = [term.value for term in loss([Dual(x) for x in logprobs])]
    slopes = []
    for position in range(len(logprobs)):
        seeded = [Dual(x, float(place == position)) for place, x in enumerate(logprobs)]
        slopes.append(total(loss(seeded)).slope)
    return values, slopes
