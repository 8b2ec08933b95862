"""Options are said once, at their fields: what is checked, in whose words, and what a parser of configurations sees."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pytest

import rlobjectives as rl
from rlobjectives import GRPO, CapabilityError, ClippedSurrogate, Combined, Objective, ReinforcePlusPlus
from rlobjectives.capabilities import TrainerFacts
from rlobjectives.component import Component
from rlobjectives.options import bounds, option

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class Own(GRPO):
    """A user's part: every kind of option."""

    share: float = option(0.5, low=0, high=1, open_low=True)
    times: int = field(metadata=bounds(low=1))
    shift: int = option(-3, high=8)
    side: Literal["left", "right"] = "left"
    degree: Literal[0, 1] = 0
    cap: float | None = option(None, low=1, open_low=True)
    note: str | None = None
    loud: bool = False
    exact: Fraction | None = None
    anything: Any = None

    def check(self) -> None:
        """Options that contradict each other."""
        super().check()
        if self.cap is not None and self.cap < self.times:
            raise CapabilityError("cap is below times.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 0.0}, "share is 0.0; expected a finite number in (0, 1]."),
        ({"share": "4e-1"}, "In YAML write 4.0e-1"),
        ({"share": None}, "share is None; expected a number, not NoneType."),
        ({"times": 0}, "times is 0; expected a positive integer of at most 64 bits."),
        ({"times": True}, "times is True; expected a positive integer"),
        ({"shift": 1.0}, "shift is 1.0; expected an integer of at most 64 bits."),
        ({"shift": 9}, "shift is 9; expected a finite number in (-inf, 8]."),
        ({"side": "up"}, "side is 'up'; expected one of 'left', 'right'."),
        ({"degree": True}, "degree is True; expected one of 0, 1."),
        ({"degree": 2}, "degree is 2; expected one of 0, 1."),
        ({"cap": 1}, "cap is 1; expected a finite number in (1, inf)."),
        ({"cap": 2.0, "times": 3}, "cap is below times."),
        ({"note": 3}, "note of Own is 3; expected text, not int."),
        ({"loud": "no"}, "In YAML write true or false, without quotes."),
        ({"epsilon": -1.0}, "epsilon is -1.0; expected a finite number in [0, inf)."),
        ({"weights": ["a"]}, "weights[0] is 'a'; expected a number, not str."),
    ],
)
def test_each_option_is_checked_against_its_type_and_bounds(options, words):
    with pytest.raises(CapabilityError) as caught:
        Own(**{"times": 2, **options})
    assert words in str(caught.value)


def test_what_is_allowed_passes():
    part = Own(times=2, share=1, cap=None, note="so", weights=[1, 2.0], exact=object(), anything=print)
    assert part.weights == (1, 2.0)
    assert dataclasses.replace(part, times=3).times == 3
    assert pickle.loads(pickle.dumps(Own(times=4))).times == 4
    with pytest.raises(CapabilityError, match="times is 0"):
        dataclasses.replace(part, times=0)


def test_bounds_of_what_is_no_number_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class Odd(GRPO):
        shares: tuple[float, ...] = option((0.5,), low=0)

    with pytest.raises(TypeError, match=r"Odd.shares has bounds, but is declared tuple\[float, ...\]"):
        Odd()


def test_annotations_that_cannot_be_evaluated_stay_texts():
    @dataclass(frozen=True, kw_only=True)
    class Odd(GRPO):
        quoted: "Fraction" | None = None  # noqa: UP037
        absent: dataclasses.NoSuchThing = None  # type: ignore[name-defined]
        share: float = option(0.5, low=0)

    assert Odd(quoted=3).quoted == 3
    with pytest.raises(CapabilityError, match="share is -1.0"):
        Odd(share=-1.0)


def test_another_default_keeps_the_bounds():
    assert ReinforcePlusPlus().epsilon != GRPO().epsilon
    with pytest.raises(CapabilityError, match="epsilon is -1.0"):
        ReinforcePlusPlus(epsilon=-1.0)


def test_an_own_post_init_comes_after_the_common_check():
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Old(ClippedSurrogate):
        def __post_init__(self) -> None:
            seen.append(self.clip_low)

    Old(clip_low=0.1)
    with pytest.raises(CapabilityError, match="clip_low is 2"):
        Old(clip_low=2)
    assert seen == [0.1]


def every(kind: type) -> list[type]:
    return [kind, *(one for sub in kind.__subclasses__() for one in every(sub))]


PARTS = sorted(
    {part for part in every(Component) if part.__module__.startswith("rlobjectives.")},
    key=lambda part: part.__name__,
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_types_of_options_are_no_texts(part):
    """A parser would evaluate texts in the module of the derived class, and take what it cannot for untyped."""
    texts = {name: it for name, it in inspect.get_annotations(part).items() if isinstance(it, str)}
    assert not texts


def test_bounds_hold_at_the_default():
    """A default itself is left alone, so another object of the same value is given."""
    checked = 0
    for part in PARTS:
        fields = (
            dataclasses.fields(part)
            if dataclasses.is_dataclass(part) and not inspect.isabstract(part)
            else ()
        )
        if any(one.init and one.default is one.default_factory is dataclasses.MISSING for one in fields):
            continue  # it cannot be made without options
        for one in fields:
            if one.init and isinstance(one.default, (int, float)) and not isinstance(one.default, bool):
                again = int if isinstance(one.default, int) else float
                part(**{one.name: again(repr(one.default))})
                checked += 1
    assert checked > 60


def test_facts_of_a_trainer_have_bounds():
    assert TrainerFacts(top_k=-1).top_k == -1
    for wrong in ({"num_generations": 0}, {"top_k": -2}, {"dropout": 1.5}, {"temperature": -0.1}):
        with pytest.raises(CapabilityError, match=next(iter(wrong))):
            TrainerFacts(**wrong)


def parsed(**objective: Any) -> Objective:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=Objective)
    return parser.instantiate(parser.parse_object({"objective": objective})).objective


@pytest.mark.parametrize(
    ("estimator", "key", "expected"),
    [
        ({"class_path": "rlobjectives.GRPO", "init_args": {"epsilon": "abc"}}, "epsilon", "float"),
        ({"class_path": "rlobjectives.GAE", "init_args": {"reward_scope": "all"}}, "reward_scope", "session"),
        ({"class_path": "rlobjectives.Combined", "init_args": {"estimators": [{"class_path": "Nothing"}]}}, "estimators", ""),
        ({"class_path": "tests.test_options.Own", "init_args": {"times": "many"}}, "times", "int"),
    ],
)  # fmt: skip
def test_a_parser_knows_the_types(estimator, key, expected):
    jsonargparse = pytest.importorskip("jsonargparse")
    with pytest.raises(jsonargparse.ArgumentError) as caught:
        parsed(class_path="rlobjectives.Objective", init_args={"estimator": estimator})
    assert key in str(caught.value)
    assert expected in str(caught.value)


def test_short_names_stand_in_lists_and_lists_become_tuples():
    objective = parsed(
        class_path="rlobjectives.Objective",
        init_args={
            "estimator": {
                "class_path": "Combined",
                "init_args": {"estimators": [{"class_path": "GRPO", "init_args": {"weights": [1, 0]}}, {"class_path": "MaxRL"}]},
            }
        },
    )  # fmt: skip
    assert objective.estimator == Combined(estimators=(rl.GRPO(weights=(1, 0)), rl.MaxRL()))
