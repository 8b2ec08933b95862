"""Policy losses of one sequence as their papers write them: lists in, a list of token losses out."""

from __future__ import annotations

import math

from tests.oracles.dual import Dual, clip, exp, larger, lift, sigmoid, smaller, stop, total

Numbers = list[float]


def ratio(logprob: Dual, old: float) -> Dual:
    return exp(clip(logprob - old, -20.0, 20.0))


def clipped(l: list[Dual], old: Numbers, a: Numbers, low: float, high: float) -> list[Dual]:
    rhos = [ratio(x, o) for x, o in zip(l, old, strict=True)]
    return [larger(-adv * r, -adv * clip(r, 1 - low, 1 + high)) for r, adv in zip(rhos, a, strict=True)]


def cispo(
    l: list[Dual], old: Numbers, a: Numbers, bounds: str, low: float, high: float, cap: float
) -> list[Dual]:
    out = []
    for x, o, adv in zip(l, old, a, strict=True):
        w = stop(ratio(x, o))
        if bounds == "two_sided":
            w = clip(w, 1 - low, 1 + high)
        elif bounds == "upper":
            w = smaller(w, cap)
        else:
            w = smaller(w, 1 + high) if adv >= 0 else larger(w, 1 - low)
        out.append(-adv * w * x)
    return out


def mean_log_ratio(l: list[Dual], old: Numbers) -> Dual:
    return total([x - o for x, o in zip(l, old, strict=True)]) / max(len(l), 1)


def gspo(l: list[Dual], old: Numbers, a: Numbers, low: float, high: float) -> list[Dual]:
    s = exp(clip(mean_log_ratio(l, old), -20.0, 20.0))
    return [larger(-adv * s, -adv * clip(s, 1 - low, 1 + high)) for adv in a]


def gspo_token(l: list[Dual], old: Numbers, a: Numbers, low: float, high: float) -> list[Dual]:
    mean = stop(mean_log_ratio(l, old))
    out = []
    for x, adv in zip(l, a, strict=True):
        s = exp(clip(mean + (x - stop(x)), -20.0, 20.0))
        out.append(larger(-adv * s, -adv * clip(s, 1 - low, 1 + high)))
    return out


def sapo(l: list[Dual], old: Numbers, a: Numbers, positive: float, negative: float) -> list[Dual]:
    out = []
    for x, o, adv in zip(l, old, a, strict=True):
        tau = positive if adv > 0 else negative
        out.append(-adv * (4 / tau) * sigmoid(tau * (ratio(x, o) - 1.0)))
    return out


def gmpo(l: list[Dual], old: Numbers, a: Numbers, low: float, high: float) -> list[Dual]:
    held = []
    for x, o, adv in zip(l, old, a, strict=True):
        d = x - o
        held.append(smaller(d, high) if adv > 0 else larger(d, -low) if adv < 0 else lift(0.0))
    count = max(len(l), 1)
    s = exp(clip(total(held) / count, -20.0, 20.0))
    mean = math.fsum(a) / count
    return [-mean * s for _ in l]


def vespo(
    l: list[Dual], old: Numbers, a: Numbers, positive: tuple[float, float], negative: tuple[float, float]
) -> list[Dual]:
    log_w = math.fsum(min(max(x.value - o, -20.0), 20.0) for x, o in zip(l, old, strict=True))
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    out = []
    for x, adv in zip(l, a, strict=True):
        k, rate = positive if adv >= 0 else negative
        out.append(-adv * math.exp(rate + k * log_w - rate * math.exp(log_w)) * x)
    return out


def dppo(
    l: list[Dual], old: Numbers, a: Numbers, divergence: str, low: float, high: float, cap: float
) -> list[Dual]:
    out = []
    for x, o, adv in zip(l, old, a, strict=True):
        p, q = math.exp(x.value), math.exp(o)
        if divergence == "tv":
            keep = p - q <= high if adv > 0 else p - q >= -low
        else:
            kl = q * (o - x.value) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            keep = kl <= high or p <= q if adv > 0 else kl <= low or p >= q
        w = smaller(stop(ratio(x, o)), cap)
        out.append(-adv * w * x if keep else 0.0 * x)
    return out


def dro(l: list[Dual], old: Numbers, a: Numbers, beta: float) -> list[Dual]:
    return [-(adv * x - beta / 2 * (x - o) * (x - o)) for x, o, adv in zip(l, old, a, strict=True)]


def decoupled(
    l: list[Dual],
    old: Numbers,
    a: Numbers,
    behavior: Numbers,
    low: float,
    high: float,
    cap: float,
    mask: bool,
) -> list[Dual]:
    out = []
    for loss, o, b in zip(clipped(l, old, a, low, high), old, behavior, strict=True):
        w = math.exp(min(max(o - b, -20.0), 20.0))
        out.append((0.0 if mask else cap) * loss if w > cap else w * loss)
    return out


def reinforce(l: list[Dual], old: Numbers, a: Numbers, weight: str, cap: float) -> list[Dual]:
    whole = math.fsum(x.value - o for x, o in zip(l, old, strict=True))
    out = []
    for x, o, adv in zip(l, old, a, strict=True):
        log = {"none": 0.0, "token": x.value - o, "sequence": whole}[weight]
        out.append(-adv * min(math.exp(min(max(log, -20.0), 20.0)), cap) * x)
    return out


def kl(l: list[Dual], ref: Numbers, estimator: str, old: Numbers | None = None) -> list[Dual]:
    """k1, k2, k3, abs, straight-through k1+ and k3+, and ρ·k3."""
    out = []
    for place, (x, r) in enumerate(zip(l, ref, strict=True)):
        d = x - r
        k3 = exp(-d) - 1.0 + d
        if estimator == "k1":
            out.append(d)
        elif estimator == "k2":
            out.append(d * d / 2)
        elif estimator == "abs":
            out.append(larger(d, -d))
        elif estimator == "k3":
            out.append(k3)
        elif estimator == "ratio_k3":
            assert old is not None
            out.append(exp(x - old[place]) * k3)
        else:
            k2 = d * d / 2
            out.append(k2 - stop(k2) + stop(d if estimator == "k1+" else k3))
    return out
