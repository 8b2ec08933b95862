"""Arguments of the wrong kind: an error of ours that says what to write instead, and no raw one."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from rlobjectives import (
    GRPO,
    GSPO,
    SAPO,
    CapabilityError,
    ClippedSurrogate,
    FixedBudget,
    ImportanceCorrection,
    KLPenalty,
    Objective,
    PackedLayout,
    PaddedLayout,
    PolicyLoss,
    ReverseKLDistillation,
    RLObjectivesError,
    Rollouts,
    SequenceMean,
    ShapeError,
    TokenBatch,
    TrainerFacts,
    UnknownAlgorithmError,
    WindowError,
)
from tests.parts import PARTS

LAYOUT = PaddedLayout(torch.tensor([[True, True, False], [True, False, False]]))
ESTIMATE = torch.tensor([1.0, -1.0])
BIG = 2**70


def tokens(**columns: Any) -> TokenBatch:
    return TokenBatch(
        **{"logprobs": torch.full((2, 3), -1.0), "layout": LAYOUT, "advantages": torch.ones(2, 3), **columns}
    )


def opened() -> Any:
    return Objective(estimator=GRPO()).freeze([(ESTIMATE, LAYOUT)])


def refused(what: Callable[[], Any], words: str, kind: type[Exception] = RLObjectivesError) -> None:
    with pytest.raises(kind, match=words) as caught:
        what()
    assert isinstance(caught.value, RLObjectivesError)
    assert len(str(caught.value)) < 2000


class TestOptions:
    def test_a_flag_that_is_text(self) -> None:
        refused(
            lambda: ReverseKLDistillation(replace="4e-4"),
            "replace of ReverseKLDistillation is '4e-4'; expected True or False",
        )
        refused(
            lambda: ImportanceCorrection(normalize="no"),
            "normalize of ImportanceCorrection is 'no'; expected True",
        )
        refused(
            lambda: TrainerFacts(offers={"values": "yes"}),
            "offers\\['values'\\] is 'yes'; expected True or False",
        )
        refused(lambda: Objective(estimator=GRPO(), name=3), "name of Objective is 3; expected text")

    @pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
    def test_every_flag_and_every_text_of_every_part(self, part: Any) -> None:
        hints = {one.name: str(one.type) for one in dataclasses.fields(part)}
        for name, hint in hints.items():
            if hint.split(" | ")[0] in ("bool", "str") or hint.startswith("Literal["):
                for wrong in ("no", 1, 0.0, ["error"], b"error", BIG):
                    refused(lambda: dataclasses.replace(part, **{name: wrong}), name)

    def test_a_part_of_ones_own_is_checked_too(self) -> None:
        @dataclass(frozen=True, kw_only=True)
        class Mine(PolicyLoss):
            loud: bool = False
            note: str | None = None
            scale: float = 1.0

            def __post_init__(self) -> None:
                assert self.loud in (True, False)  # a check of its own runs after, and may rely on the type

        @dataclass(frozen=True, kw_only=True)
        class Quiet(PolicyLoss):
            loud: "bool" = None  # noqa: UP037  # a default of another kind is the author's own affair

        refused(lambda: Mine(loud="no"), "loud of Mine is 'no'")
        refused(lambda: Mine(note=4), "note of Mine is 4; expected text")
        assert Mine(loud=True, note=None).note is None
        assert Quiet().loud is None
        refused(lambda: Quiet(loud=1), "loud of Quiet is 1")

    @pytest.mark.parametrize(
        "make",
        [
            lambda: KLPenalty(coef=BIG),
            lambda: ClippedSurrogate(clip_high=BIG),
            lambda: FixedBudget(max_tokens=BIG),
            lambda: Objective(estimator=GRPO(), entropy_coef=BIG),
            lambda: TrainerFacts(num_generations=BIG),
            lambda: TrainerFacts(temperature=BIG),
            lambda: GRPO(weights=(BIG,)),
        ],
    )
    def test_an_integer_that_no_tensor_holds(self, make: Callable[[], Any]) -> None:
        refused(make, "64 bits")

    @pytest.mark.parametrize("name", ["temperature", "policy_temperature", "top_p", "min_p", "dropout"])
    def test_what_a_trainer_says_in_numbers(self, name: str) -> None:
        for wrong in (math.nan, math.inf, -0.1, "1.0", True, torch.tensor(1.0)):
            refused(lambda: TrainerFacts(**{name: wrong}), f"{name} is")
        assert getattr(TrainerFacts(**{name: 0.5}), name) == 0.5

    @pytest.mark.parametrize(
        "name",
        [
            "num_generations",
            "num_rewards",
            "updates_per_rollout",
            "max_staleness",
            "top_k",
            "context_parallel_size",
        ],
    )
    def test_what_a_trainer_counts(self, name: str) -> None:
        for wrong in (1.5, -2, "3", True, math.nan):
            refused(lambda: TrainerFacts(**{name: wrong}), f"{name} is")
        assert getattr(TrainerFacts(**{name: 2}), name) == 2

    def test_long_values_are_shown_by_their_beginning(self) -> None:
        refused(lambda: KLPenalty(estimator="x" * 5000), "estimator is 'xxx")
        refused(lambda: GRPO(weights="x" * 5000), "weights is 'xxx")
        refused(lambda: Objective.named("x" * 5000), "xxx")
        refused(lambda: Objective.named("grpo", reduction="x" * 5000), "xxx")


class TestNames:
    @pytest.mark.parametrize(
        ("said", "meant"),
        [
            ("reinforce++", "reinforce_pp"),
            ("REINFORCE++", "reinforce_pp"),
            ("reinforce++-baseline", "reinforce_pp_baseline"),
            ("GDPO", "gdpo"),
            ("Dr.GRPO", "dr_grpo"),
            ("dr-grpo", "dr_grpo"),
            ("grppo", "grpo"),
        ],
    )
    def test_what_was_meant(self, said: str, meant: str) -> None:
        refused(lambda: Objective.named(said), f"Did you mean '{meant}'", UnknownAlgorithmError)

    def test_an_objective_may_be_called_something_else(self) -> None:
        assert Objective.named("grpo", name="mine").name == "mine"
        assert Objective.named(name="grpo").name == "grpo"
        assert Objective.named("grpo").name == "grpo"

    def test_a_part_by_the_name_of_its_class(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @dataclass(frozen=True, kw_only=True)
        class Tempered(PolicyLoss):
            tau: float = 2.0

        module = types.ModuleType("mine_for_messages")
        vars(module).update(Tempered=Tempered, whole=SequenceMean(), helper=len)
        monkeypatch.setitem(sys.modules, "mine_for_messages", module)
        assert Objective.named("grpo", policy_loss="mine_for_messages:Tempered").policy_loss == Tempered()
        assert Objective.named("grpo", reduction="mine_for_messages:whole").reduction == SequenceMean()
        assert Objective.named("dapo", policy_loss="GSPO").policy_loss == GSPO()
        assert Objective.named("grpo", policy_loss="rlobjectives.losses:SAPO").policy_loss == SAPO()
        assert Objective.named("grpo", correction="ImportanceCorrection").correction == ImportanceCorrection()
        refused(
            lambda: Objective.named("grpo", policy_loss="nowhere:Tempered"),
            "'nowhere:Tempered' cannot be resolved",
        )
        refused(
            lambda: Objective.named("grpo", policy_loss="mine_for_messages:helper"),
            "which names <built-in function len>; expected an instance of PolicyLoss",
        )
        refused(
            lambda: Objective.named("grpo", policy_loss="builtins:eval"), "expected an instance of PolicyLoss"
        )
        refused(
            lambda: Objective.named("grpo", policy_loss="SequenceMean"),
            "policy_loss: SequenceMean is a LossReduction; expected a PolicyLoss",
        )
        refused(lambda: Objective.named("grpo", reduction="FixedBudget"), "FixedBudget needs max_tokens")

    def test_a_name_of_something_else(self) -> None:
        refused(lambda: Objective.named(5), "expected the name of an algorithm")
        refused(lambda: Objective.named("math:pi"), "'math:pi' is float")
        refused(lambda: Objective.named("builtins:dict"), "gives dict; expected an Objective")
        refused(lambda: Objective.named("os:getcwd"), "gives str; expected an Objective")
        refused(lambda: Objective.named("os:getcwd", x=1), "os:getcwd does not take x")


class TestKinds:
    def test_facts(self) -> None:
        for wrong in (numpy.ones(2), [1.0, 1.0], None, 3):
            refused(lambda: LAYOUT.with_facts(total_tokens=wrong), "total_tokens", ShapeError)
            refused(lambda: PaddedLayout(LAYOUT.mask, total_tokens=wrong), "total_tokens", ShapeError)

    def test_tokens_and_rollouts(self) -> None:
        window, objective = opened(), Objective(estimator=GRPO())
        for wrong in (None, 1.0, torch.zeros(2), {"logprobs": 1}):
            refused(lambda: window.loss(wrong), "expected a TokenBatch", ShapeError)
            refused(lambda: objective.window().estimate(wrong), "expected Rollouts", ShapeError)
        builder = objective.window()
        builder.add(estimate=ESTIMATE, layout=LAYOUT)
        builder.add_prepass(None)
        refused(builder.freeze, "expected a TokenBatch", ShapeError)
        refused(lambda: objective.window("world"), "expected a Communicator", WindowError)
        refused(lambda: objective.check(None), "expected TrainerFacts", CapabilityError)

    def test_outputs(self) -> None:
        window = opened()
        output = window.loss(tokens())
        for wrong, words in (
            ([None], r"outputs\[0\] is NoneType"),
            ([output, output.loss], r"outputs\[1\] is Tensor"),
            (output, "outputs is ObjectiveOutput; expected a list"),
            (None, "outputs is NoneType; expected a list"),
        ):
            refused(lambda: window.summarize(wrong), words, WindowError)
        assert window.summarize([output])["window/tokens"] == 3.0


class TestDevices:
    """All columns on one device: nothing is moved, and torch's own error names none of them."""

    def test_of_a_micro_batch(self) -> None:
        for name in ("logprobs", "old_logprobs", "advantages", "entropy", "values"):
            refused(
                lambda: tokens(**{name: torch.zeros(2, 3, device="meta")}),
                f"{name} is on meta, but layout.mask is on cpu",
                ShapeError,
            )

    def test_of_rollouts(self) -> None:
        good: dict[str, Any] = {
            "rewards": torch.zeros(2),
            "group_ids": torch.tensor([0, 0]),
            "layout": LAYOUT,
            "values": torch.zeros(2, 3),
            "scored": torch.ones(2, dtype=torch.bool),
            "truncated": torch.zeros(2, dtype=torch.bool),
            "session_ids": torch.tensor([0, 0]),
            "greedy_rewards": torch.zeros(2),
        }
        for name, column in good.items():
            if name not in ("rewards", "layout"):
                refused(
                    lambda: Rollouts(**{**good, name: torch.empty_like(column, device="meta")}),
                    f"{name} is on meta, but rewards is on cpu",
                    ShapeError,
                )
        refused(
            lambda: Rollouts(**{**good, "rewards": torch.zeros(2, device="meta")}),
            "is on cpu, but rewards is on meta",
            ShapeError,
        )

    def test_of_a_layout_and_an_estimate(self) -> None:
        away = torch.ones(2, device="meta")
        refused(
            lambda: LAYOUT.with_facts(total_tokens=away), "is on meta, but layout.mask is on cpu", ShapeError
        )
        refused(
            lambda: PackedLayout(torch.tensor([0, 3, 6]).to("meta"), LAYOUT.mask.reshape(-1)),
            "cu_seqlens is on meta",
            ShapeError,
        )
        refused(
            lambda: LAYOUT.with_prompts(torch.zeros(2, dtype=torch.int64, device="meta")),
            "group_ids is on meta",
            ShapeError,
        )
        refused(lambda: opened().advantages(away, LAYOUT), "is on meta", ShapeError)

    def test_boundaries_of_any_width_of_integers(self) -> None:
        for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
            layout = PackedLayout(torch.tensor([0, 3, 6], dtype=dtype), LAYOUT.mask.reshape(-1))
            assert layout.local_counts().tolist() == [2.0, 1.0]
