"""Play one cell: the run with its fault, what it leaves on the disk, and whether a run that resumes from it is right."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.causal_lm.small_model import save_small_model
from tests.faults.catalogue import Cell, Host
from tests.faults.runs import Run, Runner

__all__ = ["Outcome", "Stage"]

TOLERANCE = 1e-6
"""Of weights of another cut, relative to the largest; everything else is equal to the last bit."""


@dataclass
class Outcome:
    """What happened in a cell.

    Attributes:
        cell: Its key.
        verdict: ``stops``, ``right``, ``hangs``, ``silently wrong`` or ``did not happen``.
        ranks: How each rank ended, in words.
        seconds: From the fault to the end of the last process.
        left: What is on the disk, in words.
    """

    cell: str
    verdict: str
    ranks: list[str] = field(default_factory=list)
    seconds: float = 0.0
    left: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


class Stage:
    """Everything that cells share: the fork server, a model, and each host's run without a fault.

    Args:
        folder: For all files.
        limit: Seconds after which a run counts as hanging.
    """

    def __init__(self, folder: Path, limit: float = 60.0) -> None:
        self.folder = folder.resolve()
        self.runner = Runner(self.folder, limit)
        self.model = save_small_model(self.folder / "model")
        self._clean: dict[str, Run] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.__exit__()

    def clean(self, host: Host, fault: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Weights at the end of the host's run without any fault, or with one that it is known to take rightly.

        Checkpoints of these runs stay.
        """
        name = f"{host.name}.{fault['action'] if fault else 'clean'}"
        if name not in self._clean:
            where = self.folder / name
            shutil.rmtree(where, ignore_errors=True)
            run = self._run(host, where / "logs", where / "saves", fault=fault or {})
            if not run.finished:
                said = [rank.words for rank in run.ranks]
                raise RuntimeError(f"{name}: this run of {host.title} did not finish: {said}; see {where}")
            self._clean[name] = run
        return self._clean[name].weights[0]

    def play(self, cell: Cell) -> Outcome:
        """Run the cell and judge it."""
        expected = self.clean(cell.host)
        fault = asdict(cell.fault)
        if cell.host.ranks == 1 and fault["rank"]:
            fault["rank"] = 0
        if cell.fault.name == "nan-reward" and cell.host.program != "own_loop":
            # Of a reward function: it cannot score this one, as if it had returned None.
            expected = self.clean(cell.host, {**fault, "action": "none"})
        where = self.folder / cell.name
        shutil.rmtree(where, ignore_errors=True)
        saves = where / "saves"
        saves.mkdir(parents=True)
        small = cell.fault.action == "fill" and self.runner.mount(saves, "8m")
        try:
            if cell.fault.resumes:
                return self._resume_from_bad(cell, where, expected)
            if cell.fault.action == "read-only":
                saves.chmod(0o555)
            run = self._run(cell.host, where / "first", saves, fault=fault)
            saves.chmod(0o755) if saves.exists() else None
            verdict = self._verdict(run, expected)
            if cell.fault.place and not run.struck:
                verdict = "did not happen"
            if small:  # somebody makes room again
                (self.runner.seen_by_ranks(saves) / "other people's file").unlink(missing_ok=True)
            # A run that has ended is not resumed: TRL's Trainer would take a step more.
            left, resumed = self._left(cell.host, where, saves, expected, skip=int(run.finished))
            if verdict in ("stops", "right") and resumed in ("hangs", "silently wrong"):
                verdict = resumed
            return Outcome(cell.name, verdict, [rank.words for rank in run.ranks], run.seconds, left)
        finally:
            if small:
                self.runner.unmount(saves)

    def _run(self, host: Host, logs: Path, saves: Path, **options: Any) -> Run:
        return self.runner.run(host, logs, saves, model=self.model, **options)

    def _verdict(self, run: Run, expected: torch.Tensor) -> str:
        if any(rank.code is None for rank in run.ranks):
            return "hangs"
        near = float(expected.abs().max()) * TOLERANCE
        for weights in run.weights:
            if weights.shape != expected.shape or not bool(((weights - expected).abs() <= near).all()):
                return "silently wrong"
        return "right" if run.finished else "stops"

    def _checkpoints(self, host: Host, saves: Path) -> list[Path]:
        program = importlib.import_module(f"tests.faults.{host.program}")
        seen = self.runner.seen_by_ranks(saves)
        return [saves / path.name for path in program.checkpoints(seen)]

    def _left(
        self, host: Host, where: Path, saves: Path, expected: torch.Tensor, skip: int = 0
    ) -> tuple[str, str]:
        """Resume from the newest checkpoint that is taken, in words, and the verdict on that run."""
        said = []
        for number, path in enumerate(self._checkpoints(host, saves)[skip:]):
            run = self._run(host, where / f"again-{number}", saves, resume=str(path))
            verdict = self._verdict(run, expected)
            if verdict != "stops":
                result = {"right": "resumes to the same end"}.get(verdict, f"resumes and is {verdict}")
                return "; ".join([*said, f"{path.name} {result}"]), verdict
            told = next((rank for rank in run.ranks if rank.raised), run.ranks[0])
            said.append(f"{path.name} is refused ({told.words})")
        return "; ".join([*said, "no checkpoint"]), "none"

    def _resume_from_bad(self, cell: Cell, where: Path, expected: torch.Tensor) -> Outcome:
        saves = where / "saves"
        shutil.copytree(self.folder / f"{cell.host.name}.clean" / "saves", saves, dirs_exist_ok=True)
        last, bad, *_ = self._checkpoints(cell.host, saves)
        _remove(last)  # the run ended with it; what was made before is what a user would resume from
        spoil(bad, cell.fault.action)
        run = self._run(cell.host, where / "first", saves, resume=str(bad), fault=asdict(cell.fault))
        verdict = self._verdict(run, expected)
        if verdict == "right" and cell.fault.action != "missing":
            verdict = "silently wrong"  # what is damaged cannot be told from what is whole
        _remove(bad)
        left, resumed = self._left(cell.host, where, saves, expected)
        if verdict == "stops" and resumed != "right":
            verdict = "the one before does not load"
        return Outcome(cell.name, verdict, [rank.words for rank in run.ranks], run.seconds, left)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def spoil(checkpoint: Path, action: str) -> None:
    """Make a checkpoint half, damaged, foreign or missing."""
    if action == "missing":
        _remove(checkpoint)
        return
    files = [checkpoint] if checkpoint.is_file() else [p for p in checkpoint.rglob("*") if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    if action == "half":
        largest.write_bytes(data[: len(data) // 2])
    elif action == "damage":
        middle = len(data) // 2
        flipped = bytes(byte ^ 0x40 for byte in data[middle : middle + 64])
        largest.write_bytes(data[:middle] + flipped + data[middle + 64 :])
    elif action == "foreign":
        for path in files:
            path.unlink()
        torch.save({"weights": torch.zeros(3)}, largest)
    else:
        raise ValueError(f"{action!r} is no way to spoil a checkpoint")
