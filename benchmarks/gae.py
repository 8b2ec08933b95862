"""GAE over action tokens against verl's and torchrl's functions: time, memory and error.

    python -m benchmarks.gae [--quick]

γ = 1, λ = 0.95, lengths uniform in [T/2, T], one token in five an observation (in spans of ten). verl's function
whitens as well, so its own whitening is timed apart and taken off. torchrl knows no observations and no padding: it
gets the full rectangle.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import PeerMissingError, torchrl_functions, verl_functions, version
from benchmarks.timing import Row, arguments, compare, peak_bytes, table
from rlobjectives import PackedLayout, PaddedLayout, TokenLayout
from rlobjectives.functional import lambda_returns

DISCOUNT, TRACE = 1.0, 0.95
FULL = ((64, 1024), (64, 4096), (64, 16_384), (256, 8192), (1024, 8192))
QUICK = ((64, 1024), (64, 4096))


def batch(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, mask, token rewards with the reward on the last action token, and that reward."""
    rng = torch.Generator().manual_seed(rows + width)
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=rng)
    positions = torch.arange(width)
    mask = (positions < lengths) & ((positions % 50 < 40) | (positions == lengths - 1))
    reward = torch.randn(rows, generator=rng)
    tokens = torch.zeros(rows, width)
    tokens.scatter_(1, lengths - 1, reward.unsqueeze(1))
    return torch.randn(rows, width, generator=rng), mask, tokens, reward


def ours(layout: TokenLayout, values: Tensor, reward: Tensor) -> object:
    """Advantages and returns in one call."""
    return lambda_returns(layout, values=values, final_rewards=reward, discount=DISCOUNT, trace_decay=TRACE)


def packed(values: Tensor, mask: Tensor) -> tuple[PackedLayout, Tensor]:
    """The same rows without padding."""
    width = mask.shape[1]
    ends = width - mask.flip(1).int().argmax(1)
    inside = torch.arange(width) < ends.unsqueeze(1)
    return PackedLayout(torch.cat([ends.new_zeros(1), ends.cumsum(0)]), mask[inside]), values[inside]


def error(rows: int = 4, width: int = 8192, decay: float = TRACE) -> float:
    """Largest error over the largest advantage, against a float64 loop over tokens."""
    values, mask, tokens, reward = batch(rows, width)
    found = lambda_returns(
        PaddedLayout(mask), values=values, final_rewards=reward, discount=DISCOUNT, trace_decay=decay
    ).advantages
    exact = torch.zeros(rows, width, dtype=torch.float64)
    following = carried = torch.zeros(rows, dtype=torch.float64)
    for step in reversed(range(width)):
        delta = tokens[:, step].double() + DISCOUNT * following - values[:, step].double()
        counted = mask[:, step]
        carried = torch.where(counted, delta + DISCOUNT * decay * carried, carried)
        following = torch.where(counted, values[:, step].double(), following)
        exact[:, step] = torch.where(counted, carried, 0.0)
    return float((found.double() - exact).abs().max() / exact.abs().max())


def against_verl(sizes: tuple[tuple[int, int], ...], rounds: int) -> list[Row]:
    """Time and memory beside verl's loop, padded and packed."""
    peer = verl_functions()
    found = []
    for count, width in sizes:
        values, mask, tokens, reward = batch(count, width)
        floats = mask.float()
        whiten = partial(peer["masked_whiten"], values, floats)
        whitening = compare("", lambda: None, whiten, rounds=rounds).theirs
        verl = partial(peer["compute_gae_advantage_return"], tokens, values, floats, DISCOUNT, TRACE)
        for kind, (layout, own) in (
            ("padded", (PaddedLayout(mask), values)),
            ("packed", packed(values, mask)),
        ):
            mine = partial(ours, layout, own, reward)
            row = compare(f"{count} × {width:,} {kind}", mine, verl, rounds=rounds, repeat=3)
            less = (row.theirs - whitening) / row.ours
            extra = (peak_bytes(mine) - 2 * own.numel() * own.element_size()) / 2**20
            note = f"{less:.0f}× without verl's whitening; {extra:.1f} MiB beyond the two results"
            found.append(dataclasses.replace(row, note=note))
    return found


def against_torchrl(sizes: tuple[tuple[int, int], ...], rounds: int) -> list[Row]:
    """Time beside torchrl's loop and its convolution, without any mask."""
    peer = torchrl_functions()
    found = []
    for count, width in sizes:
        values, reward, shape = torch.randn(count, width), torch.randn(count), (count, width, 1)
        rewards, done = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        rewards[:, -1, 0], done[:, -1] = reward, True
        ahead = torch.cat([values[:, 1:], values.new_zeros(count, 1)], dim=1).view(shape)
        mine = partial(ours, PaddedLayout(torch.ones(count, width, dtype=torch.bool)), values, reward)
        for kind, name in (
            ("loop", "generalized_advantage_estimate"),
            ("convolution", "vec_generalized_advantage_estimate"),
        ):
            torchrl = partial(peer[name], DISCOUNT, TRACE, values.view(shape), ahead, rewards, done, done)
            found.append(compare(f"{count} × {width:,} {kind}", mine, torchrl, rounds=rounds))
    return found


def main() -> None:
    """Print the tables."""
    quick = arguments(__doc__ or "").quick
    sizes, rounds = (QUICK, 3) if quick else (FULL, 7)
    print(f"torch {torch.__version__}, one thread, CPU time of the thread")
    try:
        table(f"verl {version('verl')} compute_gae_advantage_return", against_verl(sizes, rounds))
    except PeerMissingError as missing:
        print(missing)
    try:
        small = tuple(size for size in sizes if size[0] * size[1] <= 1 << 20)
        table(
            f"torchrl {version('torchrl')} generalized_advantage_estimate", against_torchrl(small[:2], rounds)
        )
    except PeerMissingError as missing:
        print(missing)
    worst = {decay: error(decay=decay) for decay in (0.0, 0.01, 0.5, 0.95, 1.0)}
    print("\nlargest error over largest advantage, float32 in, against a float64 loop over 8,192 tokens:")
    print("  " + "  ".join(f"λ={decay:g}: {value:.1e}" for decay, value in worst.items()))


if __name__ == "__main__":
    main()
