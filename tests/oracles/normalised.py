"""GRPO, GDPO and RLOO, one prompt after the other, in plain floats."""

import math


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def std(numbers, ddof):
    if len(numbers) <= ddof:
        return 0.0
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / (len(numbers) - ddof))


def groups(ids):
    """Members of each group, in the order they appear."""
    found = {}
    for place, one in enumerate(ids):
        found.setdefault(one, []).append(place)
    return list(found.values())


def standardise(column, scored, ids, *, scale="group", baseline="inclusive", epsilon, mode="add", ddof=1):
    """One reward column against its group; 0 for constant groups and unscored cells."""
    out = [0.0] * len(column)
    for members in groups(ids):
        known = [i for i in members if scored[i]]
        if len(known) < 2 or len({column[i] for i in known}) == 1:
            continue
        for i in known:
            others = [column[j] for j in known if j != i]
            level = mean(others) if baseline == "leave_one_out" else mean([column[j] for j in known])
            out[i] = column[i] - level
            if scale != "group":
                continue
            if baseline == "leave_one_out" and len(set(others)) == 1:
                continue  # the others have no spread
            spread = std(others if baseline == "leave_one_out" else [column[j] for j in known], ddof)
            out[i] /= spread + epsilon if mode == "add" else max(spread, epsilon)
    return out


def combine(rewards, scored, weights):
    """Weighted sum of the scored cells of each row, and whether there is any."""
    sums = [
        math.fsum(w * r for w, r, s in zip(weights, row, flags) if s) for row, flags in zip(rewards, scored)
    ]
    return sums, [any(flags) for flags in scored]


def grpo(
    rewards, scored, ids, weights, *, scale="group", baseline="inclusive", epsilon=1e-6, mode="add", ddof=1
):
    sums, known = combine(rewards, scored, weights)
    within = "group" if scale == "group" else "none"
    out = standardise(
        sums, known, ids, scale=within, baseline=baseline, epsilon=epsilon, mode=mode, ddof=ddof
    )
    if scale == "batch":
        spread = std([x for x, flag in zip(sums, known) if flag], ddof)
        divisor = spread + epsilon if mode == "add" else max(spread, epsilon)
        out = [x / divisor if x else 0.0 for x in out]
    return out


def rloo(rewards, scored, ids, weights):
    return grpo(rewards, scored, ids, weights, scale="none", baseline="leave_one_out")


def gdpo_sums(rewards, scored, ids, weights, *, baseline="inclusive", epsilon=1e-4):
    """Weighted sums of the columns standardised in their groups."""
    columns = [
        standardise(
            [row[k] for row in rewards],
            [row[k] for row in scored],
            ids,
            baseline=baseline,
            epsilon=epsilon,
        )
        for k in range(len(weights))
    ]
    return [math.fsum(w * column[i] for w, column in zip(weights, columns)) for i in range(len(ids))]


def gdpo(
    rewards,
    scored,
    ids,
    weights,
    *,
    baseline="inclusive",
    epsilon=1e-4,
    unit="sample",
    whiten_epsilon=1e-4,
    mode="add",
    lengths=None,
):
    sums = gdpo_sums(rewards, scored, ids, weights, baseline=baseline, epsilon=epsilon)
    if unit == "none":
        return sums
    known = [any(flags) for flags in scored]
    times = [1] * len(ids) if unit == "sample" else lengths
    population = [s for s, flag, n in zip(sums, known, times) if flag for _ in range(n)]
    centre, spread = mean(population), std(population, 1)
    divisor = {
        "add": spread + whiten_epsilon,
        "variance": math.sqrt(spread**2 + whiten_epsilon),
        "floor": math.sqrt(max(spread**2, whiten_epsilon)),
    }[mode]
    alive = {i for members in groups(ids) if any(abs(sums[j]) > 1e-13 for j in members) for i in members}
    return [
        (s - centre) / divisor if flag and i in alive else 0.0 for i, (s, flag) in enumerate(zip(sums, known))
    ]
