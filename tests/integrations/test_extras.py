"""Without the packages of an extra, whatever needs them names the extra; with others missing nothing changes."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from rlobjectives.integrations.extras import EXTRAS, MissingExtraError

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({packages!r}))  # None: importing it fails, and it is not found
try:
    {statement}
except ImportError as error:
    print(type(error).__name__, error, sep="|")
"""


def said(statement: str, *packages: str) -> str:
    program = BLOCKED.format(packages=packages, statement=statement)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("statement", "package", "extra"),
    [
        ("import rlobjectives.integrations.lightning", "numpy", "lightning"),
        ("import rlobjectives.integrations.lightning", "lightning", "lightning"),
        ("from rlobjectives.integrations.lightning import CausalLMPolicy", "transformers", "lightning"),
        ("import rlobjectives.integrations.transformers", "transformers", "lightning"),
        ("import rlobjectives.integrations.trl", "trl", "trl"),
    ],
)
def test_the_extra_is_named(statement: str, package: str, extra: str) -> None:
    told = said(statement, package)
    assert told.startswith("MissingExtraError|")
    assert f"needs {package}" in told and f'pip install "rlobjectives[{extra}]"' in told


def test_deepspeed_is_named_where_a_strategy_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("rlobjectives.integrations.lightning")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for make in (
        lambda: lightning.resolve_strategy("deepspeed_stage_3", "cpu"),
        lightning.DeepSpeedCPUStrategy,
    ):
        with pytest.raises(MissingExtraError, match=r'rlobjectives\[deepspeed\]"'):
            make()
    assert lightning.resolve_strategy("ddp", "cpu") == "ddp"


def test_every_extra_is_one_of_the_package() -> None:
    assert set(EXTRAS) <= {*(metadata.metadata("rlobjectives").get_all("Provides-Extra") or ())}
