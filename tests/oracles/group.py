"""Group estimators, one prompt at a time."""

import math


def opo(rewards, lengths):
    baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def max_rl(rewards, epsilon):
    mean = sum(rewards) / len(rewards)
    return [(r - mean) / (mean + epsilon) for r in rewards]


def centred(rewards):
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def pass_at_k(correct, k):
    """Analytic pass@k advantages of one group of booleans, with integer binomials."""
    n, c = len(correct), sum(correct)
    rho = 1 - math.comb(n - c, k) / math.comb(n, k)
    sigma = math.sqrt(rho * (1 - rho))
    if sigma == 0:
        return [0.0] * n
    others = math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1) if c < n else 0.0
    return [(1 - rho) / sigma if good else (1 - rho - others) / sigma for good in correct]


def lead(rewards, scale, epsilon):
    """Only the single best answer, by its lead over the second."""
    ordered = sorted(rewards, reverse=True)
    gap = ordered[0] - ordered[1]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    divisor = std + epsilon if scale == "group" else 1.0
    return [gap / divisor if r == ordered[0] and gap > 0 else 0.0 for r in rewards]


def overlong(length, longest, buffer):
    if length <= longest - buffer:
        return 0.0
    return max(((longest - buffer) - length) / buffer, -1.0)
