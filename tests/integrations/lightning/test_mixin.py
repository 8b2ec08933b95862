"""The mixin in one process: what it refuses, when it scores anew, how it counts, what it leaves alone."""

import dataclasses
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from rlobjectives import (
    GAE,
    GRPO,
    BatchBaseline,
    Capabilities,
    CapabilityError,
    Combined,
    FunctionEstimator,
    NonFiniteError,
    Objective,
    PaddedLayout,
    PolicyLoss,
    Rollouts,
    Sum,
    TokenLoss,
)
from rlobjectives.integrations.lightning import Experience
from rlobjectives.integrations.lightning.normalization import estimate_moments, normalized_estimate
from rlobjectives.integrations.lightning.rollout_round import Round
from tests.integrations.lightning.runs import fit, uneven
from tests.integrations.lightning.toy import ToyPolicy, initial_weights


def trainer(**options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, **quiet, **options)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"accumulate_grad_batches": 2}, "micro_batch_size"),
        ({"gradient_clip_val": 1.0}, "to the module"),
    ],
)
def test_trainer_options_without_effect_are_refused(options, remedy):
    with pytest.raises(CapabilityError, match=remedy):
        trainer(**options).fit(ToyPolicy(uneven), DataLoader(torch.arange(1)))


def test_every_mismatch_is_listed_before_training():
    policy = ToyPolicy(uneven, objective=Objective.named("reinforce"), epochs_per_rollout=2)
    policy.trainer_facts = lambda datamodule=None: dataclasses.replace(
        ToyPolicy.trainer_facts(policy), num_generations=1
    )
    with pytest.raises(CapabilityError) as caught:
        trainer().fit(policy, DataLoader(torch.arange(1)))
    assert "num_generations is 1" in str(caught.value)
    assert "one update per rollout" in str(caught.value)
    assert not policy.trace


def test_an_overridden_forward_is_refused():
    class Deaf(ToyPolicy):
        def forward(self, ids):  # type: ignore[override]
            return self.net(ids)

    with pytest.raises(CapabilityError, match="overrides forward"):
        Deaf(uneven).check_objective()


def test_schedulers_that_wait_for_a_metric_are_refused():
    class Plateau(ToyPolicy):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    with pytest.raises(CapabilityError, match="ReduceLROnPlateau"):
        fit(Plateau(uneven), "single", rollouts=1)


def test_max_steps_counts_updates_and_stops_inside_a_rollout():
    options = {"epochs_per_rollout": 2, "windows_per_rollout": 2, "adam": True}
    policy = fit(ToyPolicy(uneven, **options), "single", rollouts=3, max_steps=6)
    assert [step["steps"] for step in policy.trace] == [4, 6]


def test_dropout_is_off_and_can_be_kept():
    class Dropping(ToyPolicy):
        def __init__(self, **options):
            super().__init__(uneven, **options)
            self.drop = nn.Dropout(0.5)
            self.drop.attention_dropout = 0.1

    policy = fit(Dropping(), "single", rollouts=1)
    assert (policy.drop.p, policy.drop.attention_dropout) == (0.0, 0.0)
    assert fit(Dropping(disable_dropout=False), "single", rollouts=1).drop.p == 0.5


def test_a_rollout_leaves_the_global_generators_where_they_were():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    policy = ToyPolicy(uneven)

    def noisy(rank, rollout):
        torch.rand(100)
        return uneven(rank, rollout)

    policy.source = noisy
    drawn = []
    policy.on_train_batch_start = lambda *_: torch.manual_seed(5)
    policy.on_train_batch_end = lambda *_: drawn.append(torch.rand(3))
    fit(policy, "single", rollouts=1)
    assert torch.equal(drawn[0], expected)


def test_experience_from_the_loader_is_never_written_to():
    data = uneven(None, 0)
    policy = ToyPolicy(lambda *_: data, epochs_per_rollout=2, adam=True)
    fit(policy, "single", rollouts=2)
    assert data.old_logprobs is None


def test_whitening_over_the_rollout():
    def rollouts(*_):
        ids = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]])
        mask = torch.tensor([[False, True]] * 4)
        return Experience(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            layout=PaddedLayout(mask),
            rollouts=Rollouts(
                rewards=torch.tensor([0.0, 1.0, 0.0, 5.0]), group_ids=torch.tensor([0, 0, 1, 1])
            ),
        )

    policy = ToyPolicy(rollouts, objective=Objective(estimator=GRPO(epsilon=0.5)))
    policy.normalize_advantages = True
    metrics = fit(policy, "single", rollouts=1).trace[0]["metrics"]
    assert metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["advantage/std"] == pytest.approx(1.0, rel=1e-6)


