"""Every public name explains itself: a summary, every argument, and for parts their source and an example."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import rlobjectives
from rlobjectives import Component

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Source|Example|Examples):\s*$", re.MULTILINE)
PUBLIC = {name: getattr(rlobjectives, name) for name in rlobjectives.__all__}
CALLABLE = {
    name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing) or inspect.isfunction(thing)
}
PARTS = {
    name: thing
    for name, thing in CALLABLE.items()
    if inspect.isclass(thing)
    and issubclass(thing, Component)
    and dataclasses.is_dataclass(thing)
    and not inspect.isabstract(thing)
}


def sections(thing: object) -> dict[str, str]:
    """Text of each section by its title; what comes before the first one under ''."""
    pieces = SECTION.split(inspect.getdoc(thing) or "")
    return {"": pieces[0], **dict(zip(pieces[1::2], pieces[2::2], strict=True))}


def arguments(thing: object) -> list[str]:
    """What a caller passes. Nothing for exceptions and for classes that nobody constructs by hand."""
    if inspect.isclass(thing) and (issubclass(thing, BaseException) or inspect.isabstract(thing)):
        return []
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return []
    return [p.name for p in parameters if p.name != "self" and not p.name.startswith("_")]


def described(text: str) -> set[str]:
    """Names at the start of a section's entries: `name: …`, `a, b: …`, `*args: …`."""
    entries = re.findall(r"^\s{4}(?:\*{0,2})(\w+(?:,\s*\w+)*)(?:\s*\([^)]*\))?:", text, re.MULTILINE)
    return {name.strip() for entry in entries for name in entry.split(",")}


@pytest.mark.parametrize("name", sorted(CALLABLE))
def test_has_a_summary(name):
    own = (
        CALLABLE[name].__dict__.get("__doc__") if inspect.isclass(CALLABLE[name]) else CALLABLE[name].__doc__
    )
    assert own, f"{name} has no docstring of its own."
    # A dataclass without a docstring is given its own signature as one.
    assert not own.startswith(f"{name}("), f"{name} has no docstring."
    start = [line.rstrip() for line in own.strip().splitlines()[:2]]
    assert any(line.endswith((".", ":", ";", "?")) for line in start), (
        f"{name}: begin with one short sentence: {start}"
    )


@pytest.mark.parametrize("name", sorted(name for name, thing in CALLABLE.items() if arguments(thing)))
def test_describes_every_argument(name):
    thing = CALLABLE[name]
    text = sections(thing)
    # An argument that a class inherits may be described where it comes from.
    told = {
        argument
        for origin in (inspect.getmro(thing) if inspect.isclass(thing) else [thing])
        for section in ("Args", "Attributes")
        for argument in described(sections(origin).get(section, ""))
    }
    missing = [argument for argument in arguments(thing) if argument not in told]
    assert not missing, f"{name}: describe {missing} under Args (or Attributes): meaning, shape, unit."
    extra = described(text.get("Args", "")) - {*arguments(thing)}
    assert not extra, f"{name} describes {sorted(extra)}, which it does not take."


@pytest.mark.parametrize("name", sorted(PARTS))
def test_parts_name_their_source_and_show_an_example(name):
    text = sections(PARTS[name])
    # A wrapper's source is the function it wraps, and that of given numbers their host.
    assert name in ("FunctionEstimator", "GivenAdvantages") or text.get("Source", "").strip(), (
        f"{name} has no Source section: paper, equation, and where others differ."
    )
    assert ">>>" in text.get("Example", ""), f"{name} has no Example section that runs."


@pytest.mark.parametrize("name", sorted(PARTS))
def test_parts_that_raise_say_when(name):
    raises = re.search(
        r"raise \w+Error|check_\w+\(",
        inspect.getsource(PARTS[name].__dict__.get("__post_init__", PARTS[name])),
    )
    if raises:
        assert sections(PARTS[name]).get("Raises", "").strip(), (
            f"{name} checks its options but has no Raises section."
        )


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, thing in CALLABLE.items()
        if inspect.isfunction(thing) and str(thing.__annotations__.get("return")) != "None"
    ),
)
def test_functions_describe_what_they_give(name):
    assert sections(CALLABLE[name]).get("Returns", "").strip(), (
        f"{name} has no Returns section: unit, scope, gradient."
    )


def test_nothing_public_is_listed_twice():
    assert len({*rlobjectives.__all__}) == len(rlobjectives.__all__)
