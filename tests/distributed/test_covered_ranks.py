"""Who has heard of an error: ranks outside the communicator that raised it have not, and none waits for one that has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlobjectives import GRPO, Communicator, NonFiniteError, Objective, PaddedLayout, RankError, WindowError
from rlobjectives.distributed import LOCAL, Fault, check_agreement, raised_together
from rlobjectives.distributed.agreement import checksum, joined
from rlobjectives.distributed.faults import in_words
from rlobjectives.distributed.synchronize import exchange
from tests.ranks import run_ranks

LAYOUT = PaddedLayout(torch.ones(2, 3, dtype=torch.bool))
ESTIMATE = torch.tensor([1.0, -1.0], dtype=torch.float64)
LONE = "\ud83d"  # half of a pair, as a tokenizer leaves it that cuts an emoji in two


def fail_alone(how: str) -> None:
    """On rank 0, in an exchange that only it takes part in."""
    own: Any = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    communicator = LOCAL if how == "local" else Communicator(own)
    with raised_together(Communicator.world()):
        if dist.get_rank():
            return
        if how == "losses":
            window = Objective(estimator=GRPO()).freeze([(ESTIMATE, LAYOUT)], communicator=LOCAL)
            window.summarize([])
        counts = {(0, "loss"): (torch.tensor(1.0), torch.tensor(4.0))}
        exchange({}, communicator, fault=Fault(counts=counts))


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("local", NonFiniteError, "loss has 1 non-finite"),
        ("group", NonFiniteError, "loss has 1 non-finite"),
        ("losses", WindowError, "the losses saw 0 tokens"),
    ],
)
def test_an_error_of_one_rank_alone_is_told_to_those_outside(how: str, kind: type, words: str) -> None:
    first, second = run_ranks(fail_alone, 2, how, expect_errors=True, timeout=30.0)
    assert type(first) is kind
    assert isinstance(second, RankError)
    assert f"rank 0 stopped with {kind.__name__}" in str(second)
    assert words in str(second)


def say_half_a_pair(how: str) -> None:
    if how == "option":
        check_agreement({"stop": LONE * dist.get_rank()})
    with raised_together(Communicator.world()):
        if dist.get_rank() == 1:
            raise ValueError(f"no verifier for {LONE}")


@pytest.mark.parametrize(
    ("how", "words"), [("error", r"no verifier for \ud83d"), ("option", r"\ud83d on rank 1")]
)
def test_texts_that_utf_8_does_not_hold_reach_the_others(how: str, words: str) -> None:
    first, _ = run_ranks(say_half_a_pair, 2, how, expect_errors=True, timeout=30.0)
    assert isinstance(first, RankError)
    assert words in str(first)


def test_words_can_always_be_sent() -> None:
    assert in_words(ValueError(LONE)).encode() == rb"ValueError: \ud83d"
    assert checksum(joined({"stop": LONE})) == checksum("stop\x1f\\ud83d")
