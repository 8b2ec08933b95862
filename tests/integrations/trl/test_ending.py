"""Two ranks of TRL: different options are refused before training; an error on one ends both, with its words."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

pytest.importorskip("trl")

from rlobjectives import CapabilityError, WindowError
from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
from tests.integrations.trl import tiny
from tests.integrations.trl.ending_runs import OPTIONS, cases
from tests.integrations.trl.settings import mask_rows
from tests.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.timeout(390)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank ended with, by the case that ended it."""
    folder = tmp_path_factory.mktemp("ending")

    @functools.cache
    def of(last: str) -> list[dict[str, str]]:
        with pytest.raises(RankFailure, match="rank 1 died with exit code 3"):
            run_ranks(cases, 2, str(folder), last, timeout=300, fresh=True)
        return [json.loads((folder / f"{last}-{rank}.json").read_text()) for rank in (0, 1)]

    return of


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_differ_are_named_on_both_ranks(found: Any, option: str) -> None:
    for rank in found("reward"):
        assert rank[option].startswith("RankError: ranks were given different options (rank 0 / rank 1): ")
        assert f"{option} is " in rank[option]


def test_the_same_options_are_no_trouble(found: Any) -> None:
    assert [rank["same"] for rank in found("reward")] == ["nothing", "nothing"]
    assert "learning_rate is 0.1 on rank 0, and 0.2 on rank 1" in found("reward")[0]["learning_rate"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("reward", "LookupError: no verifier here"),
        ("length", "short_reward"),  # TRL's own words, of which each release has others
        ("forward", "OutOfMemoryError: tried to allocate 7 GiB"),
    ],
)
def test_what_fails_on_one_rank_ends_both(found: Any, case: str, words: str) -> None:
    first, second = (rank[case] for rank in found(case))
    assert words in second
    assert first.startswith(f"RankError: rank 1 stopped with {second}")


def test_a_run_in_which_nothing_counts_stops_and_says_so() -> None:
    config = ObjectiveConfig(**tiny.options(objective="grpo", max_steps=9, max_empty_rollouts=2))
    trained = tiny.trainer(ObjectiveGRPOTrainer, config)
    mask_rows(lambda trainer, count: list(range(count)))(trained)
    with pytest.raises(WindowError, match="the last 2 rollouts had no counted token.*as if it had trained"):
        trained.train()
    assert trained.state.global_step == 2
    with pytest.raises(CapabilityError, match="max_empty_rollouts"):
        ObjectiveConfig(**tiny.options(objective="grpo", max_empty_rollouts=0))
