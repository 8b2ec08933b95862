"""Print the peak memory of one forward and backward beyond inputs and gradients. A program, not a test."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch

from rlobjectives.logprobs import hidden_logprobs, token_logprobs

MIB = 2**20


def give_memory_back() -> None:
    """Make malloc return what it frees, so that the peak shows what was alive."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 256 * 1024)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 0)  # M_TRIM_THRESHOLD


def resident(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def measure(route: str) -> float:
    torch.set_num_threads(1)
    rows, vocabulary, width = 2048, 32_000, 64
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    ids = torch.randint(vocabulary, (rows,), generator=generator)
    entropy = route.endswith("entropy")
    if route == "logits_entropy":
        rows = 512
        leaves = [(hidden[:rows] @ weight.T).requires_grad_()]
    else:
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def run() -> None:
        if route == "logits_entropy":
            found = token_logprobs(leaves[0], ids[:rows], entropy=entropy)
        else:
            found = hidden_logprobs(leaves[0], leaves[1], ids, entropy=entropy)
        loss = found[0].sum() + (found[1].sum() if found[1] is not None else 0.0)
        loss.backward()

    run()  # libraries load and allocate on first use
    for leaf in leaves:
        leaf.grad = None
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves) / MIB
    return resident("VmHWM") - before - gradients


if __name__ == "__main__":
    give_memory_back()
    sys.stdout.write(json.dumps({"peak_mib": measure(sys.argv[1])}))
