"""Two real processes: the same update as one, groups split over ranks, empty windows, errors on all ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from tests.integrations.trl import tiny
from tests.integrations.trl.settings import SETTINGS, history, reference

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TOLERANCE = 2e-6
COMPARED = (
    "loss", "loss/total", "window/tokens", "window/sequences", "window/skipped", "reward/even/std",
    "sampling/dropped_group_fraction", "sampling/resampled_group_fraction", "sampling/extra_rounds",
    "eval_loss", "eval_loss/total", "eval_window/sequences", "eval_reward/even/mean",
)  # fmt: skip


def launch(mode: str, out: Path, limit: float) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(HERE / "rank_program.py")]
    # Into a file: a rank that outlives its launcher would hold a pipe open for ever.
    with Path(f"{out}.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen([*command, str(out), mode], env=environment, stdout=log, stderr=log)
        try:
            process.wait(timeout=limit)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
            process.terminate()  # the launcher ends its ranks, which are sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40.0)
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read()
    if hung:
        pytest.fail(f"two ranks hung for {limit} s under {mode}; last words:\n{output[-3000:]}")
    assert process.returncode == 0, output[-5000:]
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One-process results, by setting."""
    found = {}
    for name, setting in SETTINGS.items():
        if not setting.fails:
            trained = reference(setting)
            found[name] = (tiny.parameters(trained), history(trained))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1400)  # the launch has its own, shorter limit
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_two_ranks_do_what_one_does(mode: str, alone: dict[str, Any], tmp_path: Path) -> None:
    if mode == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    busy = min(6.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))  # others may want the cores, too
    ranks = launch(mode, tmp_path / "out", 200.0 * busy)
    assert ranks[0].keys() == ranks[1].keys()
    gaps = {}
    for name, expected in alone.items():
        if mode not in SETTINGS[name].modes:
            continue
        for rank in ranks:
            found = rank[name]
            gaps[name] = float((found["parameters"] - expected[0]).abs().max())
            assert len(found["history"]) == len(expected[1])
            for mine, theirs in zip(found["history"], expected[1], strict=True):
                for metric in COMPARED:
                    near = 2e-4 if metric == "loss" else 1e-5  # older Trainers round it
                    assert mine.get(metric) == pytest.approx(theirs.get(metric), abs=near), (name, metric)
    assert max(gaps.values()) <= TOLERANCE, gaps
    skipped = [entry["window/skipped"] for entry in ranks[1]["empty"]["history"]]
    assert skipped == [1.0, 0.0]
    (line,) = (entry for entry in ranks[0]["evaluation"]["history"] if "eval_loss" in entry)
    assert line["eval_window/sequences"] == 6.0  # 8 and 4: what fills up the last batch does not count
    assert abs(line["eval_loss"]) > 1e-3
    for name, event in (("drop", "dropped_group_fraction"), ("resample", "resampled_group_fraction")):
        happened = [entry[f"sampling/{event}"] for entry in ranks[0][name]["history"]]
        assert 0.0 < sum(happened) < len(happened), (name, happened)
    refused = [rank["fails_its_test"]["error"] for rank in ranks]
    assert refused[1].startswith("CapabilityError: Qwen2ForCausalLM fails the self-test before training")
    assert refused[0].startswith("RankError: rank 1 stopped with CapabilityError"), refused
    if mode == "ddp":
        lost = [rank["lost_file"]["error"] for rank in ranks]
        assert all("rank 1 does not find its part of the rollout" in error for error in lost), lost
        errors = [rank["nan_on_one_rank"]["error"] for rank in ranks]
        assert all("NonFiniteError: rank 1, micro-batch 0: logprobs" in error for error in errors)
        assert all("Raised on all 2 ranks" in error for error in errors)
