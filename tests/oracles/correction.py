"""Weights, tests and metrics of a sampler/trainer mismatch, sequence by sequence in plain Python."""

from __future__ import annotations

import math

Sequences = list[list[float]]  # log-weights, old minus behaviour, one list per sequence


def raw(log: Sequences, weight: str) -> Sequences:
    if weight == "none":
        return [[1.0 for _ in row] for row in log]
    if weight == "token":
        return [[math.exp(x) for x in row] for row in log]
    total = [math.fsum(row) for row in log]
    if weight == "geometric":
        total = [s / max(len(row), 1) for s, row in zip(total, log, strict=True)]
    return [[math.exp(s) for _ in row] for s, row in zip(total, log, strict=True)]


def bounded(
    log: Sequences, weight: str, outside: str, low: float, high: float
) -> tuple[Sequences, list[list[bool]]]:
    found = raw(log, weight)
    inside = [[low <= w <= high for w in row] for row in found]
    clipped = [[min(max(w, low), high) for w in row] for row in found]
    if outside == "truncate":
        return clipped, [[True for _ in row] for row in found]
    return clipped, inside


def measure(x: float, kind: str) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]


def passes(log: Sequences, kind: str, over: str, low: float | None, high: float | None) -> list[list[bool]]:
    def fine(score: float) -> bool:
        score = math.exp(score) if kind == "k1" else score
        return (low is None or score >= low) and (high is None or score <= high)

    verdict = []
    for row in log:
        scores = [measure(x, kind) for x in row]
        if over == "token":
            verdict.append([fine(s) for s in scores])
            continue
        if over == "max":
            whole = all(fine(s) for s in scores)
        else:
            total = math.fsum(scores)
            whole = fine(total if over == "sum" else total / max(len(row), 1))
        verdict.append([whole] * len(row))
    return verdict


def metrics(log: Sequences) -> dict[str, float]:
    flat = [x for row in log for x in row]
    w = [math.exp(x) for x in flat]
    n = len(flat)
    filled = [row for row in log if row]
    return {
        "mismatch/kl": -math.fsum(flat) / n,
        "mismatch/k3": math.fsum(v - 1 - x for v, x in zip(w, flat, strict=True)) / n,
        "mismatch/chi2_token": math.fsum(v * v for v in w) / n - 1,
        "mismatch/chi2_sequence": math.fsum(math.exp(2 * math.fsum(row)) for row in filled) / len(filled) - 1,
        "mismatch/ess": math.fsum(w) ** 2 / (n * math.fsum(v * v for v in w)),
        "mismatch/logprob_abs_diff": math.fsum(abs(x) for x in flat) / n,
        "mismatch/perplexity_ratio": math.fsum(math.exp(-math.fsum(row) / len(row)) for row in filled)
        / len(filled),
    }
