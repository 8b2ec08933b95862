"""The critic in one process: several passes against a plain loop, what is weighed, read, run and refused."""

import statistics
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule

from rlobjectives import (
    ALGORITHMS,
    GAE,
    GRPO,
    CapabilityError,
    ClippedValueLoss,
    Combined,
    Communicator,
    MissingColumnError,
    Objective,
    ReinforcePlusPlus,
    Rollouts,
    TokenBatch,
    VTrace,
)
from rlobjectives.integrations.lightning import CriticMixin
from rlobjectives.integrations.lightning.bootstrap import bootstrap_values, with_next_place
from rlobjectives.integrations.lightning.critic_round import CriticRound, critic_objective
from rlobjectives.integrations.lightning.movement import MovementWatch
from tests.integrations.lightning.runs import fit, uneven
from tests.integrations.lightning.toy import Net, ToyPolicy, full_weights
from tests.integrations.lightning.toy_critic import CriticNet, ToyAgent, cut_off, initial_agent, objective
from tests.oracles.credit import vtrace

RATES = {"policy": 4.0, "critic": 2.0}


class Gentle(ToyAgent):
    """Plain SGD, at rates that keep ratios in reach of the clip."""

    def configure_optimizers(self):
        return torch.optim.SGD(
            [
                {"params": list(self.net.parameters()), "name": "policy", "lr": RATES["policy"]},
                {"params": list(self.critic.parameters()), "name": "critic", "lr": RATES["critic"]},
            ]
        )


def plain_passes(joint, alone):
    """So many steps of both, and of the critic alone, on the whole rollout at once, with everything fixed first."""
    data, goal = uneven(None, 0), objective()
    net, critic = Net(), CriticNet()
    groups = [
        {"params": net.parameters(), "lr": RATES["policy"]},
        {"params": critic.parameters(), "lr": RATES["critic"]},
    ]
    optimizer = torch.optim.SGD(groups)
    with torch.no_grad():
        old_values, old_logprobs = critic(data.input_ids), net.logprobs(data.input_ids)
    given = data.need_rollouts()
    rollouts = Rollouts(
        rewards=given.rewards, group_ids=given.group_ids, layout=data.layout, values=old_values
    )
    estimate, returns = goal.estimator.estimate(rollouts), goal.estimator.value_targets(rollouts)
    clipped = []
    for step in range(joint + alone):
        window = goal.freeze([(estimate, data.layout)])
        logprobs = net.logprobs(data.input_ids)
        tokens = TokenBatch(
            logprobs=logprobs if step < joint else logprobs.detach(),
            layout=data.layout,
            advantages=window.advantages(estimate, data.layout),
            old_logprobs=old_logprobs,
            ref_logprobs=data.ref_logprobs,
            values=critic(data.input_ids),
            old_values=old_values,
            returns=returns,
        )
        output = window.loss(tokens)
        output.loss.backward()
        clipped.append(window.summarize([output])["value/clip_fraction"])
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(net), full_weights(critic), clipped


