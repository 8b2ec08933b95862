"""The wheel that users get: complete, typed, and working outside this tree. The sdist: it tests itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
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


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (found,) = (folder / "unpacked").iterdir()
    return found


def test_the_sdist_holds_what_is_tracked(unpacked):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert tracked - there == set()


def test_the_sdist_tests_itself(unpacked):
    """Some of its tests run from it, among them one that imports the benchmarks."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = (sys.executable, "-c", "import rlobjectives; print(rlobjectives.__file__)")
    assert Path(run(*where, cwd=unpacked, env=environment).strip()).is_relative_to(unpacked)
    some = ("tests/test_import_graph.py", "tests/test_metrics_table.py", "tests/packing/test_peers.py")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some)
    passed = run(*command, cwd=unpacked, env=environment, timeout=280)
    assert " passed" in passed and "failed" not in passed
