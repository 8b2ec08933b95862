"""CausalLMPolicy: sampling, scoring, facts, and short runs in one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lightning.pytorch import Trainer

from rlobjectives import GDPO, CapabilityError, KLPenalty, NonFiniteError, Objective, Reinforce
from rlobjectives.causal_lm import PromptBatch, PromptDataModule, SamplingOptions
from rlobjectives.causal_lm.sampling import sampling_logprobs
from tests.causal_lm.small_model import ROWS, UNEVEN, policy, save_small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"))


def batch_of(prompts, num_generations=4):
    rows = [{"prompt": prompt, "answer": "0"} for prompt in prompts]
    return PromptBatch(rows, prompt_column="prompt", ids=range(len(rows)), num_generations=num_generations)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_behavior_logprobs_are_what_scoring_finds(folder, temperature):
    """The ratio of a policy that has not moved is 1, at any temperature and under padding."""
    module = policy(folder, temperature=temperature)
    experience = module.rollout(batch_of(UNEVEN))
    logprobs, _ = module.score(experience)
    mask = experience.layout.mask
    assert mask.any(1).all()
    torch.testing.assert_close(logprobs[mask], experience.behavior_logprobs[mask], rtol=1e-4, atol=1e-5)
    assert logprobs[~mask].eq(0).all()


def test_the_end_counts_as_an_action_and_nothing_does_after_it(folder):
    module = policy(folder)
    experience = module.rollout(batch_of(UNEVEN * 8))
    ids, mask = experience.input_ids, experience.layout.mask
    ends = (ids == 17) & mask
    assert ends.any()
    assert (ends.sum(1) <= 1).all()
    after = ends.cumsum(1).roll(1, 1)
    after[:, 0] = 0
    assert not (mask & (after > 0)).any()
    assert module.last_rollout.ended.tolist() == ends.any(1).tolist()
    assert (mask.sum(1) <= 6).all()


def test_top_p_and_top_k_renormalise():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert sampling_logprobs(logits, top_p=0.7).exp()[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert sampling_logprobs(logits, top_p=0.4).exp()[0].tolist() == pytest.approx([1, 0, 0, 0])
    three = [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    assert sampling_logprobs(logits, top_k=3).exp()[0].tolist() == pytest.approx(three)
    assert sampling_logprobs(logits, temperature=0.5).exp().sum().item() == pytest.approx(1.0)


def test_truncated_sampling_reports_the_truncated_distribution(folder):
    """Each sampled token's behaviour log-probability is that of a distribution that sums to 1 over kept tokens."""
    module = policy(folder, top_p=0.6, temperature=1.3)
    experience = module.rollout(batch_of(UNEVEN, 16))
    logprobs, _ = module.score(experience)
    mask = experience.layout.mask
    gap = (experience.behavior_logprobs - logprobs)[mask]
    assert (gap >= -1e-5).all()
    assert (gap > 0.05).any()
    assert gap.max() <= -torch.tensor(0.6).log() + 1e-4  # what is kept holds at least 0.6 of the mass


def test_greedy_completions_are_those_of_transformers(folder):
    module = policy(folder)
    ids, mask = module.encode(UNEVEN)
    found = module.complete(ids, mask, greedy=True)
    expected = module.model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=15
    )[:, ids.shape[1] :]
    assert found.ids.tolist() == expected.tolist()
    assert module.model.training


def test_a_truncating_sampler_refuses_a_ratio_and_allows_a_loss_without(folder):
    module = policy(folder, top_p=0.9)
    with pytest.raises(CapabilityError, match=r"top_p = 0\.9"):
        module.check_objective()
    without = Objective(estimator=GDPO(weights=(1.0, 0.5)), policy_loss=Reinforce())
    policy(folder, top_p=0.9, objective=without).check_objective()


