"""Every named objective either trains on the small model or is refused before training."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer

from rlobjectives import (
    ALGORITHMS,
    GRPO,
    CapabilityError,
    ClippedValueLoss,
    KLPenalty,
    Objective,
    OptimalTokenBaseline,
    PaddedLayout,
    ReMax,
    Rollouts,
)
from rlobjectives.causal_lm import PromptBatch, PromptDataModule
from rlobjectives.integrations.lightning import Experience
from tests.causal_lm.small_model import ROWS, UNEVEN, long_answer, policy, save_small_model
from tests.integrations.lightning.runs import fit, uneven
from tests.integrations.lightning.toy import ToyPolicy

REFUSED = {
    "optimal_token_baseline": r"whole distributions \(squared_probs\)",
    "ppo": "values of a critic",
    "vapo": "values of a critic",
    "vtrace": "values of a critic",
}
OPTIONS = {"dr_grpo": {"reduction": {"max_tokens": 6}}, "pass_at_k": {"estimator": {"k": 2}}}


def brief(prompts, completions, **columns):
    return [1.0 / (1 + len(text)) for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_named_objective_trains_or_is_refused(folder, tmp_path, name):
    objective = Objective.named(name, **OPTIONS.get(name, {}))
    rewards = [long_answer, brief]
    module = policy(folder, objective=objective, rewards=rewards, max_new_tokens=3, micro_batch_size=4)
    data = PromptDataModule(ROWS[:4], prompts_per_step=2, num_generations=4, seed=1)
    if name in REFUSED:
        with pytest.raises(CapabilityError, match=REFUSED[name]):
            module.check_objective(data)
        return
    module.check_objective(data)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, data)
    assert trainer.global_step == 1


def test_what_only_logits_can_give_is_refused(folder):
    full = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1, estimator="full"))
    with pytest.raises(CapabilityError, match=r"\(ref_kl\); the trainer has none"):
        policy(folder, objective=full, reference=True).check_objective()
    with pytest.raises(CapabilityError, match=r"\(ref_kl\); the trainer has none"):
        ToyPolicy(uneven, objective=full).check_objective()


def test_a_value_loss_without_a_critic_is_refused():
    objective = Objective(estimator=GRPO(), value_loss=ClippedValueLoss())
    module = ToyPolicy(uneven, objective=objective)
    with pytest.raises(CapabilityError, match="values"):
        module.check_objective()


def test_a_greedy_baseline_is_that_of_the_prompt_and_of_rewards_that_score_both(folder):
    def counted(prompts, completions, **columns):
        return [None if len(text) < 3 else float(len(text)) for text in completions]

    module = policy(folder, objective=Objective(estimator=ReMax()), rewards=[long_answer, counted])
    rows = [{"prompt": prompt, "answer": "0"} for prompt in UNEVEN]
    rollouts = module.rollout(
        PromptBatch(rows, prompt_column="prompt", ids=range(4), num_generations=3)
    ).rollouts
    answers = module.complete(*module.encode(UNEVEN), greedy=True)
    texts = module.tokenizer.batch_decode(
        [row[keep] for row, keep in zip(answers.ids, answers.mask, strict=True)], skip_special_tokens=True
    )
    expected = torch.tensor(long_answer(None, texts)).double().repeat_interleave(3)
    torch.testing.assert_close(rollouts.greedy_rewards[:, 0], expected, rtol=1e-6, atol=0)
    both = torch.tensor([len(text) >= 3 for text in texts]).repeat_interleave(3)
    both &= torch.tensor([len(text) >= 3 for text in module.last_rollout.completions])
    assert rollouts.scored[:, 1].tolist() == both.tolist()
    assert (rollouts.greedy_rewards[:, 1] >= 3).tolist() == both.tolist()


def test_old_logprobs_are_found_first_for_an_estimator_that_reads_them():
    """The data bring what the trainer cannot find; what it can is filled in."""
    ids = torch.tensor([[0, 1, 2], [0, 2, 1]])
    layout = PaddedLayout(torch.tensor([[False, True, True]] * 2))
    squares = torch.full((2, 3), 0.3)
    data = Experience(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        layout=layout,
        rollouts=Rollouts(
            rewards=torch.tensor([1.0, 0.0]),
            group_ids=torch.tensor([0, 0]),
            layout=layout,
            squared_probs=squares,
        ),
    )
    module = fit(
        ToyPolicy(lambda *_: data, objective=Objective(estimator=OptimalTokenBaseline())),
        "single",
        rollouts=1,
    )
    assert module.trace[0]["steps"] == 1
