"""What goes wrong in a window reaches the exchange that raises it on all ranks, and no window that has no part in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlobjectives import GDPO, GRPO, Communicator, Objective, PaddedLayout, PolicyLoss, Sum, TokenBatch
from rlobjectives.distributed import LOCAL
from rlobjectives.testing.simulate import run_ranks_as_threads
from rlobjectives.window.summary import stand_in
from rlobjectives.window.window import take_untold

LAYOUT = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))
ESTIMATE = torch.tensor([1.0, -1.0], dtype=torch.float64)


class Failing(PolicyLoss):
    """Has no loss."""

    def value(self, tokens: TokenBatch, context: Any) -> Tensor:
        raise ZeroDivisionError("no such ratio")


class Heard(Communicator):
    """Counts the exchanges that are reached."""

    exchanges = 0

    def gather(self, row: Tensor) -> Tensor:
        self.exchanges += 1
        return super().gather(row)


def test_what_stands_for_a_loss_is_on_the_device_of_its_columns() -> None:
    logprobs = torch.zeros(2, 3, device="meta")
    for column in (logprobs, logprobs.clone().requires_grad_()):
        output = stand_in({"logprobs": column, "entropy": None})
        assert {output.loss.device.type, output.tokens.device.type} == {"meta"}
        assert output.loss.requires_grad


def test_statistics_that_do_not_fold_are_raised_by_the_exchange() -> None:
    communicator = Heard()
    window = Objective(estimator=GRPO()).freeze([(ESTIMATE, LAYOUT)] * 2, communicator)
    advantages = window.advantages(ESTIMATE, LAYOUT)
    outputs = [
        window.loss(TokenBatch(logprobs=-torch.ones(2, 3), layout=LAYOUT, advantages=advantages))
        for _ in range(2)
    ]
    broken = next(iter(outputs[0].metrics.values()))
    object.__setattr__(broken, "row", torch.zeros(7, dtype=torch.float64))
    before = communicator.exchanges
    with pytest.raises(RuntimeError, match="stack"):
        window.summarize(outputs, {"own": Sum.of(torch.ones(1))})
    assert communicator.exchanges == before + 3  # that something failed, and what: sizes and words


def test_a_window_of_one_process_leaves_the_error_of_another_alone() -> None:
    def step(communicator: Communicator) -> None:
        window = Objective(estimator=GRPO(), policy_loss=Failing()).freeze([(ESTIMATE, LAYOUT)], communicator)
        tokens = TokenBatch(logprobs=-torch.ones(2, 3), layout=LAYOUT, advantages=torch.zeros(2, 3))
        window.loss(tokens)
        assert Objective(estimator=GRPO()).window(LOCAL).freeze().empty
        opened = Objective(estimator=GRPO()).window(communicator)
        window.loss(tokens)  # after the next window was opened
        with pytest.raises(ZeroDivisionError, match="no such ratio"):
            opened.freeze()
        assert take_untold() is None

    assert run_ranks_as_threads(step, 2) == [None, None]


def test_a_whitened_window_reads_the_device_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    for name in ("tolist", "__bool__", "__float__", "item"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, original: Any = original, name: str = name) -> Any:
            reads.append(name)
            return original(self)

        monkeypatch.setattr(Tensor, name, counted)
    objective, columns = Objective(estimator=GDPO()), torch.ones(2, 3, dtype=torch.float64)
    builder = objective.window()
    builder.add(estimate=columns, layout=LAYOUT)
    reads.clear()
    assert not builder.freeze().empty
    assert reads == ["tolist", "tolist"]
