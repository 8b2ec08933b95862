"""Every law: its name, its promise, what it is tried on, and to which parts it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlobjectives.testing import cuts, estimates, gradients, masks, metric_functions, objects
from rlobjectives.testing.cases import Shard
from rlobjectives.testing.examples import Example
from rlobjectives.testing.subject import Subject

__all__ = ["LAWS", "METRIC_LAWS", "Law"]

_NAN, _FAR = float("nan"), 1e30
Draws = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Law:
    """One promise.

    Attributes:
        name: In the report and in ``check_part(laws=…)``.
        promise: In one line.
        holds: Raises where an example breaks it.
        draws: One drawn example for each, with these fields fixed.
        exempt: Why it does not apply to a part; empty where it does.
        contexts: Ranks that share a sequence, to choose from.
        round_numbers: Whether an example may be simplified to numbers with one decimal; they put a value on its kinks.
    """

    name: str
    promise: str
    holds: Callable[[Subject, Example], None]
    draws: Draws = ({},)
    exempt: Callable[[Subject], str] = lambda subject: ""
    contexts: tuple[int, ...] = (1,)
    round_numbers: bool = True


def _cut_matters(subject: Subject) -> str:
    return "it says depends_on_cut" if subject.objective.capabilities.depends_on_cut else ""


def _alone(subject: Subject) -> str:
    if subject.objective.capabilities.supports_context_parallel:
        return _cut_matters(subject)
    return "it says supports_context_parallel=False"


def _no_estimator(subject: Subject) -> str:
    return "" if subject.estimator else "no estimator"


def _reads_observations(subject: Subject) -> str:
    part = subject.estimator
    return "it says reads_observations" if part and part.reads_observations else _no_estimator(subject)


def _no_siblings(subject: Subject) -> str:
    part = subject.estimator
    return "" if part and part.required().min_group_size > 1 else "it compares no answers to one prompt"


def _not_zero(subject: Subject) -> str:
    part = subject.estimator
    told = part is not None and not part.zero_for_equal_rewards
    return _no_siblings(subject) or ("it says zero_for_equal_rewards=False" if told else "")


def _shifts(subject: Subject) -> str:
    part = subject.estimator
    told = part is not None and not part.shift_invariant
    return _no_siblings(subject) or ("it says shift_invariant=False" if told else "")


def _no_reduction(subject: Subject) -> str:
    return "" if subject.reduction else "no reduction"


def _no_slope(subject: Subject) -> str:
    if not subject.terms:
        return "no term of the loss"
    return "it says straight_through" if all(x.straight_through for x in subject.terms.values()) else ""


_FLOAT32 = {"dtype": torch.float32}
_PLAIN = {
    "holes": 0.0,
    "empty_rows": 0.0,
    "dropped": 0.0,
    "unscored": 0.0,
    "spread": 0.5,
    "rewards": "normal",
}
_TWO_PROMPTS = {**_PLAIN, "sizes": (4, 4), "width": 5, "holes": 0.3}

LAWS: tuple[Law, ...] = (
    Law(
        name="runs",
        promise="a window runs from rollouts to the backward pass",
        holds=cuts.runs,
        draws=(_TWO_PROMPTS,),
    ),
    Law(
        name="partition",
        promise="any micro-batches on any ranks give the numbers of one batch",
        holds=cuts.partition,
        draws=(_TWO_PROMPTS, {}, {}),
        exempt=_cut_matters,
    ),
    Law(
        name="context",
        promise="so do ranks that share each sequence",
        holds=cuts.partition,
        draws=(_TWO_PROMPTS, {}),
        exempt=_alone,
        contexts=(2, 3),
    ),
    Law(
        name="float32",
        promise="so do columns in float32, but for rounding",
        holds=cuts.partition,
        draws=(_FLOAT32,),
        exempt=_cut_matters,
    ),
    Law(
        name="state",
        promise="what a rank remembers of one window does not change the next",
        holds=cuts.state,
        draws=({**_TWO_PROMPTS, "rewards": "binary"},),
        exempt=_cut_matters,
    ),
    Law(
        name="layout",
        promise="padded, packed, more padding: the same numbers",
        holds=cuts.layout,
        draws=(_TWO_PROMPTS, {}),
    ),
    Law(
        name="blocks",
        promise="a micro-batch may be worked on in blocks of sequences",
        holds=cuts.blocks,
        draws=(
            {**_TWO_PROMPTS, "shard": Shard(extra=1, garbage=_NAN)},
            {"shard": Shard(packed=True, garbage=_FAR)},
        ),
    ),
    Law(
        name="dropped",
        promise="dropped sequences leave no trace",
        holds=cuts.dropped,
        draws=({**_TWO_PROMPTS, "dropped": 0.4, "sizes": (4, 3, 3)}, {"dropped": 0.4, "sizes": (5, 4)}),
    ),
    Law(
        name="order",
        promise="the order of sequences and the ids of prompts do not matter",
        holds=cuts.order,
        draws=(_TWO_PROMPTS, {}),
        exempt=_no_estimator,
    ),
    Law(
        name="masking",
        promise="what stands under a false mask changes nothing, to the last bit",
        holds=masks.masking,
        draws=(
            {**_TWO_PROMPTS, **_FLOAT32, "shard": Shard(extra=2, garbage=_NAN)},
            {**_TWO_PROMPTS, **_FLOAT32, "shard": Shard(packed=True, garbage=_FAR)},
            {**_FLOAT32},
        ),
    ),
    Law(
        name="unscored",
        promise="masked columns and rewards without a score do not reach the estimate",
        holds=masks.masked_columns,
        draws=({**_TWO_PROMPTS, "unscored": 0.4},),
        exempt=_reads_observations,
    ),
    Law(
        name="non-finite",
        promise="a NaN or infinity that counts is an error on all ranks",
        holds=masks.no_repair,
        draws=({**_PLAIN, "sizes": (3, 3), "width": 4},),
    ),
    Law(
        name="failure",
        promise="an exception on one rank ends all of them",
        holds=masks.failure,
        draws=({"sizes": (3, 3)},),
    ),
    Law(
        name="empty",
        promise="a window without tokens is an attached, exact zero",
        holds=masks.empty,
        draws=({"sizes": (2, 3), "shard": Shard()}, {"sizes": (2, 3), "shard": Shard(packed=True)}),
    ),
    Law(
        name="dummy",
        promise="so is a micro-batch without tokens",
        holds=masks.dummy,
        draws=({"sizes": (3, 3)},),
    ),
    Law(
        name="equal rewards",
        promise="a prompt with equal rewards has advantages of exactly 0",
        holds=estimates.equal_rewards,
        draws=tuple({**_PLAIN, "sizes": (size, 4)} for size in (2, 3, 7, 16)),
        exempt=_not_zero,
    ),
    Law(
        name="offset",
        promise="a number added to every reward changes nothing",
        holds=estimates.offset,
        draws=({**_PLAIN, "sizes": (4, 5)},),
        exempt=_shifts,
    ),
    Law(
        name="weights",
        promise="tokens that count weigh something, those of a mean 1 together",
        holds=estimates.weights,
        draws=tuple({"empty_rows": share, "holes": 0.0, "dropped": 0.0} for share in (0.0, 0.3, 0.5)),
        exempt=_no_reduction,
    ),
    Law(
        name="slope",
        promise="the slope is the derivative of the value",
        holds=gradients.slope,
        draws=({**_TWO_PROMPTS, "shard": Shard()}, {**_TWO_PROMPTS, "shard": Shard(packed=True)}),
        exempt=_no_slope,
        round_numbers=False,
    ),
    Law(
        name="gradient",
        promise="the gradient is weight times slope, and nothing else gets one",
        holds=gradients.gradient,
        draws=(_TWO_PROMPTS,),
    ),
    Law(
        name="backward",
        promise="a second backward through one loss is refused",
        holds=gradients.backward_once,
        draws=(_TWO_PROMPTS,),
    ),
    Law(
        name="memory",
        promise="one tensor waits for the backward pass",
        holds=gradients.memory,
        draws=({**_PLAIN, **_FLOAT32, "sizes": (8, 8), "width": 64},),
    ),
    Law(
        name="no wait",
        promise="nothing waits for the device",
        holds=gradients.no_wait,
        draws=(
            {**_TWO_PROMPTS, "unscored": 0.2, "shard": Shard()},
            {**_TWO_PROMPTS, "unscored": 0.2, "shard": Shard(packed=True)},
        ),
    ),
    Law(
        name="collectives",
        promise="one exchange opens a window, one reports it",
        holds=objects.collectives,
        draws=({"sizes": (3, 4)},),
    ),
    Law(
        name="copies",
        promise="pickled or copied, it is the same",
        holds=objects.copies,
        draws=(_TWO_PROMPTS,),
    ),
    Law(
        name="agreement",
        promise="ranks compare every option that changes a number",
        holds=objects.agreement,
        draws=(_TWO_PROMPTS,),
    ),
    Law(name="reads", promise="it reads the columns it declares", holds=objects.reads, draws=(_TWO_PROMPTS,)),
    Law(name="options", promise="a wrong option is refused at once", holds=objects.options),
)
"""For parts and objectives, in the order in which they are tried."""

METRIC_LAWS: tuple[Law, ...] = (
    Law(
        name="partition",
        promise="folded over ranks it is the same",
        holds=metric_functions.cut,
        draws=(_TWO_PROMPTS, {}),
    ),
    Law(name="layout", promise="padded, packed, in any order: the same", holds=metric_functions.forms),
    Law(
        name="masking",
        promise="what does not count changes nothing",
        holds=metric_functions.masked,
        draws=({**_TWO_PROMPTS, "unscored": 0.4}, {}),
    ),
    Law(
        name="dropped",
        promise="dropped sequences leave no trace",
        holds=metric_functions.dropped,
        draws=({**_TWO_PROMPTS, "dropped": 0.4, "sizes": (4, 3, 3)},),
    ),
    Law(name="no wait", promise="nothing waits for the device", holds=metric_functions.no_wait),
)
"""For functions from rollouts to statistics."""
