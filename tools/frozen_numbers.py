"""Keep what every objective computes, to the last bit, and compare with it after a change that should change nothing.

`python tools/frozen_numbers.py write` computes and stores; `python tools/frozen_numbers.py compare` computes again and
names every objective and quantity that differs in any bit, with the largest difference. Bits hold on one kind of CPU:
write and compare on the same machine. `tests/test_frozen_numbers.py` compares the stored file with a tolerance, which
holds on any.

The data come from integer arithmetic alone, so that no generator's stream is part of what is compared.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed

import rlobjectives as rl
from frozen_data import RUNS, Data, Run
from rlobjectives import (
    ALGORITHMS,
    LOCAL,
    CapabilityError,
    Objective,
    PackedLayout,
    PaddedLayout,
    Rollouts,
    TokenBatch,
)
from rlobjectives.statistics import measured_values

PATH = ROOT / "tests" / "data" / "frozen_numbers.json"

REQUIRED: Mapping[str, Mapping[str, Any]] = {"dr_grpo": {"reduction": {"max_tokens": 8}}}
"""Options that a registered objective has no default for."""

WITH_GRADIENT = ("logprobs", "entropy", "behavior_kl", "ref_kl", "teacher_divergence", "values")

Numbers = dict[str, Tensor]
"""Flat float64 by quantity."""


def _of_tokens(rollouts: Rollouts) -> Tensor:
    reader = "the frozen function"
    return rollouts.tokens(reader).expand(rollouts.rewards.sum(1)) - 0.1 * rollouts.need(
        "old_logprobs", reader
    )


OTHERS: Mapping[str, Callable[[], Objective]] = {
    "all optional parts": lambda: Objective(
        estimator=rl.GRPO(scale="batch", weights=(1.0, 0.5)),
        policy_loss=rl.ClippedSurrogate(dual_clip=3.0),
        reduction=rl.SequenceMean(),
        kl=rl.KLPenalty(coef=0.1),
        correction=rl.ImportanceCorrection(normalize=True, outside="mask", high=1.3, denominator="kept"),
        off_policy_mask=rl.OPSM(threshold=0.01, denominator="kept"),
        entropy_mask=rl.EntropyMask(fraction=0.6, denominator="kept"),
        distillation=rl.ReverseKLDistillation(coef=0.2),
        value_loss=rl.ClippedValueLoss(coef=0.5),
        entropy_coef=0.01,
    ),
    "combined estimators": lambda: Objective(
        estimator=rl.Combined(estimators=(rl.GDPO(), rl.TeacherSignal(coef=0.5)), weights=(1.0, -0.5)),
        reduction=rl.LengthPower(power=0.5),
    ),
    "correction of sequences": lambda: Objective(
        estimator=rl.RLOO(weights=(0.5, 2.0)),
        policy_loss=rl.GSPO(),
        reduction=rl.PromptMean(),
        correction=rl.ImportanceCorrection(
            weight="geometric", reject=(rl.Rejection(over="sum", high=1.5),), veto=0.5
        ),
    ),
    "exact divergences": lambda: Objective(
        estimator=rl.GRPO(baseline="leave_one_out", epsilon_mode="clamp", ddof=0),
        kl=rl.KLPenalty(coef=0.2, estimator="full"),
        distillation=rl.DivergenceDistillation(coef=0.3),
        reduction=rl.FixedBudget(max_tokens=8),
    ),
    "function of tokens": lambda: Objective(
        estimator=rl.FunctionEstimator(function=_of_tokens, token_level=True)
    ),
    "gdpo over tokens": lambda: Objective(
        estimator=rl.GDPO(
            weights=(1.0, 0.5), baseline="leave_one_out", whiten_unit="token", whiten_mode="variance"
        ),
        policy_loss=rl.Reinforce(weight="token", weight_cap=1.1),
        reduction=rl.SequenceSum(),
    ),
    "kl_cov after whitening": lambda: Objective(
        estimator=rl.GDPO(), policy_loss=rl.KLCov(fraction=0.2, divergence="k3"), reduction=rl.TokenMean()
    ),
    "m2po that drops": lambda: Objective(
        estimator=rl.GDPO(), policy_loss=rl.M2PO(mode="mask", budget=0.005, denominator="kept")
    ),
    "m2po water level": lambda: Objective(estimator=rl.GRPO(), policy_loss=rl.M2PO(mode="clip_waterfill")),
    "p3o by sequence": lambda: Objective(
        estimator=rl.GRPO(), policy_loss=rl.P3O(ess_scope="sequence", kl_mode="exact")
    ),
    "sampler's policy": lambda: Objective(
        estimator=rl.ReinforcePlusPlusBaseline(),
        policy_loss=rl.VESPO(),
        kl=rl.KLPenalty(estimator="ratio_k3"),
    ),
    "td_lambda": lambda: Objective(
        estimator=rl.TDLambda(), value_loss=rl.ClippedValueLoss(clip=None, huber_delta=0.3), entropy_coef=0.02
    ),
}
"""Parts and options that no registered objective uses, by what they are about."""


def objectives() -> dict[str, Objective]:
    """Every objective that is frozen, by name."""
    named = {name: Objective.named(name, **REQUIRED.get(name, {})) for name in ALGORITHMS}
    return {**named, **{name: make() for name, make in OTHERS.items()}}


def suited(objective: Objective) -> tuple[str, Data]:
    """The most general data that the objective's estimator takes, and what they are called."""
    for name, data in Data().variants():
        try:
            objective.estimator.estimate(data.rollouts(RUNS["padded"]))
        except CapabilityError:
            continue
        return name, data
    raise CapabilityError(f"{objective.name} takes none of the frozen data.")


