"""Which exchange each round of a pre-pass rides in."""

from __future__ import annotations

from typing import Any

import pytest

from rlobjectives import M2PO, OPSM, CapabilityError, EntropyMask, KLCov, Round, Sum, TokenPart, WindowError
from rlobjectives.statistics.tally import Tally
from rlobjectives.window.schedule import plan


def made(parts: dict[str, Any], waits: bool) -> tuple[list[list[str]], int | None]:
    found = plan(parts, estimator_waits=waits)
    return [[f"{turn.scope} {turn.number}" for turn in turns] for turns in found.exchanges], found.kept


@pytest.mark.parametrize(
    ("parts", "waits", "exchanges", "kept"),
    [
        ({}, True, [[]], None),
        ({"a": M2PO()}, False, [["a 0"], ["a 1"], ["a 2"]], None),
        ({"a": KLCov()}, False, [["a 0"], ["a 1"], ["a 2"], ["a 3"]], None),
        ({"a": KLCov()}, True, [[], ["a 0"], ["a 1"], ["a 2"], ["a 3"]], None),
        ({"a": KLCov(), "b": EntropyMask()}, True, [["b 0"], ["a 0", "b 1"], ["a 1", "b 2"], ["a 2"], ["a 3"]], None),
        ({"b": EntropyMask(denominator="kept")}, False, [["b 0"], ["b 1"], ["b 2"], []], 3),
        ({"c": OPSM(denominator="kept")}, True, [[], []], 1),
        ({"c": OPSM(denominator="kept")}, False, [[]], 0),
    ],
)  # fmt: skip
def test_each_comes_after_what_it_reads(parts: Any, waits: bool, exchanges: Any, kept: int | None) -> None:
    assert made(parts, waits) == (exchanges, kept)


def test_parts_of_the_version_before_get_rounds_of_their_own() -> None:
    class Old(TokenPart):
        window_statistics = {"first": Sum, "second": Sum}
        prepass_rounds = 2

        def round_statistics(self, turn: int) -> Any:
            return {("first", "second")[turn]: Sum}

    rounds = Old().rounds()
    assert [[*one.kinds] for one in rounds] == [["first"], ["second"]]
    assert all(isinstance(one, Round) for one in rounds)
    assert Old().required().needs_prepass
    assert not TokenPart().required().needs_prepass


def test_a_tally_takes_what_was_declared() -> None:
    tally = Tally({"a/tokens": Sum})
    with pytest.raises(WindowError, match="statistic 'b/tokens' is a Sum, but nothing was declared"):
        tally.add({"tokens": Sum.identity()}, "b")
    with pytest.raises(WindowError, match="statistics of a are NoneType; expected a dictionary"):
        tally.add(None, "a")
    assert tally.missing == ["a/tokens"]
    tally.add({"tokens": Sum.identity()}, "a")
    assert tally.missing == []


def test_an_option_that_takes_no_pass_needs_none() -> None:
    assert not M2PO(scope="micro_batch").required().needs_prepass
    assert M2PO(scope="micro_batch", mode="mask", denominator="kept").required().needs_prepass
    with pytest.raises(CapabilityError):
        M2PO(scope="window")
