"""Write docs/metrics.md: every metric that any part declares or a host logs, with its unit, scope and meaning.

`python tools/metrics_table.py` writes it; with `--check` it exits with 1 if the page is out of date.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import rlobjectives
from rlobjectives import CapabilityError, Component, Metric
from rlobjectives.integrations.host_metrics import LIGHTNING_METRICS, TRL_METRICS, HostMetric
from rlobjectives.integrations.snapshots import SNAPSHOT_METRICS
from rlobjectives.metrics import CREDIT_METRICS
from rlobjectives.metrics.advantages import ADVANTAGE_METRICS
from rlobjectives.metrics.rewards import REWARD_METRICS
from rlobjectives.objective import OBJECTIVE_METRICS, Objective
from rlobjectives.slots import slots_of
from rlobjectives.statistics import Sum
from rlobjectives.terms.kl import REFERENCE_METRICS
from rlobjectives.token_parts import TokenTerm
from rlobjectives.window.summary import WINDOW_METRICS

PATH = Path(__file__).parent.parent / "docs" / "metrics.md"
SCOPES = {
    "Sum": "sum over the window",
    "Mean": "mean over the window",
    "Moments": "mean and std over the window",
    "Maximum": "maximum over the window",
    "Minimum": "minimum over the window",
    "ExplainedVariance": "over all tokens of the window",
    "LogSum": "log-sum-exp over the window",
    "EffectiveSize": "over all tokens of the window",
}
HEAD = """# Metrics

Every metric that an objective, Lightning or TRL logs; a test compares this page with what real runs log. `tools/metrics_table.py` writes
it from the code.

An objective's own metric is a mergeable statistic over the whole window: all micro-batches of one optimizer step on all ranks,
weighted by what it counts and equal on all ranks. A name that ends in `/` or `_` is reported twice, with `mean` and `std` behind it;
`<name>` stands for a reward's name, `<term>` for a field of the objective. A metric that nothing was measured for in a window is left out.

Lightning and TRL put the windows of a log line together with `merge_reports`, which your own loop may use as well: means are
weighted by what they counted, of extremes the most extreme stays. Your own loop reports what `window.summarize` returns: the metrics
of "every objective" and of its parts, and whatever else you hand to it as `extra`.

A completion that the first reward could not score (None) counts neither as right nor as wrong in `rollout/accuracy` and its like. Beside
these a host logs its own: Lightning `epoch` and learning rates, TRL what it always logs
([which of those change their meaning](coming_from_trl.md#metrics)).

| metric | unit | scope | meaning | reported by |
|---|---|---|---|---|
"""


def declared() -> Iterator[tuple[str, Mapping[str, Metric]]]:
    """Who reports which metrics."""
    yield "every objective", {**WINDOW_METRICS, **OBJECTIVE_METRICS}
    yield "every objective that reads the reference", REFERENCE_METRICS
    yield "every objective with that term", {f"loss/{name}": metric for name, metric in _terms().items()}
    yield "`reward_metrics`", REWARD_METRICS
    yield "`PolicySnapshots`", SNAPSHOT_METRICS
    yield "`advantage_metrics`", ADVANTAGE_METRICS
    for subject, reader in (
        ("group", "group"),
        ("value", "value"),
        ("response", "length"),
    ):
        own = {name: one for name, one in CREDIT_METRICS.items() if name.startswith(f"{subject}/")}
        yield f"`{reader}_metrics`", own
    for name in sorted(rlobjectives.__all__):
        found = getattr(rlobjectives, name)
        if isinstance(found, type) and issubclass(found, Component) and dataclasses.is_dataclass(found):
            yield f"`{name}`", {**found.metrics, **_of_options(found)}


def _terms() -> dict[str, Metric]:
    """Shares of the loss, by the objective's fields that hold terms of their own."""
    public = [getattr(rlobjectives, name) for name in rlobjectives.__all__]
    terms = [kind for kind in public if isinstance(kind, type) and issubclass(kind, TokenTerm)]
    found = {}
    for name, slot in slots_of(Objective).items():
        if name != "policy_loss" and any(issubclass(kind, slot.kinds) for kind in terms):
            term, one = ("<class_name>", "one of ") if slot.several else (name, "")
            found[term] = Metric(Sum, "loss", f"share of {one}the objective's `{name}`")
    return found


def _of_options(kind: type[Component]) -> dict[str, Metric]:
    """What instances declare that the class does not: by default, and with each named choice of an option."""
    hints = typing.get_type_hints(kind)
    metrics: dict[str, Metric] = {}
    options: list[dict[str, object]] = [{}]
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        options += [
            {one.name: choice} for choice in typing.get_args(hints[one.name]) if isinstance(choice, str)
        ]
    for option in options:
        with contextlib.suppress(
            CapabilityError, TypeError
        ):  # a required option, or a choice that needs another
            metrics.update(kind(**option).declared_metrics())
    return metrics


def table() -> str:
    """The page."""
    metrics: dict[str, Metric] = {}
    readers: dict[str, list[str]] = {}
    for reader, found in declared():
        for name, metric in found.items():
            metrics.setdefault(name, metric)
            readers.setdefault(name, []).append(reader)
    own = {
        name: HostMetric(
            metric.unit,
            SCOPES.get(metric.kind.__name__, metric.kind.__name__),
            metric.meaning,
            ", ".join(readers[name]),
        )
        for name, metric in metrics.items()
    }
    rows = [
        f"| `{name}` | {one.unit} | {one.scope} | {one.meaning} | {one.reader} |\n"
        for name, one in sorted({**own, **LIGHTNING_METRICS, **TRL_METRICS}.items())
    ]
    return HEAD + "".join(rows)


def main() -> int:
    """Write or check the page."""
    if "--check" in sys.argv[1:]:
        current = PATH.read_text(encoding="utf-8") if PATH.exists() else ""
        return int(current != table())
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
