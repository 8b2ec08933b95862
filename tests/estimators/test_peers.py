"""The installed peers' own functions on random inputs: equal where conventions agree, and where they do not, why."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch

from benchmarks.peers import PeerMissingError, torchrl_functions, verl_functions
from rlobjectives import (
    GAE,
    GPG,
    OPO,
    OptimalTokenBaseline,
    PaddedLayout,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Rollouts,
    TDLambda,
    VTrace,
)
from tests.estimators.helpers import close, final

ROWS, WIDTH = 12, 9
WHITENED = 2e-9
"""verl's masked mean adds 1e-8 to its count."""


def _load(functions):
    try:
        return functions()
    except PeerMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def verl():
    return _load(verl_functions)


@pytest.fixture(scope="module")
def torchrl():
    return _load(torchrl_functions)


def draw(holes=True, seed=0):
    """Rollouts, verl's token rewards, its float mask, and its prompt ids."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, WIDTH + 1, (ROWS, 1), generator=rng)
    mask = torch.arange(WIDTH) < lengths
    if holes:
        mask &= torch.rand(ROWS, WIDTH, generator=rng) > 0.3
        mask[:, 0] = True
    rewards = torch.randint(0, 5, (ROWS,), generator=rng).double() / 4
    last = WIDTH - 1 - mask.flip(1).int().argmax(1)
    tokens = torch.zeros(ROWS, WIDTH, dtype=torch.float64).scatter(1, last.unsqueeze(1), rewards.unsqueeze(1))
    ids = torch.arange(ROWS) % 3
    normal = lambda: torch.randn(ROWS, WIDTH, generator=rng, dtype=torch.float64)
    logs = -normal().abs()
    rollouts = Rollouts(
        rewards=rewards,
        group_ids=ids,
        layout=PaddedLayout(mask),
        values=normal(),
        old_logprobs=logs,
        ref_logprobs=(logs + 0.1 * normal()).clamp_max(0.0),
        squared_probs=(2 * logs).exp() + 0.1 * normal().abs(),
        behavior_logprobs=(logs + 0.3 * normal()).clamp_max(0.0),
        greedy_rewards=torch.rand(ROWS, generator=rng, dtype=torch.float64),
    )
    return rollouts, tokens, mask.double(), numpy.array([str(i) for i in ids.tolist()], dtype=object)


@pytest.mark.parametrize("discount", [0.9, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.8, 1.0])
def test_gae_of_verl(verl, discount, decay):
    rollouts, tokens, mask, _ = draw()
    advantages, returns = verl["compute_gae_advantage_return"](tokens, rollouts.values, mask, discount, decay)
    options = {"discount": discount, "trace_decay": decay}
    layout = rollouts.layout
    close(final(GAE(**options, normalize="window"), rollouts), layout.select(advantages), WHITENED)
    ours = GAE(**options).value_targets(rollouts)
    close(ours, layout.select(returns), 1e-12)
    # On purpose: verl leaves advantage + value at masked tokens; here a masked token has no target.
    assert bool((returns[~layout.mask] != 0).any())
    assert not ours[~layout.mask].any()


def test_gae_of_verl_is_poisoned_by_what_the_mask_hides(verl):
    rollouts, tokens, mask, _ = draw()
    dirty = torch.where(rollouts.layout.mask, rollouts.values, torch.nan)
    advantages, _ = verl["compute_gae_advantage_return"](tokens, dirty, mask, 0.9, 0.8)
    assert bool(advantages.isnan().any())
    again = Rollouts(
        rewards=rollouts.rewards, group_ids=rollouts.group_ids, layout=rollouts.layout, values=dirty
    )
    close(
        GAE(discount=0.9, trace_decay=0.8).estimate(again),
        GAE(discount=0.9, trace_decay=0.8).estimate(rollouts),
        0,
    )


def test_reinforce_pp_of_verl(verl):
    rollouts, tokens, mask, _ = draw()
    shaped = tokens - 0.1 * (rollouts.old_logprobs - rollouts.ref_logprobs) * mask
    advantages, returns = verl["compute_reinforce_plus_plus_outcome_advantage"](
        shaped, mask, config=SimpleNamespace(gamma=0.9)
    )
    theirs = ReinforcePlusPlus(discount=0.9, kl_coef=0.1, ddof=1, epsilon_mode="variance")
    close(theirs.estimate(rollouts), returns, 1e-12)
    close(final(theirs, rollouts), advantages, WHITENED)
    # On purpose: the default is the population variance with a floor, as in OpenRLHF.
    assert not torch.allclose(final(ReinforcePlusPlus(discount=0.9, kl_coef=0.1), rollouts), advantages)


def test_reinforce_pp_baseline_of_verl(verl):
    rollouts, tokens, mask, ids = draw()
    advantages, _ = verl["compute_reinforce_plus_plus_baseline_outcome_advantage"](
        tokens.clone(), mask, index=ids
    )
    close(final(ReinforcePlusPlusBaseline(ddof=1, epsilon_mode="variance"), rollouts), advantages, WHITENED)


def test_remax_of_verl(verl):
    rollouts, tokens, mask, _ = draw()
    advantages, _ = verl["compute_remax_outcome_advantage"](tokens, rollouts.greedy_rewards[:, 0], mask)
    close(ReMax().estimate(rollouts), rollouts.layout.select(advantages), 1e-12)


def test_opo_of_verl(verl):
    rollouts, tokens, mask, ids = draw()
    advantages, _ = verl["compute_opo_outcome_advantage"](tokens.clone(), mask, index=ids)
    close(final(OPO(), rollouts), advantages, 1e-12)


def test_gpg_of_verl(verl):
    rollouts, tokens, mask, ids = draw()
    advantages, _ = verl["compute_gpg_outcome_advantage"](tokens.clone(), mask, index=ids)
    close(final(GPG(count="nonzero"), rollouts), advantages, 1e-6)  # its α is a float32 quotient
    # On purpose: by default a sequence counts by the spread of its group, not by the sign of its own reward.
    assert not torch.allclose(final(GPG(), rollouts), advantages)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_max_minus_second_of_verl(verl, scale):
    rollouts, tokens, mask, ids = draw()
    config = {"norm_adv_by_std_in_grpo": scale == "group"}
    advantages, _ = verl["compute_grpo_passk_outcome_advantage"](
        tokens.clone(), mask, index=ids, config=config
    )
    close(final(PassAtK(form="max_minus_second", epsilon=1e-6, scale=scale), rollouts), advantages, 1e-10)


def test_optimal_token_baseline_of_verl(verl):
    rollouts, tokens, mask, ids = draw(holes=False)
    advantages, _ = verl["compute_optimal_token_baseline_advantage"](
        tokens, mask, ids, rollouts.old_logprobs, rollouts.squared_probs
    )
    ours = OptimalTokenBaseline().estimate(rollouts)
    equal = ours != 0  # where all returns are equal verl leaves ε · return / W, here exactly 0
    close(ours[equal], advantages[equal], 1e-10)
    close(ours, advantages, 1e-5)
    # On purpose: with holes in the mask, steps are counted by action token and not by column.
    rollouts, tokens, mask, ids = draw()
    advantages, _ = verl["compute_optimal_token_baseline_advantage"](
        tokens, mask, ids, rollouts.old_logprobs, rollouts.squared_probs
    )
    assert not torch.allclose(OptimalTokenBaseline().estimate(rollouts), advantages, atol=1e-3)


GAMMA, LAMBDA = 0.875, 0.75
"""Exact in float32, to which torchrl rounds the discount on the way."""


def unmasked(seed=1):
    """Rollouts without any mask, and the columns torchrl wants; half of the sequences truncated."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    values, rewards, logs, ends = normal(ROWS, WIDTH), normal(ROWS, WIDTH), normal(ROWS, WIDTH), normal(ROWS)
    cut = torch.arange(ROWS) % 2 == 0
    rollouts = Rollouts(
        rewards=torch.zeros(ROWS),
        group_ids=torch.arange(ROWS),
        token_rewards=rewards,
        values=values,
        layout=PaddedLayout(torch.ones(ROWS, WIDTH, dtype=torch.bool)),
        truncated=cut,
        bootstrap_values=ends,
        old_logprobs=logs - 8.0,
        behavior_logprobs=torch.full_like(logs, -8.0),
    )
    done = torch.zeros(ROWS, WIDTH, 1, dtype=torch.bool)
    done[:, -1] = True
    ahead = torch.cat([values[:, 1:], ends.unsqueeze(1)], dim=1).unsqueeze(-1)
    return rollouts, values.unsqueeze(-1), ahead, rewards.unsqueeze(-1), done, done & ~cut.view(-1, 1, 1)


