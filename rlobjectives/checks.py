"""Shape, dtype and finiteness checks with messages a user can act on."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlobjectives.errors import CapabilityError, NonFiniteError, RLObjectivesError, ShapeError
from rlobjectives.masking import count, select

__all__ = [
    "check_choice",
    "check_ddof",
    "check_finite",
    "check_floating",
    "check_integral",
    "check_mask",
    "check_number",
    "check_numbers",
    "check_options",
    "check_positive_int",
    "check_seed",
    "check_shape",
    "check_tensor",
    "nonfinite_count",
    "refuse_booleans",
    "refuse_rows",
]


def check_tensor(name: str, value: object) -> None:
    """Raise a `ShapeError` unless ``value`` is a tensor: lists and arrays are not converted behind anyone's back."""
    if not isinstance(value, Tensor):
        raise ShapeError(
            f"{name} is {value.__class__.__name__}; expected torch.Tensor. Convert it with "
            "`torch.as_tensor(...)`, on the device of the other columns."
        )


def check_shape(name: str, value: Tensor, expected: tuple[int, ...], why: str) -> None:
    """Raise a `ShapeError` unless ``value`` has exactly the shape ``expected``.

    Nothing here broadcasts: a ``[b, 1]`` loss against a ``[b, t]`` mask is the classic silent bug.
    """
    check_tensor(name, value)
    if tuple(value.shape) != tuple(expected):
        raise ShapeError(
            f"{name} has shape {list(value.shape)}; expected {list(expected)} ({why}). "
            "Nothing is broadcast: give the tensor in that shape."
        )


def check_mask(name: str, value: Tensor, *, meaning: str = "the token counts") -> None:
    """Raise unless ``value`` is a boolean tensor, True where ``meaning`` (an integer mask is refused, not guessed)."""
    check_tensor(name, value)
    if value.dtype is not torch.bool:
        raise ShapeError(
            f"{name} has dtype {value.dtype}; expected torch.bool, True where {meaning}. "
            f"Convert it with `{name.rsplit('.', 1)[-1]}.bool()`."
        )


def check_floating(name: str, value: Tensor) -> None:
    """Raise unless ``value`` has a floating-point dtype."""
    check_tensor(name, value)
    if not value.is_floating_point():
        raise ShapeError(f"{name} has dtype {value.dtype}; expected a floating-point dtype.")


def check_integral(name: str, value: Tensor, *, meaning: str = "such as torch.int64") -> None:
    """Raise unless ``value`` holds integers, ``meaning`` says which; strings are to be numbered by the caller."""
    check_tensor(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise ShapeError(f"{name} has dtype {value.dtype}; expected integers, {meaning}.")


def nonfinite_count(value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Number of NaN and infinite entries at places that count, as a 0-d tensor (no host sync)."""
    if not (value.is_floating_point() or value.is_complex()):
        return torch.zeros((), dtype=torch.int64, device=value.device)
    rest = value - value  # 0, or NaN for what is not finite: far cheaper than asking each
    return count(rest if mask is None else select(rest, mask))


def check_finite(name: str, value: Tensor, mask: Tensor | None = None) -> None:
    """Raise a `NonFiniteError` if a counted entry is NaN or infinite.

    This reads the device; it belongs at the data boundary, never in a hot path.
    """
    count = int(nonfinite_count(value, mask))
    if count:
        total = value.numel() if mask is None else int(mask.sum())
        raise NonFiniteError(
            f"{name} has {count:,} non-finite values among {total:,}. Non-finite input is never "
            "repaired: find its source, or mask the place out."
        )


def refuse_booleans(name: str, rewards: Tensor) -> None:
    """Raise if ``rewards`` are boolean: nobody said what True is worth."""
    if rewards.dtype is torch.bool:
        raise ShapeError(
            f"{name} has dtype torch.bool; expected numbers. Say what True is worth, for example `{name}.float()`."
        )


def refuse_rows(
    bad: Tensor,
    what: str,
    remedy: str,
    error: type[RLObjectivesError] = CapabilityError,
    *,
    unit: str = "sequence",
    ids: Tensor | None = None,
) -> None:
    """Raise if any row of data is flagged, naming the first few.

    This reads the device, once a rollout; it belongs where data enter, never in a hot path.

    Args:
        bad: Bool ``[n]``.
        what: What is wrong with those rows, to stand after "2 of 9 sequences".
        remedy: What to do.
        error: The kind of error.
        unit: What a row is.
        ids: What the caller calls each row, ``[n]``; by default its position.
    """
    if bool(bad.any()):
        rows = (bad.nonzero().flatten() if ids is None else ids[bad]).tolist()
        shown = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
        raise error(f"{len(rows):,} of {bad.numel():,} {unit}s {what} ({unit} {shown}). {remedy}")


def check_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless ``value`` is a finite real number in the given interval (bools are refused)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CapabilityError(
            f"{name} is {value!r}; expected a number, not {type(value).__name__}.{_as_number(value)}"
        )
    inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not -math.inf < value < math.inf or abs(value) > sys.float_info.max or not inside:
        left = "(" if open_low or low == -math.inf else "["
        right = ")" if open_high or high == math.inf else "]"
        raise CapabilityError(
            f"{name} is {value!r}; expected a finite number in {left}{low:g}, {high:g}{right}."
        )


def _as_number(value: object) -> str:
    """How to write a number that arrived as text: YAML takes ``4e-4`` for a word."""
    try:
        float(str(value))
    except ValueError:
        return ""
    if not isinstance(value, str):
        return ""
    head, exponential, power = value.strip().lower().partition("e")
    if not exponential:
        return f" Write {head} without quotes."
    written = f"{head if '.' in head else f'{head}.0'}e{power if power[0] in '+-' else f'+{power}'}"
    return f" In YAML write {written}: without a dot and a sign it is text."


def check_numbers(name: str, values: Sequence[object] | None, *, low: float = -math.inf) -> None:
    """Raise unless ``values`` is None or a sequence of finite real numbers of at least ``low``."""
    if values is not None and (isinstance(values, str) or not isinstance(values, Sequence)):
        raise CapabilityError(f"{name} is {values!r}; expected a list of numbers, or None.")
    for position, value in enumerate(values or ()):
        check_number(f"{name}[{position}]", value, low=low)


def check_positive_int(name: str, value: object) -> None:
    """Raise unless ``value`` is an integer of at least 1 (True is refused)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CapabilityError(f"{name} is {value!r}; expected a positive integer.")


def check_ddof(name: str, value: object) -> None:
    """Raise unless ``value`` is 1 (sample) or 0 (population); False and True are neither."""
    if isinstance(value, bool) or value not in (0, 1):
        raise CapabilityError(f"{name} is {value!r}; expected 1 (sample) or 0 (population).")


def check_options(where: str, kind: type, options: Iterable[str]) -> None:
    """Raise unless a dataclass takes every option of these names."""
    names = [one.name for one in dataclasses.fields(kind) if one.init]
    for option in options:
        if option not in names:
            close = difflib.get_close_matches(str(option), names, n=1)
            raise CapabilityError(
                f"{where}: {kind.__name__} has no option {option!r}; it has {', '.join(names) or 'none'}."
                + (f" Did you mean {close[0]!r}?" if close else "")
            )


def check_seed(seed: object) -> None:
    """Raise unless ``seed`` is an integer, or None for the run's own (True is refused)."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise CapabilityError(f"seed is {seed!r}; expected an integer, or None for that of seed_everything.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the named choices."""
    if value not in choices:
        raise CapabilityError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")
