"""The reverse recurrence, one token after the other."""


def reverse_scan(delta, decay, mask, tail=0.0):
    """``y = x + d·y`` from the end; a masked token is skipped and carries what comes after it."""
    result, carried = [0.0] * len(delta), tail
    for position in reversed(range(len(delta))):
        if mask[position]:
            rate = decay[position] if isinstance(decay, (list, tuple)) else decay
            carried = delta[position] + rate * carried
        result[position] = carried
    return result


def cumulative_sum(values, mask):
    """Running sum of the counted values."""
    result, total = [], 0.0
    for value, counted in zip(values, mask, strict=True):
        total += value if counted else 0.0
        result.append(total)
    return result
