"""The promises of this library as laws, each run on every part and every named objective.

Nothing here knows an algorithm: parts are found by introspection (`parts.py`), and the laws are those that users run
on their own parts (`rlobjectives.testing`). `LAW_EFFORT=20` looks twenty times harder. The same cuts on real processes
are in `distributed/test_ranks.py`.
"""

from __future__ import annotations

import os
import zlib

import pytest

from rlobjectives import Component, Objective
from rlobjectives.testing import check_part
from rlobjectives.testing.laws import LAWS
from tests.parts import OBJECTIVES, PARTS, PLAIN, label

EFFORT = int(os.environ.get("LAW_EFFORT", "1"))
SUBJECTS: dict[str, Component | Objective] = {**OBJECTIVES, **{label(part): part for part in PARTS}}
WHATEVER_THE_OPTIONS = {"non-finite", "failure", "dummy", "backward", "memory", "collectives"}
"""Laws that options cannot break: they run on every part as it comes."""


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_law(name: str) -> None:
    laws = [law.name for law in LAWS if name in PLAIN or law.name not in WHATEVER_THE_OPTIONS]
    report = check_part(SUBJECTS[name], laws=laws, seed=zlib.crc32(name.encode()), effort=EFFORT)
    report.raise_if_failed()
