"""Named algorithms are data; errors are one family, each also the standard error it refines."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import rlobjectives
from rlobjectives import (
    ALGORITHMS,
    GDPO,
    GRPO,
    OPSM,
    Capabilities,
    CapabilityError,
    ClippedSurrogate,
    ClippedValueLoss,
    EntropyMask,
    FixedBudget,
    ImportanceCorrection,
    KLPenalty,
    Objective,
    SequenceMean,
    UnknownAlgorithmError,
    errors,
)
from rlobjectives.registry import resolve
from tests.parts import PARTS, given_options, label

ROOT = Path(rlobjectives.__file__).parent


def test_the_first_named_objectives() -> None:
    assert {"grpo", "dr_grpo", "gdpo", "rloo", "dapo", "reinforce"} <= set(ALGORITHMS)
    assert list(ALGORITHMS) == sorted(ALGORITHMS)
    assert Objective.named("dapo").policy_loss == ClippedSurrogate(clip_low=0.2, clip_high=0.28)
    dr_grpo = Objective.named("dr_grpo", reduction={"max_tokens": 9})
    assert (dr_grpo.estimator, dr_grpo.reduction, dr_grpo.name) == (
        GRPO(scale="none"),
        FixedBudget(max_tokens=9),
        "dr_grpo",
    )
    assert isinstance(Objective.named("grpo").reduction, SequenceMean)
    assert Objective.named("reinforce").capabilities.requires_on_policy


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_entry_resolves(name: str) -> None:
    spec = ALGORITHMS[name]
    assert spec.summary
    assert spec.source
    known = {one.name for one in dataclasses.fields(Objective)}
    assert set(spec.parts) <= known
    assert set(spec.options) <= set(spec.parts)
    for role, kind in spec.parts.items():
        assert set(spec.options.get(role, {})) <= {one.name for one in dataclasses.fields(resolve(kind))}
    required = {role: given_options(resolve(kind)) for role, kind in spec.parts.items()}
    built = Objective.named(name, **{role: options for role, options in required.items() if options})
    assert built.name == name


def test_overrides_are_parts_options_or_values() -> None:
    mine = GDPO(weights=(1.0, 0.5))
    assert Objective.named("gdpo", estimator=mine).estimator is mine
    assert Objective.named("gdpo", estimator={"weights": (1.0, 0.5)}).estimator == mine
    assert Objective.named("grpo", kl={"coef": 0.04}).kl == KLPenalty(coef=0.04)
    assert Objective.named("grpo", entropy_coef=0.01).entropy_coef == 0.01
    assert Objective.named("dapo", policy_loss={"clip_high": 0.3}).policy_loss == ClippedSurrogate(
        clip_high=0.3
    )


@pytest.mark.parametrize(
    ("role", "options", "part"),
    [
        ("correction", {"weight": "token", "high": 1.5}, ImportanceCorrection(weight="token", high=1.5)),
        ("off_policy_mask", {"threshold": 0.5}, OPSM(threshold=0.5)),
        ("entropy_mask", {"fraction": 0.2}, EntropyMask(fraction=0.2)),
        ("value_loss", {"coef": 0.5}, ClippedValueLoss(coef=0.5)),
        ("kl", {"coef": 0.1}, KLPenalty(coef=0.1)),
    ],
)
def test_options_make_an_optional_part_of_one_class(role: str, options: dict[str, Any], part: Any) -> None:
    built = Objective.named("grpo", **{role: options})
    assert getattr(built, role) == part
    # Also where a class of the user's own is named.
    assert getattr(Objective.named("rlobjectives:GRPO", **{role: options}), role) == part
    with pytest.raises(CapabilityError, match=f"grpo: {type(part).__name__} has no option 'nothing'"):
        Objective.named("grpo", **{role: {"nothing": 1}})


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("4e-4", "In YAML write 4.0e-4:"),
        ("1.5e3", r"In YAML write 1.5e\+3:"),
        ("2E+1", r"In YAML write 2.0e\+1:"),
        ("0.2", "Write 0.2 without quotes"),
        ("much", "not str.$"),
    ],
)
def test_a_number_given_as_text_says_how_to_write_it(text: str, written: str) -> None:
    with pytest.raises(CapabilityError, match=f"clip_high is '{re.escape(text)}'.*{written}"):
        Objective.named("grpo", policy_loss={"clip_high": text})


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "gdp0",
            {},
            UnknownAlgorithmError,
            r"'gdp0'. Known: .*dr_grpo.*rloo.* Did you mean 'gdpo'\? Or give",
        ),
        ("zzzz", {}, UnknownAlgorithmError, r"Known: [^?]*\. Or give 'package.module:Class'"),
        ("no.such.module:Class", {}, UnknownAlgorithmError, "cannot be resolved"),
        ("rlobjectives:Nothing", {}, UnknownAlgorithmError, "cannot be resolved"),
        (".relative:Class", {}, UnknownAlgorithmError, "cannot be resolved"),
        (
            "dr_grpo",
            {},
            CapabilityError,
            r"FixedBudget needs max_tokens. Say it.*reduction=\{'max_tokens': ...\}",
        ),
        (
            "gdpo",
            {"estimator": {"weigths": 1}},
            CapabilityError,
            "no option 'weigths'.* Did you mean 'weights'",
        ),
        ("gdpo", {"estimater": {}}, CapabilityError, "no field 'estimater'.* Did you mean 'estimator'"),
        ("gdpo", {"estimator": None}, CapabilityError, "estimator is None"),
        (
            "gdpo",
            {"distillation": {"coef": 1.0}},
            CapabilityError,
            "gdpo has no distillation to take options; give the part itself.*'package.module:SomeClass'",
        ),
        ("rlobjectives:TokenMean", {}, CapabilityError, "expected an instance of Estimator"),
    ],
)
def test_wrong_names_and_options(name: str, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Objective.named(name, **options)


class Mine(GRPO):
    """A user's estimator."""