def test_one_completion_a_prompt_is_refused_before_training(folder):
    data = PromptDataModule(ROWS, prompts_per_step=4, num_generations=1)
    with pytest.raises(CapabilityError, match="num_generations is 1"):
        policy(folder).check_objective(data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_config": {"model_type": "llama"}}, "got both"),
        ({"model_name_or_path": None}, "no tokenizer"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"dtype": "float33"}, "dtype is 'float33'"),
        ({"rewards": []}, "rewards is empty"),
        ({"rewards": "my.reward"}, "expected a list of reward functions"),
        ({"warmup_steps": -5}, "warmup_steps (0 for none) is -5"),
        ({"warmup_steps": 1.5}, "warmup_steps (0 for none) is 1.5"),
        ({"betas": (2, 3)}, "betas[0] is 2"),
        ({"betas": (0.9, 1.0)}, "betas[1] is 1.0"),
        ({"betas": 0.9}, "expected two numbers"),
        ({"accuracy_threshold": "x"}, "accuracy_threshold is 'x'"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
        ({"max_prompt_tokens": 60}, "64 positions (max_position_embeddings); a sequence may have 66 tokens"),
        ({"max_new_tokens": 64}, "may have 65 tokens (1 for the shortest prompt"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"rewards": ["examples.spelling.wrong"]}, "has no 'wrong'"),
        ({"model_name_or_path": "/nowhere/at/all"}, "Cannot load '/nowhere/at/all'"),
    ],
)
def test_bad_options_are_named(folder, options, words):
    with pytest.raises(CapabilityError) as caught:
        policy(folder, **options)
    assert words in str(caught.value)


def test_a_fresh_model_from_a_configuration(folder):
    config = {"model_type": "llama", "vocab_size": 18, "hidden_size": 16, "intermediate_size": 16}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    first, second = (
        policy(folder, model_name_or_path=None, model_config=config, tokenizer_name_or_path=folder)
        for _ in range(2)
    )
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "lama"}, "'lama', which transformers does not know. Did you mean"),
        ({"model_type": None}, "model_config has no model_type"),
        ({"hidden_sizze": 8}, "'hidden_sizze', which LlamaConfig does not have. Did you mean hidden_size"),
        ({"vocab_size": 8}, "embeddings for 8 tokens; the tokenizer has 18"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(folder, change, words):
    config = {"model_type": "llama", "vocab_size": 18, "hidden_size": 16, "intermediate_size": 16}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2} | change
    with pytest.raises(CapabilityError) as caught:
        policy(folder, model_name_or_path=None, model_config=config, tokenizer_name_or_path=folder)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
        {"model_type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "intermediate_size": 16, "tie_word_embeddings": True, "bos_token_id": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16, "rope_theta": 1e4, "attn_implementation": "eager", "pad_token_id": 3},
    ],
    ids=["own names", "common names", "qwen2", "llama"],
)  # fmt: skip
def test_fields_that_every_model_has_are_no_typing_errors(folder, config):
    config = {**config, "vocab_size": 18}
    policy(folder, model_name_or_path=None, model_config=config, tokenizer_name_or_path=folder)


def test_too_long_a_prompt_is_an_error(folder):
    with pytest.raises(CapabilityError, match="max_prompt_tokens"):
        policy(folder, max_prompt_tokens=3).rollout(batch_of(UNEVEN))


