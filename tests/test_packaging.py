"""The wheel that users get: complete, typed, and working outside this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # The build tool of this environment: an isolated build would fetch another one.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def test_holds_every_module_and_the_type_marker(wheel):
    names = {*zipfile.ZipFile(wheel).namelist()}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "rlobjectives").rglob("*.py")}
    assert expected | {"rlobjectives/py.typed"} <= names
    strangers = {name for name in names if not name.startswith(("rlobjectives/", "rlobjectives-"))}
    assert not strangers, "Tests and tools do not belong into the wheel."


def test_needs_torch_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [line.split()[1].split(">")[0] for line in needed] == ["torch"]


def test_works_outside_the_tree(wheel, tmp_path):
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel))
    program = (
        "import rlobjectives, importlib.metadata as m;"
        "print(rlobjectives.__file__);"
        "assert m.version('rlobjectives') == rlobjectives.__version__;"
        "print(rlobjectives.Objective.named('grpo'))"
    )
    # Ahead of the editable install of this tree.
    environment = os.environ | {"PYTHONPATH": str(target)}
    where, objective = run(sys.executable, "-c", program, cwd=tmp_path, env=environment).splitlines()
    assert Path(where).is_relative_to(target)
    assert objective.startswith("Objective(")