def compute(objective: Objective, data: Data, run: Run) -> Numbers:
    """Everything that the objective makes of the data, laid out and cut like that."""
    estimator, rollouts = objective.estimator, data.rollouts(run)
    layout, estimate = data.layout(run), estimator.estimate(rollouts)
    found: Numbers = {"estimate": data.lift(estimate, run) if estimator.token_level else estimate}
    leaves = {name: data.columns[name].clone().requires_grad_() for name in WITH_GRADIENT}
    columns = {name: data.lay(one, run) for name, one in {**data.columns, **leaves}.items()}
    columns["returns"] = columns["values"].detach() + 0.25
    statistics = {
        **rl.reward_metrics(rollouts, estimator, estimate=estimate),
        **rl.group_metrics(rollouts, estimator, estimate=estimate),
        **rl.length_metrics(rollouts),
    }
    if estimator.value_estimators():
        columns["returns"] = estimator.value_targets(rollouts)
        found["value_targets"] = data.lift(columns["returns"], run)
        statistics |= rl.value_metrics(columns["values"], columns["returns"], layout)
    known = {one.name for one in fields(TokenBatch)}
    batches = []
    builder = objective.window(LOCAL)
    for rows in run.cut:
        index = torch.tensor(rows)
        own = layout.rows(index)
        part = layout.rows_of(estimate, index) if estimator.token_level else estimate[index]
        laid: dict[str, Any] = {
            name: layout.rows_of(one, index) for name, one in columns.items() if name in known
        }
        batches.append((part, TokenBatch(layout=own, **laid)))
        builder.add(estimate=part, layout=own)
        builder.add_prepass(batches[-1][1])
    window = builder.freeze()
    advantages, weights, losses, outputs = [], [], [], []
    for part, tokens in batches:
        advantages.append(window.advantages(part, tokens.layout))
        weights.append(window.weights(tokens.layout))
        outputs.append(window.loss(tokens.replace(advantages=advantages[-1])))
        losses.append(outputs[-1].loss)
    found["advantages"] = data.lift(_together(layout, run, advantages), run)
    found["weights"] = data.lift(_together(layout, run, weights), run)
    found["loss"] = torch.stack(losses).sum()
    found["loss"].backward()  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            assert not leaf.grad[~data.mask].any(), f"{name} has a gradient where nothing counts"
            found[f"gradient in {name}"] = leaf.grad[data.mask]
    metrics = {**measured_values(statistics), **window.summarize(outputs)}
    found |= {f"metric {name}": torch.tensor(metrics[name], dtype=torch.float64) for name in sorted(metrics)}
    return {name: one.detach().double().flatten() for name, one in found.items()}


def _together(layout: PaddedLayout | PackedLayout, run: Run, parts: Sequence[Tensor]) -> Tensor:
    """The micro-batches' token tensors as one of the whole layout."""
    whole = parts[0].new_zeros(layout.shape)
    places = torch.arange(whole.numel()).reshape(layout.shape)
    for rows, part in zip(run.cut, parts, strict=True):
        whole.view(-1)[layout.rows_of(places, torch.tensor(rows)).flatten()] = part.flatten()
    return whole


# What is stored -------------------------------------------------------------------------------------


def numbers_of(objective: Objective) -> tuple[str, dict[str, Numbers]]:
    """What the data are called, and every quantity by run."""
    name, data = suited(objective)
    return name, {run: compute(objective, data, how) for run, how in RUNS.items()}


def pack(runs: Mapping[str, Numbers]) -> dict[str, Any]:
    """Quantities of every run as text: the bits of the first, and how far the others' are from them."""
    first = runs[next(iter(RUNS))]
    assert all(list(one) == list(first) for one in runs.values()), "runs report different quantities"
    singles = [name for name, one in first.items() if name.startswith("metric ")]
    found: dict[str, Any] = {
        name: {
            "begins": [float(f"{x:.6g}") for x in one[:3].tolist()],
            "bits": _encoded([run[name] for run in runs.values()]),
        }
        for name, one in first.items()
        if name not in singles
    }
    table = [torch.cat([run[name] for name in singles]) for run in runs.values()]
    shown = {name.removeprefix("metric "): float(f"{float(first[name]):.6g}") for name in singles}
    return {**found, "metrics": {"are": shown, "bits": _encoded(table)}}