def run(module, tmp_path, data=None, **options):
    data = data or PromptDataModule(
        ROWS, prompts_per_step=4, num_generations=4, val_dataset=ROWS[:10], seed=1
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"max_steps": 3, "enable_checkpointing": False, "num_sanity_val_steps": -1, **options},
    )
    trainer.fit(module, data)
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_short_run_logs_trains_and_leaves_the_reference_alone(folder, tmp_path):
    objective = Objective(estimator=GDPO(weights=(1.0, 0.5)), kl=KLPenalty(coef=0.1), entropy_coef=0.01)
    module = policy(folder, objective=objective, val_samples=2, warmup_steps=2)
    reference = [one.clone() for one in module._reference[0].parameters()]
    start = [one.detach().clone() for one in module.model.parameters()]
    trainer = run(module, tmp_path, val_check_interval=3, check_val_every_n_epoch=None)
    metrics = trainer.callback_metrics
    for name in ("reward/has_digit/mean", "rollout/accuracy", "time/tokens_per_second", "policy/kl_to_ref"):
        assert name in metrics
    for name in ("group/zero_advantage_fraction", "group/no_signal_token_fraction", "response/length_max"):
        assert name in metrics
    for name in ("abs_mean", "highest", "lowest", "zero_fraction", "positive_fraction", "negative_fraction"):
        assert f"advantage/{name}" in metrics
    for name in ("val/accuracy", "val/has_digit", "val/long_answer", "val/sampled/accuracy"):
        assert name in metrics
    assert [step for step, _ in module.validation_history] == [0, 3]
    moved = [not torch.equal(a, b) for a, b in zip(start, module.model.parameters(), strict=True)]
    assert all(moved)
    assert all(torch.equal(a, b) for a, b in zip(reference, module._reference[0].parameters(), strict=True))
    assert not any("reference" in name for name in module.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_resumed_run_takes_the_steps_of_an_uninterrupted_one(folder, tmp_path):
    whole = policy(folder, seed=3)
    run(whole, tmp_path / "whole", max_steps=4)
    first = policy(folder, seed=3)
    trainer = run(first, tmp_path / "first", max_steps=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = policy(folder, seed=3)
    data = PromptDataModule(ROWS, prompts_per_step=4, num_generations=4, val_dataset=ROWS[:10], seed=1)
    resumed = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_steps=4,
        default_root_dir=tmp_path,
    )
    resumed.fit(second, data, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert data.consumed == 4
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_sampling_options_refuse_nonsense():
    with pytest.raises(CapabilityError, match="max_new_tokens is 0"):
        SamplingOptions(max_new_tokens=0)
    with pytest.raises(CapabilityError, match="top_k"):
        SamplingOptions(max_new_tokens=1, top_k=-1)
    assert dataclasses.replace(SamplingOptions(max_new_tokens=1), top_k=5).truncates


def test_dtypes_that_cannot_be_trained_are_refused(folder):
    with pytest.raises(CapabilityError, match="Use 'bfloat16' or 'float32'"):
        policy(folder, dtype="float16")
    with pytest.raises(CapabilityError, match="Give dtype itself"):
        policy(folder, model_options={"torch_dtype": "float16"})
    with pytest.raises(CapabilityError, match="float8_e4m3fn"):
        policy(folder, dtype="float8_e4m3fn")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"greedy": True}], ids=str)
def test_logits_that_are_no_numbers_are_named(folder, value, options):
    """Even one bad logit among good ones (only −∞ may stand in some places: it forbids a token)."""
    options = dict(options)
    greedy = options.pop("greedy", False)
    module = policy(folder, **options)
    normal = module.model.lm_head.forward

    def broken(hidden):
        logits = normal(hidden).clone()
        logits[1, :, slice(None) if value == -torch.inf else slice(5, 6)] = value
        return logits

    module.model.lm_head.forward = broken
    with pytest.raises(NonFiniteError, match=r"1 of 4 sequences .*\(sequence 1\).*learning_rate"):
        module.complete(*module.encode(UNEVEN), greedy=greedy)
    assert module.model.training


def test_what_a_model_says_after_the_end_does_not_matter(folder):
    module = policy(folder)
    normal = module.model.lm_head.forward
    steps = []

    def end_then_break(hidden):
        logits = torch.full_like(normal(hidden), float("nan") if steps else 0.0)
        if steps:
            logits[1:] = 0.0
        logits[0, :, 17] = 100.0 if not steps else float("nan")
        steps.append(1)
        return logits

    module.model.lm_head.forward = end_then_break
    found = module.complete(*module.encode(UNEVEN), greedy=True)
    assert found.ids[0].tolist()[:2] == [17, 15]
