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
    Rollouts,
    Stat,
    Sum,
    TokenBatch,
    group_metrics,
    length_metrics,
    merge_reports,
    reward_metrics,
)
from rlobjectives.window import Report

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
        "group/baseline_mean": 0.25,
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
    """What is reported of two windows, put together, is what one window over the same sequences reports."""
    torch.manual_seed(0)
    objective = Objective(estimator=GRPO())
    batches = []
    for rows, columns in ((4, 5), (6, 2)):
        layout = PaddedLayout(torch.rand(rows, columns) < 0.8)
        scored = torch.rand(rows, 2) < 0.7
        scored[0] = True
        rollouts = Rollouts(
            rewards=torch.rand(rows, 2).round(decimals=1),
            scored=scored,
            group_ids=torch.arange(rows) // 2,
            layout=layout,
        )
        logprobs = -2.0 - torch.rand(rows, columns).double()
        batches.append((rollouts, logprobs, logprobs + 0.3 * torch.randn(rows, columns).double()))

    def report(chosen: list[tuple[Rollouts, torch.Tensor, torch.Tensor]]) -> dict[str, float]:
        estimates = [objective.estimator.estimate(rollouts) for rollouts, _, _ in chosen]
        layouts = [rollouts.tokens("The test") for rollouts, _, _ in chosen]
        window = objective.freeze(list(zip(estimates, layouts, strict=True)))
        outputs = [
            window.loss(
                TokenBatch(
                    layout=layout,
                    advantages=window.advantages(estimate, layout),
                    logprobs=logprobs,
                    old_logprobs=old,
                )
            )
            for (_, logprobs, old), estimate, layout in zip(chosen, estimates, layouts, strict=True)
        ]
        extra: dict[str, Stat] = {}
        for rollouts, _, _ in chosen:
            own = reward_metrics(rollouts, objective.estimator) | group_metrics(rollouts, objective.estimator)
            for name, stat in (own | length_metrics(rollouts)).items():
                extra[name] = extra[name].merge(stat) if name in extra else stat
        kinds.update({name: type(stat) for name, stat in extra.items()})
        return window.summarize(outputs, extra)

    kinds: dict[str, type[Stat]] = {**objective.metric_kinds()}
    together, each = report(batches), [report([one]) for one in batches]
    merged = merge_reports(each, kinds)
    compared = [name for name in together if not name.startswith(("loss/", "window/"))]
    assert {
        "advantage/lowest",
        "advantage/std",
        "policy/ratio_std",
        "response/correct_length_mean",
        "response/incorrect_length_std",
        "reward/reward_1/mean",
        "group/baseline_mean",
        "reward/constant_group_fraction",
    } <= set(compared)
    for name in compared:
        assert merged[name] == pytest.approx(together[name], abs=1e-12), name


def test_a_report_knows_what_it_counted() -> None:
    report = Report({"value/error": 1.0, "loss/total": 2.0}, {"value/error": 4.0})
    assert report == {"value/error": 1.0, "loss/total": 2.0}
    own = report.under(("value/",))
    assert own == {"value/error": 1.0}
    assert own.weights["value/error"] == 4.0
    more = [own, Report({"value/error": 6.0}, {"value/error": 1.0})]
    assert merge_reports(more, {"value/error": Mean}) == {"value/error": 2.0}
