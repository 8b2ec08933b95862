"""Reductions of a window of token losses: one list of counted losses a sequence."""

import math


def token_mean(losses):
    count = sum(len(row) for row in losses)
    return math.fsum(x for row in losses for x in row) / count if count else 0.0


def sequences(losses, count):
    return len(losses) if count == "all" else sum(1 for row in losses if row)


def sequence_mean(losses, count="all"):
    total = sequences(losses, count)
    return math.fsum(math.fsum(row) / len(row) for row in losses if row) / total if total else 0.0


def sequence_sum(losses, count="all"):
    total = sequences(losses, count)
    return math.fsum(x for row in losses for x in row) / total if total else 0.0


def fixed_budget(losses, budget, count="all"):
    return sequence_sum(losses, count) / budget


def prompt_mean(losses, prompts):
    found = {}
    for row, prompt in zip(losses, prompts):
        found.setdefault(prompt, []).extend(row)
    return math.fsum(math.fsum(row) / len(row) for row in found.values() if row) / len(found)
