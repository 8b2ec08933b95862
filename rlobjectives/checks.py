"""Shape, dtype and finiteness checks with messages a user can act on."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlobjectives._moved import moved_names
from rlobjectives.errors import CapabilityError, NonFiniteError, RLObjectivesError, ShapeError
from rlobjectives.masking import count, select

__all__ = [
    "check_choice",
    "check_device",
    "check_finite",
    "check_floating",
    "check_int",
    "check_integral",
    "check_logprobs",
    "check_mask",
    "check_number",
    "check_numbers",
    "check_options",
    "check_positive_int",
    "check_reward_names",
    "check_seed",
    "check_shape",
    "check_tensor",
    "logprob_excess",
    "nonfinite_count",
    "refuse_booleans",
    "refuse_rows",
    "shown",
    "suggestion",
]

ABOVE_ZERO = (
    "A log-probability is at most 0: were probabilities given, or logits, or negative log-likelihoods? Give "
    "log_softmax(logits / temperature) at the token's id."
)
_ROUNDINGS, _ROUNDINGS_64 = 4, 4096
_INT64 = range(-(2**63), 2**63)


def shown(value: object) -> str:
    """How a value is shown in a message: a long one by its beginning."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def suggestion(name: object, known: Iterable[str], quote: str = "'") -> str:
    """The question whether a known name was meant, after a space; nothing where none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {quote}{close[0]}{quote}?" if close else ""


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


def check_device(name: str, value: Tensor, device: torch.device, of: str) -> None:
    """Raise a `ShapeError` unless ``value`` is on the device that ``of`` is on."""
    if value.device != device:
        raise ShapeError(
            f"{name} is on {value.device}, but {of} is on {device}; expected one device for all columns. Nothing is "
            f"moved: give `{name.rsplit('.', 1)[-1]}.to({str(device)!r})`."
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


def logprob_excess(logprobs: Tensor) -> Tensor:
    """0 where an entry may be a log-probability; NaN or infinite where it is not finite, and positive where it is above 0.

    Rounding may put one above 0, by as much as the next narrower precision can be off: columns of float32 may have been
    computed in bfloat16, those of float64 in float32. Probabilities given in their place are far above.
    """
    if logprobs.dtype is torch.float64:
        ceiling = _ROUNDINGS_64 * torch.finfo(torch.float32).eps
    else:
        ceiling = _ROUNDINGS * torch.finfo(torch.bfloat16).eps
    return logprobs - logprobs.clamp_max(ceiling)


def check_logprobs(name: str, value: Tensor, mask: Tensor | None = None) -> None:
    """Raise a `NonFiniteError` if a counted entry is NaN, infinite, or above 0 beyond rounding.

    This reads the device, like `check_finite`.
    """
    excess = logprob_excess(value)
    check_finite(name, excess, mask)
    above = int(count(excess if mask is None else select(excess, mask)))
    if above:
        total = value.numel() if mask is None else int(mask.sum())
        raise NonFiniteError(f"{name} has {above:,} values above 0 among {total:,} that count. {ABOVE_ZERO}")


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
    """Raise if ``rewards`` are boolean, for nobody said what True is worth, or complex."""
    if rewards.is_complex():
        raise ShapeError(f"{name} has dtype {rewards.dtype}; expected real numbers.")
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
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise unless ``value`` is a finite real number in the given interval that ``dtype`` holds (bools are refused)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CapabilityError(
            f"{name} is {shown(value)}; expected a number, not {type(value).__name__}.{_as_number(value)}"
        )
    if isinstance(value, int) and not _INT64.start <= value < _INT64.stop:
        raise CapabilityError(
            f"{name} is {shown(value)}; expected a number of at most 64 bits. Write it with a decimal point."
        )
    inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    finite = abs(value) <= torch.finfo(dtype).max
    if not finite or not inside:
        left = "(" if open_low or low == -math.inf else "["
        right = ")" if open_high or high == math.inf else "]"
        raise CapabilityError(
            f"{name} is {shown(value)}; expected a finite number in {left}{low:g}, {high:g}{right}"
            f"{'' if finite else f', and one that {dtype} holds'}."
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
    if values is not None and (isinstance(values, (str, bytes)) or not isinstance(values, Sequence)):
        raise CapabilityError(f"{name} is {shown(values)}; expected a list of numbers, or None.")
    if values is not None and not len(values):
        raise CapabilityError(f"{name} is empty; expected one number for each, or None.")
    for position, value in enumerate(() if values is None else values):
        check_number(f"{name}[{position}]", value, low=low, dtype=torch.float64)


def check_positive_int(name: str, value: object) -> None:
    """Raise unless ``value`` is an integer of at least 1 (True is refused)."""
    check_int(name, value, low=1, what="a positive integer")


def check_int(name: str, value: object, *, low: int, what: str = "") -> None:
    """Raise unless ``value`` is an integer of at least ``low`` and at most 64 bits (True is refused)."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value < _INT64.stop:  # type: ignore[operator]  # compared only if whole
        expected = what or f"an integer of at least {low}"
        raise CapabilityError(f"{name} is {shown(value)}; expected {expected} of at most 64 bits.")


def check_options(where: str, kind: type, options: Iterable[str]) -> None:
    """Raise unless a dataclass takes every option of these names."""
    names = [one.name for one in dataclasses.fields(kind) if one.init]
    for option in options:
        if option not in names:
            raise CapabilityError(
                f"{where}: {kind.__name__} has no option {shown(option)}; it has {', '.join(names) or 'none'}."
                + suggestion(option, names)
            )


def check_seed(seed: object) -> None:
    """Raise unless ``seed`` is an integer, or None for the run's own (True is refused)."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise CapabilityError(
            f"seed is {shown(seed)}; expected an integer, or None for that of seed_everything."
        )


def check_choice(name: str, value: object, choices: tuple[str | int, ...]) -> None:
    """Raise unless ``value`` is one of the named choices (True is no 1)."""
    if type(value) not in (str, int) or value not in choices:
        raise CapabilityError(f"{name} is {shown(value)}; expected one of {', '.join(map(repr, choices))}.")


def check_reward_names(given: object, width: int) -> tuple[str, ...]:
    """The names of ``width`` reward columns, ``reward_0 …`` where none are given; raise unless they are names."""
    if given is None:
        return tuple(f"reward_{column}" for column in range(width))
    listed = isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given)
    if not isinstance(given, (tuple, list)) or not listed:
        raise ShapeError(
            f"reward_names is {given!r}; expected a tuple of {width} names, one a reward column, such as "
            f"{tuple(f'reward_{column}' for column in range(width))}."
        )
    if len(given) != width or len(set(given)) != width:
        raise ShapeError(
            f"reward_names is {tuple(given)!r}; expected {width} different names, one a reward column."
        )
    return tuple(given)


__getattr__ = moved_names(__name__)