class Plain(rlobjectives.Estimator):
    """A user's estimator that is no dataclass."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def estimate(self, rollouts: Any) -> Any:
        return rollouts.rewards[:, 0] ** self.power


def factory(budget: int = 3) -> Objective:
    """A user's objective."""
    return Objective(estimator=GRPO(), reduction=FixedBudget(max_tokens=budget))


def test_a_class_or_factory_of_the_user_needs_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_project", sys.modules[__name__])
    built = Objective.named("my_project:Mine", estimator={"scale": "none"}, entropy_coef=0.1)
    assert built.estimator == Mine(scale="none")
    plain: Any = Objective.named("my_project:Plain", estimator={"power": 2.0}).estimator
    assert plain.power == 2.0
    assert Objective.named("my_project:factory", budget=5).reduction == FixedBudget(max_tokens=5)


def test_parts_are_frozen_keyword_only_dataclasses_that_round_trip() -> None:
    names = {name: getattr(rlobjectives, name) for name in rlobjectives.__all__}
    for part in PARTS:
        kind: Any = type(part)
        assert kind.__dataclass_params__.frozen, kind
        assert all(one.kw_only for one in dataclasses.fields(kind)), kind
        assert dataclasses.replace(part) == part
        assert pickle.loads(pickle.dumps(part)) == part
        if "<function" not in repr(part):  # a user's function is shown, not spelt out
            assert eval(repr(part), names) == part, label(part)
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError, AttributeError)):
            part.anything = 1  # type: ignore[attr-defined]


def test_objectives_round_trip() -> None:
    one = Objective.named("gdpo", estimator={"weights": (1.0, 0.5)}, kl={"coef": 0.1})
    assert pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.replace(one, entropy_coef=0.1).entropy_coef == 0.1
    assert one.capabilities.needs_ref_logprobs  # kept with the objective, but not with its copies
    for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
        assert (again, hash(again), again.parts()) == (one, hash(one), one.parts())
        assert again.parts()["kl"] is again.kl
    assert not dataclasses.replace(one, kl=None).capabilities.needs_ref_logprobs


def test_a_stored_objective_asks_its_parts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Objective.named("gdpo")
    assert not one.capabilities.needs_critic
    stored = pickle.dumps(one)
    monkeypatch.setattr(GDPO, "required", lambda self: Capabilities(reads=frozenset({"values"})))
    assert pickle.loads(stored).capabilities.needs_critic


def test_public_names_are_listed_once_and_exist() -> None:
    assert len(rlobjectives.__all__) == len(set(rlobjectives.__all__))
    assert all(hasattr(rlobjectives, name) for name in rlobjectives.__all__)


def test_no_code_compares_the_name_of_an_algorithm() -> None:
    """Callers read capabilities; a string of `ALGORITHMS` stands in the registry and nowhere in a comparison."""
    guilty = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            operands: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                operands = [node.value]
            guilty += [
                f"{path.relative_to(ROOT)}:{operand.lineno} compares with {constant.value!r}"
                for operand in operands
                for constant in ast.walk(operand)
                if isinstance(constant, ast.Constant) and constant.value in ALGORITHMS
            ]
    assert guilty == []


FAMILY = {
    "RLObjectivesError": Exception,
    "ShapeError": ValueError,
    "NonFiniteError": ValueError,
    "CapabilityError": ValueError,
    "MissingColumnError": LookupError,
    "UnknownAlgorithmError": LookupError,
    "WindowError": RuntimeError,
    "RankError": RuntimeError,
}


def test_the_family_is_complete_and_travels() -> None:
    defined = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    }
    assert defined == set(errors.__all__)
    assert set(FAMILY) <= defined
    for name in defined:
        kind = getattr(errors, name)
        assert issubclass(kind, FAMILY.get(name, Exception))
        assert issubclass(kind, errors.RLObjectivesError)
        again = pickle.loads(pickle.dumps(kind("what, where, what to do")))
        assert (type(again), str(again)) == (kind, "what, where, what to do")
        assert kind.__doc__
