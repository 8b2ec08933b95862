"""The clipped loss, forward and backward, against TRL's and verl's own methods on the same log-probabilities.

    python -m benchmarks.losses [--quick]

Lengths uniform in [T/2, T], bounds 0.2 and 0.28, token mean. Every side computes its metrics: ours some twenty
statistics (ratio, clipping, divergence, the advantages' distribution, non-finite entries of every column), TRL its
three clip fractions, verl its three. TRL's method runs on a stand-in for the trainer, without communication.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.peers import PeerMissingError, verl_policy_loss, version
from benchmarks.timing import Row, arguments, compare, peak_bytes, table
from rlobjectives import GRPO, ClippedSurrogate, Objective, PaddedLayout, TokenBatch, TokenMean
from tests.peers import trl_loss

FULL = ((4, 512), (64, 1024), (64, 8192), (256, 8192), (1024, 8192))
QUICK = FULL[:2]


class _Config(SimpleNamespace):
    """Options as verl reads them: attributes, and ``get``."""

    def get(self, name: str, default: object) -> object:
        return getattr(self, name, default)


def rows(size: tuple[int, int], rounds: int) -> list[Row]:
    """One size beside both peers."""
    count, width = size
    rng = torch.Generator().manual_seed(count + width)
    mask = torch.arange(width) < torch.randint(width // 2, width + 1, (count, 1), generator=rng)
    leaf = (-torch.rand(count, width, generator=rng)).requires_grad_()
    old = leaf.detach() + 0.1 * torch.randn(count, width, generator=rng)
    advantages = torch.randn(count, generator=rng)
    layout, floats = PaddedLayout(mask), mask.float()
    objective = Objective(
        estimator=GRPO(), policy_loss=ClippedSurrogate(clip_high=0.28), reduction=TokenMean()
    )
    window = objective.freeze([(advantages, layout)])
    per_token = window.advantages(advantages, layout)
    wide = advantages.unsqueeze(1).expand(count, width).contiguous()
    config = _Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={})
    verl = verl_policy_loss()

    def backward(loss: Tensor) -> None:
        leaf.grad = None
        loss.backward()

    def ours() -> None:
        tokens = TokenBatch(logprobs=leaf, old_logprobs=old, advantages=per_token, layout=layout)
        backward(window.loss(tokens).loss)

    def trl() -> None:
        columns = {"logprobs": leaf, "old_logprobs": old, "advantages": advantages}
        backward(trl_loss(columns, mask, loss_type="dapo", epsilon_high=0.28))

    def verls() -> None:
        backward(verl(old, leaf, wide, floats, config=config)[0])

    label, gradient = f"{count:>5,} × {width:,}", leaf.numel() * leaf.element_size()
    mine = peak_bytes(ours)
    found = []
    for name, peer in (("TRL", trl), ("verl", verls)):
        other = peak_bytes(peer)
        note = f"peak beyond the gradient {_mebi(mine - gradient)} and {_mebi(other - gradient)} MiB"
        found.append(compare(f"{label} {name}", ours, peer, rounds=rounds, note=note))
    return found


def _mebi(size: int) -> str:
    return f"{size / 2**20:.1f}"


def main() -> None:
    """Print the table."""
    quick = arguments(__doc__ or "").quick
    print(f"torch {torch.__version__}, one thread, CPU time of the thread")
    try:
        for size in QUICK if quick else FULL:
            few = size[0] * size[1] > 2**21
            table(f"TRL {version('trl')}, verl {version('verl')}", rows(size, 3 if few else 9))
    except PeerMissingError as missing:
        print(missing)


if __name__ == "__main__":
    main()
