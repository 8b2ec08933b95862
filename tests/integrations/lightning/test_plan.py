"""How a rollout is cut into updates and micro-batches."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlobjectives.integrations.lightning.plan import plan_updates


@given(
    group_ids=st.lists(st.integers(0, 5), max_size=20),
    windows=st.integers(1, 4),
    epochs=st.integers(1, 3),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_each_epoch_visits_every_sequence_once_and_windows_hold_whole_groups(
    group_ids, windows, epochs, size, seed
):
    generator = torch.Generator().manual_seed(seed)
    plan = plan_updates(group_ids, windows=windows, epochs=epochs, micro_batch_size=size, generator=generator)
    assert len(plan) == epochs * windows
    for epoch in range(epochs):
        updates = plan[epoch * windows : (epoch + 1) * windows]
        rows = [[row for micro_batch in update for row in micro_batch] for update in updates]
        assert sorted(row for update in rows for row in update) == list(range(len(group_ids)))
        holders = [{group_ids[row] for row in update} for update in rows]
        assert sum(map(len, holders)) == len(set(group_ids))
        assert max(map(len, holders)) - min(map(len, holders)) <= 1
    for update in plan:
        assert all(0 < len(micro_batch) <= size for micro_batch in update)
        assert all(len(micro_batch) == size for micro_batch in update[:-1])


def test_one_epoch_keeps_the_order():
    generator = torch.Generator().manual_seed(0)
    plan = plan_updates([0, 0, 1, 1], windows=1, epochs=1, micro_batch_size=3, generator=generator)
    assert plan == [[[0, 1, 2], [3]]]


def test_epochs_are_shuffled_by_the_seed_alone():
    def plan(seed):
        generator = torch.Generator().manual_seed(seed)
        return plan_updates(list(range(9)), windows=3, epochs=2, micro_batch_size=2, generator=generator)

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
    assert plan(1)[:3] != plan(1)[3:]
