"""The model of a policy is tested before its first rollout, under every strategy; LoRA models train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlobjectives import CapabilityError, Objective
from rlobjectives.causal_lm import CausalLMActorCritic, CausalLMPolicy
from rlobjectives.causal_lm import self_test as hook
from tests.causal_lm.policy_runs import BY_LAYER
from tests.causal_lm.self_test_runs import Hiding, LoRAPolicy, Padded, all_cases, fit, weights
from tests.causal_lm.small_model import UNEVEN, long_answer, policy, save_small_model
from tests.causal_lm.test_policy import batch_of
from tests.integrations.transformers.architectures import fields
from tests.ranks import run_ranks

STRATEGIES = ("zero3", BY_LAYER, "fsdp2", "ddp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"))


def of_kind(folder: str, kind: str, **options: Any) -> CausalLMPolicy:
    """A policy on a random model of some architecture."""
    given = fields(kind, vocab_size=18, pad_token_id=15, bos_token_id=16, eos_token_id=17)
    if kind == "rwkv":  # its configuration has no such field
        del given["pad_token_id"]
    config = {"model_type": kind, **given}
    return policy(
        folder, model_name_or_path=None, tokenizer_name_or_path=folder, model_config=config, **options
    )


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "recurrent_gemma", "gpt2"])
def test_a_model_trains_on_what_it_samples(folder, kind):
    """The ratio to the sampler's log-probabilities is 1 before the first step."""
    module = of_kind(folder, kind, old_logprobs="behavior", micro_batch_size=32)
    trainer = fit(module)
    assert float(trainer.callback_metrics["policy/ratio_max"]) == pytest.approx(1.0, abs=1e-4)


def test_a_model_without_a_cache_is_refused_before_it_samples(folder):
    with pytest.raises(CapabilityError, match="RwkvForCausalLM takes no key-value cache"):
        fit(of_kind(folder, "rwkv"))


class OwnSampler(CausalLMPolicy):
    """Completes with something else than the model."""

    def complete(self, prompt_ids, prompt_mask, *, greedy=False):
        raise NotImplementedError("another engine")


def test_padding_that_changes_scores_is_refused_with_the_numbers(folder):
    """Also behind a sampler of one's own, which is not run."""
    with pytest.raises(CapabilityError) as error:
        fit(policy(folder, Padded))
    assert "log-probabilities, padded left: 1.5 on average, 1.5 at most; too much" in str(error.value)
    assert str(error.value).endswith("self_test: false (self_test=False) trains it all the same.")
    module = policy(folder, OwnSampler)
    module.model = Hiding(module.model)
    with pytest.raises(
        NotImplementedError, match="another engine"
    ):  # positions are relative: nothing to refuse
        fit(module)
    module = of_kind(folder, "gpt2")
    module.__class__ = OwnSampler
    module.model = Hiding(module.model)
    with pytest.raises(CapabilityError, match=r"GPT2LMHeadModel takes position_ids, but Hiding\.forward"):
        fit(module)


def test_it_can_be_turned_off(folder):
    trainer = fit(policy(folder, Padded, self_test=False))
    assert trainer.global_step == 1


def test_it_changes_nothing_that_is_trained(folder):
    """Random states, modes and dropout are as without it, to the last bit."""
    runs = []
    for tested in (True, False):
        module = policy(folder, seed=5, self_test=tested, disable_dropout=False)
        module.model.model.layers[0].self_attn.attention_dropout = 0.3
        fit(module, max_steps=2)
        assert module.model.training
        runs.append(weights(module))
    assert all(torch.equal(one, runs[1][name]) for name, one in runs[0].items())


def test_it_runs_once_a_fit(folder, monkeypatch):
    calls = []
    monkeypatch.setattr(hook, "check_model", lambda model, **options: calls.append(options))
    module = policy(folder)
    fit(module, max_steps=3)
    assert len(calls) == 1 and calls[0]["samples"]
    fit(module, max_steps=1)
    assert len(calls) == 2


# LoRA.


def test_a_lora_policy_samples_scores_and_trains(folder):
    """Its adapters begin at zero, so it is the base model; only they move."""
    base, module = policy(folder, seed=1), policy(folder, LoRAPolicy, seed=1, old_logprobs="behavior")
    start = weights(module)
    trainer = fit(module)
    fit(base)
    for name in (
        "policy/ratio_max",
        "rollout/accuracy",
        "reward/long_answer/mean",
        "rollout/completion_tokens",
    ):
        mine, theirs = (float(one.callback_metrics[name]) for one in (trainer, base.trainer))
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert float(trainer.callback_metrics["policy/ratio_max"]) == pytest.approx(1.0, abs=1e-4)
    moved = {name for name, one in weights(module).items() if not torch.equal(one, start[name])}
    assert moved and all("lora_B" in name for name in moved)  # A gets no gradient while B is zero


@pytest.fixture(scope="module")
def found(folder):
    return run_ranks(all_cases, 2, STRATEGIES, folder, timeout=280, fresh=True)


@pytest.mark.timeout(290)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failure_on_one_rank_stops_both(found, strategy):
    first, second = (rank[strategy]["error"] for rank in found)
    assert second.startswith("CapabilityError: LlamaForCausalLM fails the self-test before training")
    assert "padded left: 1.5 on average" in second
    assert first.startswith("RankError: rank 1 stopped with CapabilityError")


@pytest.mark.timeout(290)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lora_trains_under_every_strategy(found, strategy):
    for rank in found:
        metrics, expected = rank[strategy]["metrics"], found[0]["ddp"]["metrics"]
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        moved = {name.split("lora_")[-1].split(".")[0] for name in rank[strategy]["moved"]}
        assert moved == {"B"}


# Critics.


def agent(folder: str, kind: type[CausalLMActorCritic] = CausalLMActorCritic, **options: Any) -> Any:
    return policy(folder, kind, objective=Objective.named("ppo"), rewards=[long_answer], **options)


class PaddedValues(CausalLMActorCritic):
    """An agent whose values depend on padding."""

    def score_with_values(self, micro_batch):
        logprobs, entropy, values = super().score_with_values(micro_batch)
        return logprobs, entropy, values + (micro_batch.attention_mask == 0).sum(1, keepdim=True)


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_the_critic_is_tested_with_the_policy(folder, backbone):
    fit(agent(folder, critic_backbone=backbone))
    with pytest.raises(CapabilityError, match="values, padded left: 15 on average, 15 at most; too much"):
        fit(agent(folder, PaddedValues, critic_backbone=backbone))


def test_a_shared_backbone_scores_at_the_policys_temperature(folder):
    """Policy and critic in one forward, log-probabilities at the same temperature as without the critic."""
    module = agent(folder, critic_backbone="shared", policy_temperature=0.5)
    module.eval()
    experience = module.rollout(batch_of(UNEVEN))
    alone, _ = module.score(experience)
    together, _, _ = module.score_with_values(experience)
    torch.testing.assert_close(together, alone)