def test_whitening_counts_every_turn_of_a_scored_session():
    """Credit reaches turns that have no reward of their own, so they are whitened with the others."""
    rollouts = Rollouts(
        rewards=torch.tensor([0.0, 1.0, 0.0, 3.0]),
        scored=torch.tensor([False, True, False, True]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        session_ids=torch.tensor([5, 5, 6, 6]),
        layout=PaddedLayout(torch.ones(4, 3, dtype=torch.bool)),
        values=torch.zeros(4, 3),
    )
    estimate = GAE(reward_scope="session", trace_decay=0.5).estimate(rollouts)
    moments = estimate_moments(estimate, rollouts, rollouts.layout, token_level=True)
    white = normalized_estimate(estimate, moments, rollouts, rollouts.layout, token_level=True)
    assert moments.count.item() == 12.0
    assert white.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert white.std().item() == pytest.approx(1.0, rel=1e-6)


def judged(rewards, **columns):
    """One rollout: one action token per sequence, groups of two."""
    count = len(rewards)
    ids = torch.stack([torch.zeros(count, dtype=torch.long), torch.arange(count) % 5], 1)
    mask = torch.tensor([[False, True]] * count)
    return Experience(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        layout=PaddedLayout(mask),
        rollouts=Rollouts(rewards=torch.tensor(rewards), group_ids=torch.arange(count) // 2, **columns),
    )


def whitened(estimator, data):
    """The estimate that a round trains with."""
    seen = []

    class Watched(Round):
        def _train(self, experience, estimate, seed):
            seen.append(estimate)
            super()._train(experience, estimate, seed)

    class Watching(ToyPolicy):
        round_type = Watched

    options = {"objective": Objective(estimator=estimator), "normalize_advantages": True}
    fit(Watching(lambda *_: data, **options), "single", rollouts=1)
    return seen[0]


def test_whitening_leaves_what_says_nothing_at_zero():
    """A constant group counts in the spread, a sequence without a score does not; neither moves."""
    scored = torch.tensor([True, True, True, True, True, True, False, True])[:, None]
    data = judged([1.0, 0.0, 0.5, 0.5, 3.0, 0.0, 9.0, 1.0], scored=scored)
    raw = _lead(data.rollouts)
    found = whitened(_lead, data)
    counted = raw[scored[:, 0]]
    expected = (raw - counted.mean()) / (counted.std(correction=1) + 1e-8)
    assert counted.mean() > 0.1
    still = [2, 3, 6, 7]
    assert found[still].tolist() == [0.0] * 4
    moved = [0, 1, 4, 5]
    torch.testing.assert_close(found[moved], expected[moved], rtol=1e-12, atol=0)


def test_whitening_of_tokens_leaves_a_constant_group_at_zero():
    data = judged([1.0, 0.0, 0.5, 0.5])
    centred = FunctionEstimator(
        function=lambda rollouts: _lead(rollouts)[:, None] * rollouts.layout.mask, token_level=True
    )
    found = whitened(centred, data)
    raw = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    expected = (raw - raw.mean()) / (raw.std(correction=1) + 1e-8)
    torch.testing.assert_close(found[:2, 1], expected[:2], rtol=1e-12, atol=0)
    assert found[2:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "estimator", [GRPO(scale="batch"), BatchBaseline(), Combined(estimators=(GRPO(), GRPO(epsilon=0.5)))]
)
def test_estimates_of_several_columns_are_not_whitened(estimator):
    policy = ToyPolicy(uneven, objective=Objective(estimator=estimator), normalize_advantages=True)
    with pytest.raises(CapabilityError, match="Turn normalize_advantages off") as caught:
        policy.check_objective()
    assert 'normalize="window"' in str(caught.value)
    policy.normalize_advantages = False
    policy.check_objective()


@pytest.mark.parametrize(
    ("prompts", "repeats", "windows", "ranks", "fewest"),
    [(4, 1, 4, 1, 1), (4, 1, 2, 1, 2), (5, 1, 3, 1, 1), (4, 2, 4, 1, 2), (4, 1, 2, 2, 2), (2, 1, 4, 2, 2)],
)
def test_a_step_of_one_sequence_is_refused_where_sequences_are_compared(
    prompts, repeats, windows, ranks, fewest
):
    """Over all ranks, each of which cuts its own prompts; a step without any is skipped."""
    data = SimpleNamespace(prompts_per_step=prompts, num_generations=repeats)
    options = {"windows_per_rollout": windows}
    policy = ToyPolicy(uneven, objective=Objective(estimator=BatchBaseline()), **options)
    policy.check_objective(data)  # without a trainer nobody knows the ranks
    policy._trainer = SimpleNamespace(world_size=ranks)
    assert policy.trainer_facts(data).window_sequences == fewest
    if fewest > 1:
        policy.check_objective(data)
    else:
        with pytest.raises(CapabilityError, match="a step here has 1.*prompts_per_step.*windows_per_rollout"):
            policy.check_objective(data)


def test_a_rollout_of_one_sequence_is_not_whitened():
    policy = ToyPolicy(uneven, objective=Objective(estimator=_lead), normalize_advantages=True)
    lone = SimpleNamespace(prompts_per_step=1, num_generations=1)
    with pytest.raises(
        CapabilityError, match="normalize_advantages whitens over the rollout.*prompts_per_step"
    ):
        policy.check_objective(lone)
    policy.check_objective(SimpleNamespace(prompts_per_step=1, num_generations=2))
    data = judged([1.0, 0.0], scored=torch.tensor([[True], [False]]))
    estimate = torch.tensor([0.5, 0.0], dtype=torch.float64)
    moments = estimate_moments(estimate, data.rollouts, data.layout, token_level=False)
    with pytest.warns(UserWarning, match="a single counted sample"):
        found = normalized_estimate(estimate, moments, data.rollouts, data.layout, token_level=False)
    assert found.tolist() == [0.0, 0.0]


def _lead(rollouts):
    """A reward's lead over the worst of its group of two, 0 without a score: not centred over the rollout."""
    rewards = rollouts.rewards.view(-1, 2)
    rewards = torch.where(rollouts.scored.view(-1, 2).all(1, keepdim=True), rewards, 0.0)
    return (rewards - rewards.amin(1, keepdim=True)).flatten()


class Prepass(PolicyLoss):
    """Reads the window's summed log-probability, and says how far it is from the current one."""

    capabilities = Capabilities(needs_prepass=True)
    window_statistics = MappingProxyType({"logprobs": Sum})

    def __init__(self):
        self.gaps = []

    def statistics(self, tokens, context):
        return {"logprobs": Sum.of(tokens.logprobs, tokens.layout.mask)}

    def value_and_slope(self, tokens, context):
        self.gaps.append(
            (float(context["logprobs"].value), float(tokens.layout.select(tokens.logprobs).sum()))
        )
        return TokenLoss(-tokens.logprobs, -torch.ones_like(tokens.logprobs))


def test_a_prepass_sees_the_weights_of_its_own_update():
    loss = Prepass()
    policy = ToyPolicy(
        uneven,
        objective=Objective(estimator=GRPO(), policy_loss=loss),
        micro_batch_size=50,
        epochs_per_rollout=2,
        adam=True,
    )
    fit(policy, "single", rollouts=1)
    for before, now in loss.gaps:
        assert before == pytest.approx(now, rel=1e-6)
    assert loss.gaps[0][0] != pytest.approx(loss.gaps[1][0], rel=1e-3)


def test_a_window_with_nan_log_probabilities_stops_before_the_step():
    class Broken(ToyPolicy):
        def score(self, micro_batch):
            logprobs, _ = super().score(micro_batch)
            return logprobs * float("nan"), None

    policy = Broken(uneven)
    with pytest.raises(NonFiniteError, match="logprobs"):
        fit(policy, "single", rollouts=1)
    weights = torch.cat([p.detach().flatten() for p in policy.net.parameters()])
    assert torch.equal(weights, initial_weights())


def test_seeds_come_back_with_a_checkpoint():
    policy, resumed = ToyPolicy(uneven, seed=11), ToyPolicy(uneven)
    policy.rollouts_done = 3
    checkpoint = {}
    policy.on_save_checkpoint(checkpoint)
    resumed.on_load_checkpoint(checkpoint)
    assert (resumed.rollouts_done, resumed.seed) == (3, 11)
    resumed.on_load_checkpoint({})  # weights of another kind of run
    assert resumed.rollouts_done == 3
