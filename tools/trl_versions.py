"""Run the TRL integration tests against several versions of TRL, each in its own environment, and write the table.

python tools/trl_versions.py --envs ~/trl_envs 1.0.0+transformers==4.57.6 1.7.1 1.12.0 .venv

An entry is a version of TRL, with further requirements behind plus signs, or the folder of an environment that is
there (`make setup` makes .venv). An environment that exists is used as it is; delete its folder to make it anew.
torch is installed first, by the exact version of constraints.txt, so that nothing pulls another build. Tests that
need deepspeed are skipped where it is missing. The page keeps the lines of the versions that are not run.
"""

# it runs pip, python and pytest
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "trl_versions.md"
TESTS = "tests/integrations/trl"
PACKAGES = ("trl", "transformers", "accelerate", "datasets", "peft", "deepspeed", "torch")
# requests: TRL imports it whether or not it is there, and no longer gets it from anybody.
TOOLS = (
    "peft",
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "pyyaml",
    "requests",
    "setuptools",
    "wheel",
    "ninja",
)
PATIENCE = ("-o", "timeout=1500", "-o", "faulthandler_timeout=1600")  # a busy machine is no failure
ASK = (
    "import importlib.metadata as m, json, sys; found = {d.name: d.version for d in m.distributions()}; "
    "print(json.dumps({n: found.get(n, '-') for n in sys.argv[1:]}))"
)


def constraint(name: str) -> str:
    """The exact requirement of a package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.strip() for line in lines if line.startswith(f"{name}=="))


def environment(folder: Path, requirements: list[str]) -> None:
    """Make an environment with these requirements, if it is not there."""
    if (folder / "ready").exists():
        return
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, constraint("torch")], check=True)
    subprocess.run([*pip, constraint("torch"), *requirements, *TOOLS], check=True)
    # Its build must see the torch that is there and not fetch one.
    deepspeed = [constraint("torch"), constraint("deepspeed")]
    subprocess.run([*pip, "--no-build-isolation", *deepspeed], check=True)
    (folder / "ready").touch()


def outcome(folder: Path, arguments: list[str]) -> dict[str, str]:
    """Versions of an environment's packages, and what pytest counted in it."""
    python = folder / "bin" / "python"
    paths = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    variables = {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    if (folder / "ready").exists():
        # A build of DeepSpeed's op belongs to one environment.
        variables["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")
    # Before the tests, where two ranks would wait on each other for it.
    subprocess.run([str(python), str(ROOT / "tools" / "prebuild.py")], check=True, env=variables)
    found = subprocess.run([str(python), "-c", ASK, *PACKAGES], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(found.stdout)
    run = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *PATIENCE, TESTS, *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", run.stdout)}
    if set(counts) & {"failed", "error"} or "passed" not in counts:
        print(run.stdout[-20_000:], run.stderr[-5_000:], sep="\n")
    return {**versions, **counts}


def known(page: str) -> dict[str, dict[str, str]]:
    """The lines of a page, by version of TRL."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    return {row["trl"]: row for row in rows}


def table(rows: list[dict[str, str]]) -> str:
    """The page."""
    columns = (*PACKAGES, "passed", "failed", "skipped")
    rows = sorted(rows, key=lambda row: [int(part) for part in re.findall(r"\d+", row["trl"])])
    lines = [
        "# TRL versions",
        "",
        f"`python tools/trl_versions.py` ran `{TESTS}` in one environment for each line. Supported:",
        "`trl>=1.0,!=1.15.0,<1.17`. Skipped are tests of what a version does not have, and of DeepSpeed where it is",
        "not installed.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(row.get(column, "0") for column in columns) + " |" for row in rows]
    return "\n".join([*lines, ""])


def main() -> None:
    """Read the command line, run everything, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", help="such as 1.16.0, 1.0.0+transformers==4.57.6, or a folder")
    parser.add_argument("--envs", type=Path, default=ROOT / ".cache" / "trl_envs", help="folder of new ones")
    parser.add_argument("--pytest", default="", help="further arguments of pytest, in one string")
    parser.add_argument("--no-page", action="store_true", help="print the table only")
    options = parser.parse_args()
    rows = known(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    failed = False
    for entry in options.versions:
        version, *more = entry.split("+")
        folder = Path(entry).absolute()
        if not (folder / "bin" / "python").exists():
            folder = options.envs.absolute() / f"trl-{entry.replace('=', '').replace('+', '-')}"
            environment(folder, [f"trl=={version}", *more])
        row = outcome(folder, options.pytest.split())
        failed = failed or bool(set(row) & {"failed", "error"}) or "passed" not in row
        rows[row["trl"]] = row
        page = table(list(rows.values()))
        print(page, flush=True)
        if not options.no_page:
            PAGE.write_text(page, encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