def unpack(stored: Mapping[str, Any]) -> dict[str, Numbers]:
    """The inverse of `pack`."""
    found: dict[str, Numbers] = {run: {} for run in RUNS}
    for name, entry in stored.items():
        for run, numbers in zip(RUNS, _decoded(entry["bits"]), strict=True):
            if name == "metrics":
                found[run] |= {
                    f"metric {key}": numbers[place : place + 1] for place, key in enumerate(entry["are"])
                }
            else:
                found[run][name] = numbers
    return found


def _encoded(runs: Sequence[Tensor]) -> str:
    bits = [one.contiguous().view(torch.int64) for one in runs]
    rows = [bits[0], *(one - bits[0] for one in bits[1:])]
    # Transposed, so that the high bytes, which are all 0 or all 1, lie side by side.
    raw = torch.stack(rows).view(torch.uint8).reshape(len(runs), -1, 8).transpose(1, 2).contiguous()
    return base64.b85encode(zlib.compress(raw.numpy().tobytes(), 9)).decode()


def _decoded(text: str) -> list[Tensor]:
    raw = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=torch.uint8)
    rows = raw.reshape(len(RUNS), 8, -1).transpose(1, 2).flatten().view(torch.int64).reshape(len(RUNS), -1)
    return [rows[0].view(torch.float64), *((rows[0] + one).view(torch.float64) for one in rows[1:])]


def load() -> dict[str, dict[str, Any]]:
    """What is stored, by objective."""
    stored: dict[str, dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
    return stored


def write() -> None:
    """Compute and store, one line an objective."""
    lines = []
    for name, objective in objectives().items():
        data, runs = numbers_of(objective)
        entry = json.dumps({"data": data, "numbers": pack(runs)}, ensure_ascii=False, separators=(",", ":"))
        lines.append(f"{json.dumps(name)}: {entry}")
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# What differs ---------------------------------------------------------------------------------------


def differences(
    name: str, objective: Objective, stored: Mapping[str, Any], relative: float = 0.0
) -> list[str]:
    """One sentence for each quantity that is not what was stored.

    Args:
        name: Of the objective.
        objective: As it is now.
        stored: Its entry of the file.
        relative: Largest difference allowed, relative to the largest entry of the quantity (to 1e-3 where all are
            smaller, for sums that cancel); 0 compares bits.
    """
    data, runs = numbers_of(objective)
    if data != stored["data"]:
        return [f"{name}: its estimator takes data {data}; it was frozen {stored['data']}"]
    found = []
    for run, expected in unpack(stored["numbers"]).items():
        now = runs[run]
        found += [f"{name} ({run}): {one} is gone" for one in expected.keys() - now.keys()]
        found += [f"{name} ({run}): {one} is new" for one in now.keys() - expected.keys()]
        for quantity in expected.keys() & now.keys():
            old, new = expected[quantity], now[quantity]
            if old.shape != new.shape:
                found.append(
                    f"{name} ({run}): {quantity} has {new.numel()} entries; {old.numel()} were frozen"
                )
                continue
            apart = (new - old).abs()
            other = old.view(torch.int64) != new.contiguous().view(torch.int64)
            if relative:
                other &= ~(apart <= relative * old.abs().max().clamp_min(1e-3))
            if other.any():
                found.append(
                    f"{name} ({run}): {quantity} differs in {int(other.sum())} of {old.numel()} entries, "
                    f"by {float(apart.max()):.3g} at most (largest entry {float(old.abs().max()):.3g})"
                )
    return sorted(found)


def compare(relative: float = 0.0) -> list[str]:
    """What differs in any objective."""
    stored, now = load(), objectives()
    found = [f"{name} is gone" for name in stored.keys() - now.keys()]
    found += [
        f"{name} is new: run `python tools/frozen_numbers.py write`" for name in now.keys() - stored.keys()
    ]
    for name in now.keys() & stored.keys():
        found += differences(name, now[name], stored[name], relative)
    return sorted(found)


def main(arguments: Sequence[str]) -> int:
    """Write, or compare bit for bit."""
    torch.set_num_threads(1)
    if list(arguments) == ["write"]:
        write()
        return 0
    if list(arguments) == ["compare"]:
        found = compare()
        print("\n".join(found) or f"{len(load())} objectives: every number as it was, to the last bit")
        return int(bool(found))
    print("usage: python tools/frozen_numbers.py write|compare", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
