"""Plans against the one-by-one algorithms, written out in plain Python."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlobjectives.errors import CapabilityError, NonFiniteError, ShapeError
from rlobjectives.packing import balance, fill_bins, schedule
from rlobjectives.packing.balance import spread


def best_fit_decreasing(lengths, capacity):
    free = []
    for size in sorted(lengths, reverse=True):
        fitting = [(room, place) for place, room in enumerate(free) if room >= size]
        if fitting:
            free[min(fitting)[1]] -= size
        else:
            free.append(capacity - size)
    return sorted(free)


def loads_of(bins, lengths):
    loads = {}
    for place, size in zip(bins, lengths, strict=True):
        loads[place] = loads.get(place, 0) + size
    return loads


ITEMS = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=60), st.just(capacity))
)


@given(ITEMS)
def test_bins_are_those_of_the_one_by_one_algorithm(case):
    lengths, capacity = case
    bins = fill_bins(torch.tensor(lengths, dtype=torch.int64), capacity).tolist()
    loads = loads_of(bins, lengths)
    assert sorted(loads) == list(range(len(loads)))
    assert sorted(capacity - load for load in loads.values()) == best_fit_decreasing(lengths, capacity)


def test_a_sequence_longer_than_the_capacity_is_named():
    with pytest.raises(CapabilityError, match="sequence 1 has 9 tokens and the capacity is 8"):
        fill_bins(torch.tensor([3, 9]), 8)
    with pytest.raises(CapabilityError, match="1 of 2 sequences do not fit; sequence 0 has -1"):
        fill_bins(torch.tensor([-1, 9 - 1]), 8)
    assert fill_bins(torch.tensor([8, 0]), 8).tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(), (2, 2)], ids=str)
@pytest.mark.parametrize("plan", [fill_bins, schedule])
def test_lengths_must_lie_in_one_dimension(plan, shape):
    with pytest.raises(ShapeError, match=r"expected \[n\], one length per sequence"):
        plan(torch.ones(shape, dtype=torch.int64), capacity=8)


@pytest.mark.parametrize("bad", [torch.tensor([1.5]), torch.tensor([True])])
def test_lengths_must_be_integers(bad):
    with pytest.raises(ShapeError, match="expected integers, the tokens of each sequence"):
        fill_bins(bad, 8)


def longest_first(costs, parts):
    loads, chosen = [0.0] * parts, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        chosen[item] = loads.index(min(loads))
        loads[chosen[item]] += costs[item]
    return chosen


COSTS = st.tuples(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 6))


@given(COSTS)
def test_spreading_is_longest_first_to_the_least_loaded(case):
    costs, parts = case
    expected = longest_first([float(cost) for cost in costs], parts)
    got = spread(torch.tensor(costs, dtype=torch.float64), parts, float("inf")).tolist()
    assert sorted(loads_of(got, costs).values()) == sorted(loads_of(expected, costs).values())


def rounds(costs, parts):
    loads, falling = [0.0] * parts, sorted(costs, reverse=True)
    for start in range(0, len(falling), parts):
        order = sorted(range(parts), key=loads.__getitem__)
        for part, cost in zip(order, falling[start : start + parts]):
            loads[part] += cost
    return loads


def an_exchange_helps(own, others, equal_counts):
    """Whether the heaviest part and some other could both end below the heaviest load of now."""
    most = sum(own)
    for other in others:
        returns = other if equal_counts else [0.0, *other]
        if any(max(most - a + b, sum(other) + a - b) < most * (1 - 1e-7) for a in own for b in returns):
            return True
    return False


@given(COSTS, st.booleans())
def test_balance_exchanges_until_no_exchange_helps(case, equal_counts):
    costs, parts = case
    if equal_counts:
        costs = costs[: len(costs) // parts * parts]
    start = (
        rounds(costs, parts)
        if equal_counts
        else list(loads_of(longest_first(costs, parts), costs).values()) or [0]
    )
    got = balance(torch.tensor(costs, dtype=torch.float64), parts, equal_counts=equal_counts).tolist()
    members = [[cost for place, cost in zip(got, costs) if place == part] for part in range(parts)]
    most = max(map(sum, members))
    assert most <= max(start)
    if equal_counts:
        assert {len(own) for own in members} == {len(costs) // parts}
    if most > (1 + 1e-4) * sum(costs) / parts:  # then one of the heaviest is stuck
        heaviest = [own for own in members if sum(own) == most]
        assert not all(
            an_exchange_helps(own, [other for other in members if other is not own], equal_counts)
            for own in heaviest
        )


def test_exchanges_even_out_what_longest_first_cannot():
    # Longest first: 3 + 2 + 2 against 3 + 2; a swap of 3 and 2 makes both 6.
    assert sorted(
        loads_of(balance(torch.tensor([3.0, 3.0, 2.0, 2.0, 2.0]), 2).tolist(), [3, 3, 2, 2, 2]).values()
    ) == [6, 6]
    # Equal counts: 9 + 3 + 1 against 5 + 4 + 2; no swap reaches 12, one of 3 and 2 does.
    costs = [9, 5, 4, 3, 2, 1]
    assert rounds(costs, 2) == [13.0, 11.0]
    assert sorted(
        loads_of(balance(torch.tensor(costs).double(), 2, equal_counts=True).tolist(), costs).values()
    ) == [12, 12]
    assert balance(torch.tensor([1.0]), 3).tolist() == [0]


def test_many_parts_stay_cheap():
    torch.manual_seed(0)
    begin = time.thread_time()
    balance(torch.rand(20_000, dtype=torch.float64), 5_000)
    assert time.thread_time() - begin < 5.0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10), st.integers(1, 5))
def test_equal_counts_are_equal(costs, parts):
    costs = costs * parts
    got = balance(torch.tensor(costs, dtype=torch.float64), parts, equal_counts=True)
    assert torch.bincount(got, minlength=parts).tolist() == [len(costs) // parts] * parts


def test_balance_refuses_what_cannot_be():
    with pytest.raises(CapabilityError, match="5 items cannot be split into 2 parts of equal count"):
        balance(torch.ones(5), 2, equal_counts=True)
    with pytest.raises(CapabilityError, match="2 parts of 3 cannot hold"):
        balance(torch.full((3,), 2.0), 2, capacity=3.0)
    with pytest.raises(CapabilityError, match=r"equal_counts=True and capacity=3"):
        balance(torch.full((4,), 2.0), 2, equal_counts=True, capacity=3.0)
    with pytest.raises(NonFiniteError):
        balance(torch.tensor([float("nan")]), 2)
    with pytest.raises(CapabilityError, match="negative"):
        balance(torch.tensor([-1.0]), 2)
    with pytest.raises(ShapeError, match="costs is list"):
        balance([1.0], 2)
    for capacity in (float("nan"), "9", -1.0):
        with pytest.raises(CapabilityError, match="capacity is"):
            balance(torch.ones(1), 2, capacity=capacity)


@pytest.mark.parametrize("seed", ["7", True, 1.5])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(CapabilityError, match="seed is"):
        schedule(torch.tensor([1]), capacity=2, seed=seed)


PLANS = st.tuples(
    st.lists(st.integers(0, 12), max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(0, 9),
)


@given(PLANS, st.booleans())
def test_a_schedule_holds_every_sequence_once_within_the_capacity(case, equal):
    lengths, ranks, steps, seed = case
    if equal:
        lengths = lengths[: len(lengths) // (ranks * steps) * ranks * steps]
    tensor = torch.tensor(lengths, dtype=torch.int64)
    plan = schedule(tensor, capacity=12, ranks=ranks, steps=steps, seed=seed, equal_counts=equal)
    assert len(plan.packs) == steps
    assert {len(step) for step in plan.packs} == {ranks}
    assert len({len(packs) for step in plan.packs for packs in step}) == 1, (
        "ranks must run equally many packs"
    )
    packs = [pack for step in plan.packs for packs in step for pack in packs]
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in pack) <= 12 for pack in packs)
    if equal:
        counts = {sum(map(len, packs)) for step in plan.packs for packs in step}
        assert len(counts) == 1


def test_the_number_of_packs_grows_where_spreading_evenly_does_not_fit():
    # Best fit needs two bins of 10 (6 + 4, 3 + 3 + 2 + 2); spread over two, the last 2 meets loads of 9 and 9.
    lengths = torch.tensor([6, 4, 3, 3, 2, 2])
    assert int(fill_bins(lengths, 10).max()) + 1 == 2
    packs = schedule(lengths, capacity=10).packs[0][0]
    assert len(packs) == 3
    assert all(int(lengths[list(pack)].sum()) <= 10 for pack in packs)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 3))
def test_no_more_packs_than_spreading_needs(lengths, ranks, steps):
    def fits(packs):
        loads = [0] * packs
        for size in sorted(lengths, reverse=True):
            place = loads.index(min(loads))
            loads[place] += size
        return max(loads) <= 12

    cells = ranks * steps
    plan = schedule(torch.tensor(lengths), capacity=12, ranks=ranks, steps=steps)
    packs = sum(len(packs) for step in plan.packs for packs in step)
    bins = len(best_fit_decreasing(lengths, 12))
    assert packs % cells == 0
    assert packs >= bins
    assert fits(packs)
    assert packs - cells < bins or not fits(packs - cells)


def test_the_fewest_packs_are_found_when_several_more_are_needed():
    lengths = torch.tensor([6, 4, 3, 3, 2, 2] * 25)
    assert int(fill_bins(lengths, 10).max()) + 1 == 52
    for fewer in (52, 53, 54):
        with pytest.raises(CapabilityError, match="cannot hold"):
            spread(lengths.double(), fewer, 10.0)
    assert len(schedule(lengths, capacity=10).packs[0][0]) == 55


def test_a_seed_changes_places_and_nothing_else():
    lengths = torch.tensor([3] * 12)
    plans = {schedule(lengths, capacity=6, ranks=2, seed=seed).packs for seed in range(5)}
    assert len(plans) > 1
    assert schedule(lengths, capacity=6, ranks=2, seed=1) == schedule(lengths, capacity=6, ranks=2, seed=1)
    for packs in plans:
        assert {len(pack) for step in packs for rank in step for pack in rank} == {2}


def sorted_loads(plan, lengths):
    """What each step weighs on its ranks, whatever the order of both."""
    return sorted(tuple(sorted(step)) for step in plan.loads(lengths).tolist())


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (1, 6), (3, 1), (2, 3)])
def test_each_seed_is_another_plan_also_of_different_lengths(equal, ranks, steps):
    lengths = torch.arange(1, 13)
    options = {"capacity": 14, "ranks": ranks, "steps": steps, "equal_counts": equal}
    plain = schedule(lengths, **options)
    plans = [schedule(lengths, seed=seed, **options) for seed in range(30)]
    possible = min(30, {(1, 1): 30, (1, 6): 30, (3, 1): 6, (2, 3): 30}[ranks, steps])
    assert len({plan.packs for plan in plans}) > 0.6 * possible
    assert len({plan.packs[0][0] for plan in plans}) > 1
    for seed, plan in enumerate(plans):
        assert sorted_loads(plan, lengths) == sorted_loads(plain, lengths)
        assert plan == schedule(lengths, seed=seed, **options)


def test_a_seed_keeps_packs_that_run_together_together():
    lengths = torch.arange(1, 25)
    together = {
        frozenset(frozenset(packs) for packs in zip(*step, strict=True))
        for seed in range(5)
        for step in schedule(lengths, capacity=30, ranks=2, seed=seed).packs
    }
    assert len(together) == 1


def test_ranks_are_balanced():
    torch.manual_seed(0)
    lengths = torch.randint(1, 400, (512,))
    loads = schedule(lengths, capacity=2048, ranks=4, steps=2).loads(lengths).double()
    assert loads.shape == (2, 4)
    assert loads.max() / loads.mean() < 1.02
