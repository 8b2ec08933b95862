"""Token-level credit, one trajectory at a time, on the compressed list of action tokens."""

import math


def actions(column, mask):
    """The entries at action tokens, in order."""
    return [value for value, counted in zip(column, mask, strict=True) if counted]


def spread(compressed, mask):
    """Back to all positions, 0 elsewhere."""
    values = iter(compressed)
    return [next(values) if counted else 0.0 for counted in mask]


def gae(values, rewards, discount, trace_decay, bootstrap=0.0):
    """Advantages and returns of a trajectory without gaps, by the textbook recursion."""
    advantages, carried, following = [0.0] * len(values), 0.0, bootstrap
    for step in reversed(range(len(values))):
        delta = rewards[step] + discount * following - values[step]
        carried = delta + discount * trace_decay * carried
        advantages[step], following = carried, values[step]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def masked_gae(
    values, mask, reward, discount, trace_decay, *, token_rewards=None, bootstrap=0.0, observations="skip"
):
    """GAE with a terminal reward on the last action token, under each convention for observations."""
    if not any(mask):
        return [0.0] * len(mask), [0.0] * len(mask)
    token_rewards = token_rewards or [0.0] * len(mask)
    last = max(position for position, counted in enumerate(mask) if counted)
    rewards = [r if counted else 0.0 for r, counted in zip(token_rewards, mask, strict=True)]
    rewards[last] += reward
    if observations == "skip":
        found = gae(actions(values, mask), actions(rewards, mask), discount, trace_decay, bootstrap)
        return tuple(spread(column, mask) for column in found)
    span = range(last + 1)
    seen = [values[t] if mask[t] or observations == "step" else 0.0 for t in span]
    found = gae(seen, [rewards[t] for t in span], discount, trace_decay, bootstrap)
    return tuple([column[t] if t <= last and mask[t] else 0.0 for t in range(len(mask))] for column in found)


def vtrace(values, rewards, ratios, discount, trace_decay, rho, trace, policy_rho, bootstrap=0.0):
    """Targets and advantages of a trajectory without gaps."""
    size = len(values)
    targets, error, following = [0.0] * size, 0.0, bootstrap
    for step in reversed(range(size)):
        delta = min(rho, ratios[step]) * (rewards[step] + discount * following - values[step])
        error = delta + discount * trace_decay * min(trace, ratios[step]) * error
        targets[step], following = values[step] + error, values[step]
    ahead = [*targets[1:], bootstrap]
    advantages = [
        min(policy_rho, ratios[t]) * (rewards[t] + discount * ahead[t] - values[t]) for t in range(size)
    ]
    return targets, advantages


def to_go(rewards, mask, discount, *, through_masked=False):
    """Discounted reward to go at action tokens; 0 elsewhere."""
    result, carried = [0.0] * len(mask), 0.0
    started = False
    for position in reversed(range(len(mask))):
        if mask[position]:
            carried = rewards[position] + (discount * carried if started else 0.0)
            result[position], started = carried, True
        elif through_masked and started:
            carried *= discount
    return result


def whiten(values, ddof, epsilon, mode):
    """Standardise a flat list."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / max(len(values) - ddof, 1)
    if min(values) == max(values):
        return [0.0] * len(values)
    spread_by = {
        "add": math.sqrt(variance) + epsilon,
        "variance": math.sqrt(variance + epsilon),
        "floor": math.sqrt(max(variance, epsilon)),
    }[mode]
    return [(v - mean) / spread_by for v in values]


def optimal_token_baseline(returns, energy, mask, groups, epsilon):
    """Advantages by group and step; ``returns`` and ``energy`` are lists of rows."""
    paths = []
    for row, counted in zip(energy, mask, strict=True):
        total, path = 0.0, []
        for value, keep in zip(row, counted, strict=True):
            total += value if keep else 0.0
            path.append(total)
        paths.append(path)
    result = [[0.0] * len(row) for row in mask]
    steps = [list(range(sum(row))) for row in mask]
    for i, row in enumerate(mask):
        for step, position in zip(steps[i], [t for t, keep in enumerate(row) if keep], strict=True):
            peers = []
            for j, other in enumerate(mask):
                if groups[j] == groups[i] and sum(other) > step:
                    at = [t for t, keep in enumerate(other) if keep][step]
                    peers.append((returns[j][at], paths[j][at]))
            baseline = 0.0
            if len(peers) > 1:
                baseline = sum(g * w for g, w in peers) / (sum(w for _, w in peers) + epsilon)
            result[i][position] = returns[i][position] - baseline
    return result