@pytest.mark.parametrize(("joint", "alone"), [(2, 0), (1, 3), (2, 2)])
def test_passes_refer_to_the_rollout_and_not_to_the_last_step(joint, alone):
    """Values, returns and log-probabilities of the rollout, in every pass; checked against a plain loop."""
    policy, critic, clipped = plain_passes(joint, alone)
    agent = Gentle(epochs_per_rollout=joint, critic_epochs=alone)
    step = fit(agent, "single", rollouts=1).trace[0]
    torch.testing.assert_close(step["policy"], policy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(step["critic"], critic, rtol=1e-5, atol=1e-6)
    assert step["steps"] == joint + alone
    assert sum(clipped) > 0
    assert step["metrics"]["value/clip_fraction"] == pytest.approx(sum(clipped) / len(clipped), rel=1e-6)


def test_value_metrics_weigh_tokens_whatever_the_cut():
    coarse, fine = (
        fit(Gentle(epochs_per_rollout=2, micro_batch_size=size), "single", rollouts=1).trace[0]["metrics"]
        for size in (9, 2)
    )
    names = [name for name in coarse if name.startswith("value/")]
    assert {"value/explained_variance", "value/clip_fraction", "value/error"} <= set(names)
    assert coarse["value/clip_fraction"] > 0
    for name in names:
        assert fine[name] == pytest.approx(coarse[name], rel=1e-5, abs=1e-6)


def test_the_policy_is_not_even_run_while_it_rests():
    agent = ToyAgent(adam=True, critic_warmup_steps=3, critic_epochs=2)
    step = fit(agent, "single", rollouts=1).trace[0]
    assert step["steps"] == 3
    assert agent.policy_runs == 0
    assert torch.equal(step["policy"], initial_agent()["policy"])
    assert "loss/policy" not in step["metrics"]
    assert step["metrics"]["loss/value_loss"] > 0


def test_max_steps_stops_inside_the_passes_of_the_critic():
    agent = fit(ToyAgent(adam=True, critic_epochs=4), "single", rollouts=2, max_steps=3)
    assert [step["steps"] for step in agent.trace] == [3]


def test_a_dummy_leaves_no_value_behind():
    """A rank with fewer micro-batches than another runs copies of its first sequence; nobody reads what they say."""

    class Looking(CriticRound):
        def _score_all(self, experience, count, columns, method="score"):
            found = super()._score_all(experience, count + 3, columns, method)
            expected = self.module.critic(experience.input_ids).detach()
            torch.testing.assert_close(found["values"], expected)
            seen.append(len(experience))
            return found

    class Agent(ToyAgent):
        round_type = Looking

    seen = []
    fit(Agent(), "single", rollouts=1)
    assert seen == [9]


def test_values_that_come_with_the_rollout_are_taken():
    def judged(*place):
        data = uneven(*place)
        return data.replace(values=torch.full(data.layout.shape, 0.25))

    metrics = fit(ToyAgent(source=judged), "single", rollouts=1).trace[0]["metrics"]
    assert metrics["value/prediction_mean"] == 0.25
    assert metrics["value/prediction_std"] == 0.0


def test_what_follows_a_cut_must_be_known_or_asked_for():
    with pytest.raises(MissingColumnError, match="bootstrap_truncated reads truncated"):
        fit(ToyAgent(bootstrap_truncated=True), "single", rollouts=1)

    def with_values(*place):
        data = cut_off(*place)
        return data.replace(values=torch.zeros(data.layout.shape))

    with pytest.raises(MissingColumnError, match="came with its values, reads bootstrap_values"):
        fit(ToyAgent(source=with_values, bootstrap_truncated=True), "single", rollouts=1)
    # A rollout that says what was cut off, and nobody to say what follows: no guess.
    with pytest.raises(MissingColumnError, match="bootstrap_values"):
        fit(ToyAgent(source=cut_off), "single", rollouts=1)


def test_the_place_behind_a_sequence_is_its_own():
    """Behind the last real token, wherever padding begins; only where the sequence was cut off."""
    data, truncated = uneven(None, 0), torch.arange(9) % 2 == 0
    longer = with_next_place(data, truncated)
    lengths = data.attention_mask.sum(1)
    assert longer.attention_mask.sum(1).tolist() == (lengths + truncated).tolist()
    assert torch.equal(longer.layout.mask[:, :-1], data.layout.mask)
    assert not longer.layout.mask[:, -1].any()
    values = torch.arange(7.0).expand(9, 7)
    assert torch.equal(bootstrap_values(values, data.attention_mask), lengths.float())
    nothing = torch.zeros(2, 0, dtype=torch.long)
    assert bootstrap_values(torch.zeros(2, 1), nothing).tolist() == [0.0, 0.0]


def test_v_trace_judges_the_rollout():
    """Targets and advantages are those of the function, with the weights that sampled and the critic's values."""
    drift = 0.3 * torch.randn(9, 6, generator=torch.Generator().manual_seed(5))

    def stale(*place):
        data = uneven(*place)
        return data.replace(behavior_logprobs=Net().logprobs(data.input_ids).detach() + drift)

    estimator = VTrace(discount=0.9, trace_decay=0.8, on_lost_reward="drop", policy_rho_clip=2.0)
    agent = ToyAgent(source=stale, objective=objective(estimator=estimator))
    agent.behavior_logprobs = "sampled"
    metrics = fit(agent, "single", rollouts=1).trace[0]["metrics"]
    data = stale(None, 0)
    given, mask = data.need_rollouts(), data.layout.mask
    old, values = Net().logprobs(data.input_ids).detach(), CriticNet()(data.input_ids).detach()
    ratios = (old - data.behavior_logprobs).double().exp()
    targets, gains = [], []
    for row in range(len(data)):
        places = mask[row].nonzero().flatten().tolist()
        if places:
            rewards = [0.0] * (len(places) - 1) + [float(given.rewards[row].sum())]
            own = [[float(column[row, place]) for place in places] for column in (values, ratios)]
            found = vtrace(own[0], rewards, own[1], 0.9, 0.8, 1.0, 1.0, 2.0)
            targets, gains = targets + found[0], gains + found[1]
    assert metrics["value/target_mean"] == pytest.approx(statistics.fmean(targets), rel=1e-5)
    assert metrics["value/target_std"] == pytest.approx(statistics.stdev(targets), rel=1e-5)
    assert metrics["advantage/mean"] == pytest.approx(statistics.fmean(gains), rel=1e-5)
    assert metrics["advantage/highest"] == pytest.approx(max(gains), rel=1e-5)
    assert metrics["advantage/lowest"] == pytest.approx(min(gains), rel=1e-5)


NEED_A_CRITIC = [
    name
    for name, spec in ALGORITHMS.items()
    if Objective.named(
        name, **{role: {"max_tokens": 6} for role in spec.parts if spec.parts[role] == "FixedBudget"}
    ).capabilities.needs_critic
]


@pytest.mark.parametrize("name", NEED_A_CRITIC)
def test_a_named_objective_that_reads_a_critic_trains_one(name):
    def with_sampled(*place):
        data = uneven(*place)
        return data.replace(behavior_logprobs=Net().logprobs(data.input_ids).detach())

    agent = ToyAgent(
        source=with_sampled, objective=Objective.named(name, estimator={"on_lost_reward": "drop"})
    )
    agent.behavior_logprobs = "sampled"
    step = fit(agent, "single", rollouts=1).trace[0]
    assert step["steps"] == 1
    assert not torch.equal(step["critic"], initial_agent()["critic"])
    assert not torch.equal(step["policy"], initial_agent()["policy"])


def test_all_that_read_a_critic_are_found():
    assert {"ppo", "vapo", "vtrace"} <= set(NEED_A_CRITIC)


def test_a_critic_trains_beside_a_group_estimator():
    """The targets are those of the part that reads the critic."""
    gae = {"discount": 0.9, "trace_decay": 0.8, "on_lost_reward": "drop"}

    def trained(estimator):
        agent = ToyAgent(objective=objective(estimator=estimator))
        return fit(agent, "single", rollouts=1).trace[0]

    both, alone = trained(Combined(estimators=(GRPO(), GAE(**gae)))), trained(GAE(**gae))
    assert both["metrics"]["value/target_mean"] == alone["metrics"]["value/target_mean"]
    assert torch.equal(both["critic"], alone["critic"])
    assert not torch.equal(both["policy"], alone["policy"])
    two = Combined(estimators=(GAE(**gae), VTrace()))
    with pytest.raises(CapabilityError, match="holds 2 different estimators that read a critic"):
        ToyAgent(objective=objective(estimator=two)).check_objective()
    with pytest.raises(CapabilityError, match="Combined reads no critic"):
        ToyAgent(objective=objective(estimator=Combined(estimators=(GRPO(),)))).check_objective()


def test_weight_decay_is_no_learning():
    """The optimizer decays the head by 0.1 a step, whatever the value loss says."""

    def told(**options):
        agent = ToyAgent(adam=True, critic_epochs=4, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(agent, "single", rollouts=1)
        assert not torch.equal(agent.trace[0]["critic"], initial_agent()["critic"])
        return [str(one.message) for one in caught if "value head" in str(one.message)]

    (warning,) = told(objective=objective(value_loss=ClippedValueLoss(coef=0.0)))
    assert "has had no gradient in 5 optimizer steps, only weight decay" in warning
    assert told() == []


def test_kl_shaped_rewards_find_their_log_probabilities():
    """With one update per rollout nothing else asks for old log-probabilities."""
    gae = {"discount": 0.9, "trace_decay": 0.8, "on_lost_reward": "drop"}
    plain, shaped = (
        fit(
            ToyAgent(objective=objective(estimator=GAE(**gae, kl_coef=coef), kl=None)), "single", rollouts=1
        ).trace[0]["metrics"]
        for coef in (0.0, 0.5)
    )
    assert plain["value/target_mean"] != shaped["value/target_mean"]
    pp = Objective(estimator=ReinforcePlusPlus(kl_coef=0.1, on_lost_reward="drop"))
    (first,) = fit(ToyPolicy(uneven, objective=pp), "single", rollouts=1).trace
    assert first["steps"] == 1
    assert first["metrics"]["policy/kl_to_ref"] > 0.0  # no penalty in the loss, and yet reported
    assert {"reward/mean", "reward/std"} <= set(first["metrics"])


def test_groups_without_names_are_refused_where_the_policy_rests():
    class Nameless(ToyAgent):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_batch_end(self, *_):
            pass

    fit(Nameless(), "single", rollouts=1)  # policy and critic always step together: nothing to tell apart
    with pytest.raises(CapabilityError, match="which are the critic's"):
        fit(Nameless(critic_epochs=1), "single", rollouts=1)


def test_a_module_must_say_what_its_critic_is():
    class Empty(CriticMixin, LightningModule):
        pass

    module = Empty(objective=objective(), micro_batch_size=1)
    for call in (lambda: module.score_values(None), module.critic_parameters):
        with pytest.raises(NotImplementedError, match="Empty must define"):
            call()


def test_the_critic_s_objective_has_no_other_part():
    full = objective(entropy_coef=0.1)
    alone = critic_objective(full)
    assert set(alone.token_terms()) == {"policy_loss", "value_loss"}
    assert alone.entropy_coef == 0.0
    assert alone.value_loss is full.value_loss
    assert not alone.capabilities.needs_ref_logprobs


def test_a_watch_looks_once_and_only_after_its_steps():
    still, moving = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    watch = MovementWatch([still, moving], name="It", steps=2, communicator=Communicator())
    moving.sum().backward()
    with torch.no_grad():
        moving[1] += 1e-7
    watch.stepped()
    watch.stepped()  # no warning: warnings are errors here
    assert not moving._backward_hooks
    watch = MovementWatch([still], name="It", steps=2, communicator=Communicator())
    watch.stepped()
    with pytest.warns(UserWarning, match="It has not moved in 2 optimizer steps"):
        watch.stepped()
    watch.stepped()
