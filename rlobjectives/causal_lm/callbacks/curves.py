"""Learning curves as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_curves"]

Entries = Sequence[dict[str, float]]

_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c77f1a")
_INK = "#222222"
_SMOOTH_OVER = 15  # rollouts


def draw_curves(training: Entries, validation: Entries, path: Path, *, title: str) -> None:
    """Draw rewards, held-out scores and the state of the policy over optimizer steps.

    Args:
        training: One dictionary per rollout: ``step`` and metrics.
        validation: The same for validations.
        path: The picture to write; its suffix says the format.
        title: Heading.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no window

    figure = Figure(figsize=(10.5, 6.4), dpi=130, layout="constrained")
    figure.suptitle(title, color=_INK, fontsize=13, fontweight="bold")
    panels = figure.subplots(2, 2)
    rewards = [
        name.removeprefix("reward/").removesuffix("/mean")
        for name in training[-1]
        if name.startswith("reward/") and name.endswith("/mean")
    ]
    colours = {"accuracy": _INK} | dict(zip(rewards, _COLOURS * 9, strict=False))
    for name in rewards:
        _noisy(panels[0, 0], training, f"reward/{name}/mean", name, colours[name])
    _finish(panels[0, 0], "Mean reward of the rollouts")
    _held_out(panels[0, 1], validation, colours)
    _first(
        panels[1, 0],
        training,
        [
            ("policy/kl_to_ref", "KL to the starting policy (nats/token)"),
            ("policy/kl_to_old", "KL to the old policy (nats/token)"),
            ("optim/grad_norm", "Gradient norm"),
        ],
        _COLOURS[3],
    )
    _first(
        panels[1, 1],
        training,
        [
            ("reward/constant_group_fraction", "Prompt groups without a signal (fraction)"),
            ("rollout/completion_tokens", "Completion length (tokens)"),
        ],
        _COLOURS[2],
    )
    for panel in panels[1]:
        panel.set_xlabel("optimizer step", color=_INK)
    figure.savefig(path)


def _held_out(panel: Any, validation: Entries, colours: dict[str, str]) -> None:
    """Solid lines for what is sampled, or for the greedy scores where nothing is; dashed for greedy beside it."""
    names = sorted({name for entry in validation for name in entry if name.startswith("val/")})
    sampled = any(name.startswith("val/sampled/") for name in names)
    series = {name: [(entry["step"], entry[name]) for entry in validation if name in entry] for name in names}
    for name, points in series.items():
        label = name.rsplit("/", 1)[-1]
        if label == "accuracy" and any(points == other for key, other in series.items() if key != name):
            continue  # the same line as a reward that is 0 or 1
        greedy = not name.startswith("val/sampled/")
        style: dict[str, Any] = {"linestyle": "--", "alpha": 0.5} if greedy and sampled else {}
        kind = (" (greedy)" if greedy else " (sampled)") if sampled else ""
        x, y = zip(*points, strict=True)
        colour = colours.get(label, _COLOURS[-1])
        panel.plot(x, y, color=colour, marker="o", markersize=3.5, linewidth=1.8, label=label + kind, **style)
    _finish(panel, "Held-out prompts")


def _first(panel: Any, training: Entries, choices: list[tuple[str, str]], colour: str) -> None:
    """Draw the first of several metrics that was recorded."""
    for name, heading in choices:
        if any(name in entry for entry in training):
            _noisy(panel, training, name, None, colour)
            _finish(panel, heading)
            return
    panel.set_axis_off()


def _noisy(panel: Any, entries: Entries, name: str, label: str | None, colour: str) -> None:
    """A faint line through every point and a strong one through their running mean."""
    points = [(entry["step"], entry[name]) for entry in entries if name in entry]
    steps, values = [x for x, _ in points], [y for _, y in points]
    smooth = []
    for position in range(len(values)):
        recent = values[max(0, position + 1 - _SMOOTH_OVER) : position + 1]
        smooth.append(sum(recent) / len(recent))
    panel.plot(steps, values, color=colour, alpha=0.22, linewidth=0.9)
    panel.plot(steps, smooth, color=colour, linewidth=1.9, label=label)


def _finish(panel: Any, heading: str) -> None:
    panel.set_title(heading, loc="left", fontsize=10.5, color=_INK)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8.5, colors=_INK)
    panel.margins(x=0.02)
    shares = [value for line in panel.get_lines() for value in line.get_ydata()]
    if shares and panel.get_legend_handles_labels()[1] and min(shares) >= 0.0 and max(shares) <= 1.0:
        panel.set_ylim(-0.03, 1.03)  # fractions: show how far there is to go
    if panel.get_legend_handles_labels()[1]:
        panel.legend(frameon=False, fontsize=8.5)
