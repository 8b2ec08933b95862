"""Reports of several windows, put together as one log line."""

from __future__ import annotations

import pytest
import torch

from rlobjectives import (
    GRPO,
    Maximum,
    Mean,
    Minimum,
    Objective,
    PaddedLayout,
    Sum,
    TokenBatch,
    merge_reports,
)

KINDS = {
    "policy/entropy": Mean,
    "loss/total": Sum,
    "policy/ratio_max": Maximum,
    "advantage/lowest": Minimum,
    "group/baseline_mean": Mean,
    "group/no_signal_token_fraction": Mean,
}
ONE = {
    "policy/entropy": 1.0,
    "loss/total": 2.0,
    "policy/ratio_max": 3.0,
    "advantage/lowest": -1.0,
    "group/baseline_mean": 1.0,
    "group/no_signal_token_fraction": 1.0,
    "optim/grad_norm": 5.0,
    "window/tokens": 10.0,
    "window/sequences": 1.0,
}
TWO = {
    "policy/entropy": 4.0,
    "loss/total": 4.0,
    "policy/ratio_max": 1.0,
    "advantage/lowest": -7.0,
    "group/baseline_mean": 0.0,
    "group/no_signal_token_fraction": 0.0,
    "optim/grad_norm": 7.0,
    "window/tokens": 30.0,
    "window/sequences": 1.0,
}
EMPTY = {"window/tokens": 0.0, "window/skipped": 1.0}


def test_each_weighs_as_much_as_what_it_counted() -> None:
    assert merge_reports([ONE, TWO, EMPTY], KINDS) == {
        "policy/entropy": pytest.approx(3.25),
        "loss/total": 3.0,
        "policy/ratio_max": 3.0,
        "advantage/lowest": -7.0,
        "group/baseline_mean": 0.5,
        "group/no_signal_token_fraction": 0.25,
        "optim/grad_norm": 6.0,
        "window/tokens": pytest.approx(40 / 3),
        "window/sequences": 1.0,
        "window/skipped": 1.0,
    }
    assert merge_reports([], KINDS) == {}


def test_pieces_of_one_set_weigh_by_sequences() -> None:
    pieces = [{"loss/total": 1.0, "window/sequences": 3.0}, {"loss/total": 5.0, "window/sequences": 1.0}]
    assert merge_reports(pieces, KINDS, one_set=True)["loss/total"] == 2.0
    assert merge_reports(pieces, KINDS)["loss/total"] == 3.0


def test_without_a_count_everywhere_all_weigh_the_same() -> None:
    both = [{"policy/entropy": 1.0, "window/tokens": 9.0}, {"policy/entropy": 3.0}]
    assert merge_reports(both, KINDS)["policy/entropy"] == 2.0


def test_windows_that_counted_nothing_weigh_the_same() -> None:
    assert merge_reports([{**EMPTY, "policy/entropy": 1.0}, {**EMPTY, "policy/entropy": 3.0}], KINDS)[
        "policy/entropy"
    ] == pytest.approx(2.0)


def test_two_log_lines_are_one_window_over_both() -> None:
    """What is reported of two windows, put together, is what one window over the same tokens reports."""
    torch.manual_seed(0)
    objective = Objective(estimator=GRPO())
    batches = []
    for rows, columns in ((3, 4), (5, 2)):
        layout = PaddedLayout(torch.rand(rows, columns) < 0.8)
        estimate, logprobs = torch.randn(rows, dtype=torch.float64), -torch.rand(rows, columns).double()
        old = logprobs + 0.3 * torch.randn(rows, columns).double()
        batches.append((estimate, layout, logprobs, old))

    def report(
        chosen: list[tuple[torch.Tensor, PaddedLayout, torch.Tensor, torch.Tensor]],
    ) -> dict[str, float]:
        window = objective.freeze([(estimate, layout) for estimate, layout, _, _ in chosen])
        return window.summarize(
            window.loss(
                TokenBatch(
                    layout=layout,
                    advantages=window.advantages(estimate, layout),
                    logprobs=logprobs,
                    old_logprobs=old,
                )
            )
            for estimate, layout, logprobs, old in chosen
        )

    together, each = report(batches), [report([one]) for one in batches]
    merged = merge_reports(each, objective.metric_kinds())
    compared = [
        name for name in together if not name.endswith("std") and not name.startswith(("loss/", "window/"))
    ]
    assert {"advantage/lowest", "advantage/zero_fraction", "policy/ratio_max", "policy/ratio_mean"} <= set(
        compared
    )
    for name in compared:
        assert merged[name] == pytest.approx(together[name], abs=1e-12), name