@pytest.mark.parametrize("name", ["generalized_advantage_estimate", "vec_generalized_advantage_estimate"])
def test_gae_of_torchrl(torchrl, name):
    rollouts, values, ahead, rewards, done, terminated = unmasked()
    advantages, returns = torchrl[name](GAMMA, LAMBDA, values, ahead, rewards, done, terminated)
    found = GAE(discount=GAMMA, trace_decay=LAMBDA).credit(rollouts)
    close(found.advantages, advantages.squeeze(-1), 1e-6 if name.startswith("vec") else 1e-12)
    close(found.returns, returns.squeeze(-1), 1e-6 if name.startswith("vec") else 1e-12)


def test_td_lambda_of_torchrl(torchrl):
    rollouts, _, ahead, rewards, done, terminated = unmasked()
    returns = torchrl["td_lambda_return_estimate"](GAMMA, LAMBDA, ahead, rewards, done, terminated)
    close(
        TDLambda(discount=GAMMA, trace_decay=LAMBDA, baseline="none").estimate(rollouts),
        returns.squeeze(-1),
        1e-12,
    )


@pytest.mark.parametrize(("rho", "trace"), [(1.0, 1.0), (2.0, 0.5)])
def test_vtrace_of_torchrl(torchrl, rho, trace):
    rollouts, values, ahead, rewards, done, terminated = unmasked()
    logs = rollouts.old_logprobs.unsqueeze(-1)
    advantages, targets = torchrl["vtrace_advantage_estimate"](
        GAMMA, logs, torch.full_like(logs, -8.0), values, ahead, rewards, done, terminated, rho, trace
    )
    found = VTrace(discount=GAMMA, rho_clip=rho, trace_clip=trace, policy_rho_clip=rho).credit(rollouts)
    close(found.advantages, advantages.squeeze(-1), 1e-12)
    close(found.returns, targets.squeeze(-1), 1e-12)
