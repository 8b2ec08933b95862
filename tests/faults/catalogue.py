"""The cells of the fault table: every host, every fault, and where a fault has no meaning."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CELLS", "FAULTS", "HOSTS", "NOT_HERE", "Cell", "Fault", "Host"]

PLACES = ("sampling", "forward", "backward", "step", "save")


@dataclass(frozen=True)
class Host:
    """Who trains.

    Attributes:
        name: Key.
        title: As the table calls it.
        program: Module of `tests.faults` with its ``run``.
        ranks: Processes.
        strategy: Under which, where the program knows several.
    """

    name: str
    title: str
    program: str
    ranks: int = 2
    strategy: str = ""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        name: Key.
        title: As the table calls it.
        action: What is done: see `tests.faults.injection`.
        place: Where in the second rollout; empty where it is so from the start.
        rank: On which rank; None where it is on all.
        resumes: The fault lies in the checkpoint that the run resumes from.
    """

    name: str
    title: str
    action: str
    place: str = ""
    rank: int | None = 1
    resumes: bool = False


@dataclass(frozen=True)
class Cell:
    """One host with one fault."""

    host: Host
    fault: Fault

    @property
    def name(self) -> str:
        """Key of the cell, and the name of its files."""
        return f"{self.host.name}.{self.fault.name}"


HOSTS = (
    Host("own", "own loop, two ranks", "own_loop"),
    Host("lightning", "Lightning, one process", "lightning_run", ranks=1, strategy="single"),
    Host("ddp", "Lightning, ddp", "lightning_run", strategy="ddp"),
    Host("zero3", "Lightning, ZeRO-3", "lightning_run", strategy="zero3"),
    Host("fsdp2", "Lightning, FSDP2", "lightning_run", strategy="fsdp2"),
    Host("trl", "TRL, one process", "trl_run", ranks=1),
    Host("trl-ddp", "TRL, ddp", "trl_run"),
)

_ERRORS = (
    Fault("raise-sampling", "exception while sampling", "raise", "sampling"),
    Fault("raise-reward", "exception in a reward function", "raise", "reward"),
    Fault("raise-forward", "exception in the forward", "raise", "forward"),
    Fault("raise-loss", "exception in the loss", "raise", "loss"),
    Fault("nan-reward", "NaN reward", "nan", "rewards"),
    Fault("nan-logprobs", "NaN log-probability", "nan", "logprobs"),
    Fault("nan-advantage", "NaN advantage", "nan", "advantages"),
    Fault("short-rewards", "one reward too few", "shorten", "rewards"),
    Fault("short-logprobs", "log-probabilities one token too short", "shorten", "logprobs"),
    Fault("other-objective", "another option of the objective on one rank", "options"),
    Fault("other-rate", "another learning rate on one rank", "options"),
    Fault("other-epochs", "more passes over each rollout on one rank", "options"),
    Fault("other-cut", "another number of micro-batches on one rank", "options"),
    Fault("fewer-losses", "one loss fewer on one rank", "options"),
    Fault("slow", "a slow rank", "sleep", "reward"),
)
_SIGNALS = tuple(
    Fault(f"{signal.lower()}-{place}-{rank}", f"SIG{signal} to rank {rank} at {place}", signal, place, rank)
    for signal in ("KILL", "TERM")
    for place in PLACES
    for rank in (0, 1)
)
_FILES = (
    Fault("disk-full", "disk full at a save", "fill", "sampling", rank=None),
    Fault("read-only", "read-only checkpoint folder", "read-only", rank=None),
    Fault("folder-removed", "checkpoint folder deleted during the run", "remove", "sampling", rank=0),
    Fault("missing", "resume from a checkpoint that is not there", "missing", rank=None, resumes=True),
    Fault("half", "resume from half a checkpoint", "half", rank=None, resumes=True),
    Fault("damaged", "resume from a checkpoint with flipped bytes", "damage", rank=None, resumes=True),
    Fault(
        "foreign", "resume from a file that is no checkpoint of this run", "foreign", rank=None, resumes=True
    ),
)
FAULTS = _ERRORS + _SIGNALS + _FILES

NOT_HERE: dict[tuple[str, str], str] = {
    ("own", "other-rate"): "the loop owns its optimizer",
    ("own", "other-epochs"): "the loop owns its passes",
    **{(host.name, "fewer-losses"): "the host runs the losses" for host in HOSTS if host.name != "own"},
}
"""Cells that have no meaning, and why."""


def _possible(host: Host, fault: Fault) -> bool:
    if host.ranks > 1:
        return True
    on_one_rank = fault.action == "options" or fault.action == "sleep"
    return not on_one_rank and not (fault.action in ("KILL", "TERM") and fault.rank == 1)


CELLS = tuple(
    Cell(host, fault)
    for host in HOSTS
    for fault in FAULTS
    if _possible(host, fault) and (host.name, fault.name) not in NOT_HERE
)
