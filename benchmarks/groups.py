"""Group estimators against verl's functions: any ids, shuffled, groups of sixteen.

    python -m benchmarks.groups [--quick]

verl's dictionary loop takes prompt ids as strings; its vectorised form takes integers here, the fairer of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy
import torch

from benchmarks.peers import PeerMissingError, verl_functions, version
from benchmarks.timing import Row, arguments, compare, table
from rlobjectives import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    PaddedLayout,
    PassAtK,
    ReinforcePlusPlusBaseline,
    Rollouts,
)

WIDTH, GROUP = 4, 16


def batch(count: int) -> tuple[Rollouts, torch.Tensor, torch.Tensor, numpy.ndarray, numpy.ndarray]:
    """Rollouts, and the same as verl takes them."""
    rng = torch.Generator().manual_seed(count)
    ids = torch.arange(count)[torch.randperm(count, generator=rng)] // GROUP
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (count, 1), generator=rng)
    rewards = torch.rand(count, generator=rng)
    tokens = torch.zeros(count, WIDTH)
    tokens[:, 0] = rewards
    rollouts = Rollouts(rewards=rewards, group_ids=ids, layout=PaddedLayout(mask))
    strings = numpy.array([f"prompt-{i}" for i in ids.tolist()], dtype=object)
    return rollouts, tokens, mask.float(), strings, ids.numpy()


def rows(count: int, rounds: int) -> list[Row]:
    """Every estimator that both have."""
    peer = verl_functions()
    rollouts, tokens, mask, strings, integers = batch(count)
    two = Rollouts(
        rewards=torch.stack([rollouts.rewards[:, 0], rollouts.rewards[:, 0].flip(0)], dim=1),
        group_ids=rollouts.group_ids,
    )
    lead, plus = PassAtK(form="max_minus_second"), "compute_reinforce_plus_plus_baseline_outcome_advantage"
    cases = (
        ("GRPO, dictionary loop", GRPO(), rollouts, "compute_grpo_outcome_advantage", strings),
        ("GRPO, vectorised", GRPO(), rollouts, "compute_grpo_vectorized_outcome_advantage", integers),
        ("RLOO, dictionary loop", RLOO(), rollouts, "compute_rloo_outcome_advantage", strings),
        ("RLOO, vectorised", RLOO(), rollouts, "compute_rloo_vectorized_outcome_advantage", integers),
        ("OPO", OPO(), rollouts, "compute_opo_outcome_advantage", strings),
        ("GPG", GPG(count="nonzero"), rollouts, "compute_gpg_outcome_advantage", strings),
        ("max minus second", lead, rollouts, "compute_grpo_passk_outcome_advantage", strings),
        ("REINFORCE++ baseline", ReinforcePlusPlusBaseline(), rollouts, plus, strings),
        ("GDPO, both rewards (verl: one GRPO loop each)", GDPO(), two, "compute_grpo_outcome_advantage", strings),
    )  # fmt: skip
    found = []
    for label, estimator, data, name, ids in cases:
        options = {"config": {"norm_adv_by_std_in_grpo": True}} if "passk" in name else {}
        theirs = partial(_often, 2 if data is two else 1, peer[name], tokens, mask, index=ids, **options)
        ours = partial(estimator.estimate, data)
        found.append(compare(f"{count:>7,} {label}", ours, theirs, rounds=rounds, repeat=3))
    return found


def _often(
    calls: int, function: Callable[..., object], tokens: torch.Tensor, mask: torch.Tensor, **options: object
) -> None:
    for _ in range(calls):
        function(tokens.clone(), mask, **options)  # some of verl's functions write into their input


def offset_error(count: int = 4096) -> tuple[float, float]:
    """Largest error on rewards 1e4 ± 0.01, ours and verl's, against float64 on the same float32 rewards."""
    rollouts, tokens, mask, strings, _ = batch(count)
    rewards = (1e4 + 0.01 * torch.randn(count)).float()
    tokens = torch.zeros(count, WIDTH)
    tokens[:, 0] = rewards
    exact = torch.zeros(count, dtype=torch.float64)
    for group in rollouts.group_ids.unique():
        members = rollouts.group_ids == group
        own = rewards[members].double()
        exact[members] = (own - own.mean()) / (own.std() + 1e-6)
    ours = GRPO().estimate(Rollouts(rewards=rewards, group_ids=rollouts.group_ids)).float().double()
    theirs = verl_functions()["compute_grpo_outcome_advantage"](tokens, mask, strings)[0][:, 0].double()
    return float((ours - exact).abs().max()), float((theirs - exact).abs().max())


def main() -> None:
    """Print the tables."""
    quick = arguments(__doc__ or "").quick
    print(f"torch {torch.__version__}, one thread, CPU time of the thread")
    try:
        for count in (1024,) if quick else (1024, 10_240, 102_400):
            table(f"verl {version('verl')}", rows(count, 3 if quick or count > 50_000 else 5))
        ours, theirs = offset_error()
        print(f"\nrewards 1e4 ± 0.01, largest error of an advantage: ours {ours:.1e}, verl {theirs:.1e}")
    except PeerMissingError as missing:
        print(missing)


if __name__ == "__main__":
    main()
