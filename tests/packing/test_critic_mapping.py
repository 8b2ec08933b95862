"""A critic on packed rows: values return to their sequences, returns to their tokens, replicas are read once."""

import pytest
import torch
import torch.distributed as dist

from rlobjectives import (
    GAE,
    ClippedValueLoss,
    Communicator,
    Objective,
    PaddedLayout,
    Rollouts,
    TokenBatch,
    TokenMean,
)
from rlobjectives.metrics.values import value_metrics
from rlobjectives.packing import Packing, schedule
from tests.ranks import run_ranks

LENGTHS = torch.tensor([7, 3, 9, 5, 4, 9, 2, 6])
RANKS, STEPS = 2, 2


def batch():
    """Sequences of eight lengths, each a prompt of one token and an answer with an observation in it."""
    generator = torch.Generator().manual_seed(0)
    width = int(LENGTHS.max())
    exists = torch.arange(width) < LENGTHS[:, None]
    exists[::2] = exists[::2].flip(1)  # padded on the left as often as on the right
    first = exists.int().argmax(1, keepdim=True)
    place = torch.arange(width) - first
    mask = exists & (place >= 1) & (place != 3)
    ids = torch.randint(1, 20, exists.shape, generator=generator)
    rewards = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    return ids, exists, mask, rewards


def critic(ids, position_ids):
    """A value for each token that no other token of the batch has; it knows nothing of padding."""
    return ids.double() * 0.1 + position_ids.double() * 0.01


def packs():
    """Every pack of a plan over ranks and steps, in the order in which they are worked on."""
    plan = schedule(LENGTHS, capacity=16, ranks=RANKS, steps=STEPS, seed=1)
    found = [pack for step in plan.packs for rank in step for pack in rank if pack]
    assert sum(found, ()) != tuple(range(len(LENGTHS)))  # in another order than the samples
    return found


def padded_values(ids, exists):
    return critic(ids, exists.long().cumsum(1) - 1)


def test_values_collected_in_packed_order_return_to_sample_order():
    ids, exists, _, _ = batch()
    collected = torch.full(ids.shape, torch.nan, dtype=torch.float64)
    for pack in packs():
        packing = Packing(exists, pack)
        values = packing.unpack(critic(packing.pack(ids), packing.position_ids), fill=torch.nan)
        arrived = ~values.isnan()
        assert collected[arrived].isnan().all()  # each token once
        collected = torch.where(arrived, values, collected)
    assert torch.equal(~collected.isnan(), exists)
    assert torch.equal(collected[exists], padded_values(ids, exists)[exists])


def test_returns_go_to_the_right_token_after_packing():
    """Targets made on padded samples and packed, and targets made on packed samples, are the same numbers."""
    ids, exists, mask, rewards = batch()
    layout, values = PaddedLayout(mask), padded_values(ids, exists)
    gae = GAE(discount=0.9, trace_decay=0.7)
    whole = Rollouts(rewards=rewards, group_ids=torch.arange(8), layout=layout, values=values)
    returns, estimate = gae.value_targets(whole), gae.estimate(whole)
    assert returns[mask].unique().numel() == mask.sum()  # a token in the wrong place would show
    for pack in packs():
        packing = Packing(exists, pack)
        flat = packing.layout(layout)
        part = Rollouts(
            rewards=rewards[list(pack)],
            group_ids=torch.arange(len(pack)),
            layout=flat,
            values=packing.pack(values),
        )
        torch.testing.assert_close(
            packing.pack(returns)[flat.mask], gae.value_targets(part)[flat.mask], rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            packing.pack(estimate)[flat.mask], gae.estimate(part)[flat.mask], rtol=1e-12, atol=1e-12
        )


def test_the_value_loss_of_packs_is_that_of_padded_samples():
    ids, exists, mask, rewards = batch()
    layout, old = PaddedLayout(mask), padded_values(ids, exists)
    objective = Objective(
        estimator=GAE(discount=0.9, trace_decay=0.7, normalize="window"),
        reduction=TokenMean(),
        value_loss=ClippedValueLoss(clip=0.2),
    )
    rollouts = Rollouts(rewards=rewards, group_ids=torch.arange(8), layout=layout, values=old)
    estimate = objective.estimator.estimate(rollouts)
    returns = objective.estimator.value_targets(rollouts)
    generator = torch.Generator().manual_seed(1)
    moved = torch.randn(old.shape, generator=generator, dtype=torch.float64) * 0.3
    logprobs = -torch.rand(old.shape, generator=generator, dtype=torch.float64)

    def gradient(pieces):
        values = (old + moved).requires_grad_()
        window = objective.freeze([(take(estimate), part) for take, part in pieces])
        outputs = []
        for take, part in pieces:
            tokens = TokenBatch(
                logprobs=take(logprobs),
                layout=part,
                advantages=window.advantages(take(estimate), part),
                values=take(values),
                old_values=take(old),
                returns=take(returns),
            )
            outputs.append(window.loss(tokens))
            outputs[-1].loss.backward()
        return values.grad, window.summarize(outputs)

    expected, metrics = gradient([(lambda column: column, layout)])
    packings = [Packing(exists, pack) for pack in packs()]
    found, packed_metrics = gradient([(packing.pack, packing.layout(layout)) for packing in packings])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert expected.abs().sum() > 0
    assert 0 < metrics["value/clip_fraction"] < 1
    assert packed_metrics == pytest.approx(metrics, rel=1e-12)


def with_replicas():
    """Two ranks that hold the same sequences; the second's values are of no worth."""
    communicator = Communicator.world(context_group=dist.group.WORLD)
    layout = PaddedLayout(torch.tensor([[True, True, True]]))
    returns = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    values = returns * 0.5 + 1000.0 * dist.get_rank()
    objective = Objective(estimator=GAE(), value_loss=None)
    window = objective.freeze([], communicator)
    return window.summarize([], extra=value_metrics(values, returns, layout))


def test_replicas_are_read_once():
    for metrics in run_ranks(with_replicas, 2, timeout=100):
        assert metrics["value/prediction_mean"] == pytest.approx(0.5)
        assert metrics["value/target_std"] == pytest.approx(1.0)
        assert metrics["value/explained_variance"] == pytest.approx(0.75)
