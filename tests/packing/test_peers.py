"""The installed peers' own planning on random lengths: never more bins, never a heavier part to wait for."""

import pytest
import torch

from benchmarks.packing import excess, lengths_of
from benchmarks.peers import PeerMissingError, trl_bin_search, verl_balancing
from rlobjectives.packing import balance, fill_bins


def load(functions):
    try:
        return functions()
    except PeerMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("count", [1, 7, 100, 3000])
@pytest.mark.parametrize("capacity", [16, 257, 2048])
def test_as_many_bins_as_trl(count, capacity):
    search, pyarrow = load(trl_bin_search), pytest.importorskip("pyarrow")
    for kind in (lengths_of(count, capacity), torch.randint(1, capacity + 1, (count,))):
        rank = kind.argsort(descending=True, stable=True)
        pairs = pyarrow.StructArray.from_arrays(
            [pyarrow.array(kind[rank].numpy()), pyarrow.array(rank.numpy())], ["length", "id"]
        )
        theirs = search(pairs, capacity)
        bins = fill_bins(kind, capacity)
        assert int(bins.max()) + 1 == len(theirs)
        loads = torch.zeros(len(theirs), dtype=torch.int64).index_add_(0, bins, kind)
        assert sorted(loads.tolist()) == sorted(int(own["length"]) for own in theirs)


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("count", "parts"), [(64, 8), (256, 8), (512, 64), (4096, 8)])
def test_as_even_as_verl(count, parts, equal_counts):
    partition = load(verl_balancing)
    ours, theirs = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        lengths = (3000 * torch.exp(0.8 * torch.randn(count))).long() + 1
        part = balance(lengths.double(), parts, equal_counts=equal_counts)
        loads = torch.zeros(parts, dtype=torch.float64).index_add_(0, part, lengths.double())
        plain = lengths.tolist()
        ours.append(excess(loads.tolist()))
        theirs.append(
            excess([float(sum(plain[item] for item in own)) for own in partition(plain, parts, equal_counts)])
        )
    # A ten-thousandth of a step is as even as balance tries to be; verl goes on, for no one's benefit.
    assert sorted(ours)[2] <= max(sorted(theirs)[2], 1e-4)
