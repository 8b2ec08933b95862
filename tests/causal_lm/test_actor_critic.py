"""The language-model agent and its value model, in one process and on two ranks under each strategy."""

import functools

import pytest
import torch

from rlobjectives import GRPO, CapabilityError, ClippedValueLoss, Objective
from rlobjectives.causal_lm import ExportModel
from rlobjectives.integrations.lightning.bootstrap import bootstrap_values, with_next_place
from rlobjectives.integrations.transformers import CausalLMWithValue
from tests.causal_lm.critic_runs import EXISTS, IDS, agent, all_cases
from tests.causal_lm.small_model import policy, save_small_model
from tests.causal_lm.test_policy import UNEVEN, batch_of
from tests.ranks import run_ranks

GROUPS = (("ddp", "fsdp2"), ("zero3",))
STRATEGIES = ("single", "ddp", "fsdp2", "zero3")
pytestmark = pytest.mark.timeout(390)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def found(folder, root):
    """What the first rank saw, by strategy."""

    @functools.cache
    def group(strategies):
        if strategies == ("single",):
            return all_cases(strategies, folder, root)
        return run_ranks(all_cases, 2, strategies, folder, root, timeout=380, fresh=True)[0]

    groups = (("single",), *GROUPS)
    return lambda strategy: group(next(one for one in groups if strategy in one))[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_value_model_learns_alike_and_is_saved_whole(found, root, strategy):
    expected, value = found("single")["value"], found(strategy)["value"]
    torch.testing.assert_close(value["before"], expected["before"], rtol=1e-5, atol=1e-6)
    assert (expected["after"] - expected["before"]).abs().max() > 0.05
    torch.testing.assert_close(value["after"], expected["after"], rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # the second epoch has taken one more step
        saved = CausalLMWithValue.from_pretrained(f"{root}/{strategy}-value")(IDS, EXISTS)
        alone = CausalLMWithValue.from_pretrained(f"{root}/single-value")(IDS, EXISTS)
    assert (saved - value["after"]).abs().max() > 0.01
    torch.testing.assert_close(saved, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_an_agent_trains_under_every_strategy(found, root, strategy, backbone):
    run = found(strategy)[backbone]
    assert [step["moved"] for step in run["seen"]] == [False, True]
    metrics = run["seen"][-1]["metrics"]
    for name in ("value/explained_variance", "value/clip_fraction", "value/error", "optim/critic_grad_norm"):
        assert torch.isfinite(metrics[name])
    critic = CausalLMWithValue.from_pretrained(f"{root}/{backbone}/{strategy}/critic")
    saved = torch.cat([one.detach().flatten() for one in critic.value_head.parameters()])
    assert torch.equal(saved, run["head"])


def test_a_shared_critic_reads_what_a_separate_one_would(folder):
    """One forward for both: the hidden states are those below the logits."""
    module = agent(folder, critic_backbone="shared")
    batch = module.rollout(batch_of(UNEVEN))
    logprobs, entropy, values = module.score_with_values(batch)
    expected = module.critic_model()(batch.input_ids, batch.attention_mask)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(module.score(batch)[0], logprobs)
    assert torch.equal(module.score(batch)[1], entropy)
    alone = module.score_values(batch)
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-6)
    alone.sum().backward()
    assert all(parameter.grad is None for parameter in module.model.parameters())
    assert all(parameter.grad is not None for parameter in module.value_head.parameters())
    values.sum().backward()
    assert module.model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_an_own_critic_starts_as_the_policy_and_shares_nothing(folder):
    module = agent(folder)
    assert not {id(one) for one in module.model.parameters()} & {
        id(one) for one in module.critic.parameters()
    }
    inner = zip(module.model.model.parameters(), module.critic.backbone.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in inner)
    assert not module.critic.backbone.lm_head.weight.requires_grad
    assert torch.equal(module.value_head.summary.weight, agent(folder).value_head.summary.weight)
    groups = module.configure_optimizers()["optimizer"].param_groups
    held = [id(one) for group in groups for one in group["params"]]
    assert sorted(held) == sorted(id(one) for one in module.parameters() if one.requires_grad)


def test_learning_rates_of_policy_and_critic(folder):
    """The policy's warm-up begins with its own first step."""
    module = agent(folder, critic_warmup_steps=2, warmup_steps=4, weight_decay=0.1, critic_learning_rate=3e-2)
    configured = module.configure_optimizers()
    schedule, optimizer = configured["lr_scheduler"]["scheduler"], configured["optimizer"]
    rates = {name: [] for name in ("policy", "critic")}
    for _ in range(7):
        for group in optimizer.param_groups:
            if group["name"] in rates:
                rates[group["name"]].append(group["lr"])
        optimizer.step()
        schedule.step()
    assert rates["policy"] == pytest.approx([0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert rates["critic"] == pytest.approx([0.0075, 0.015, 0.0225, 0.03, 0.03, 0.03, 0.03])
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"policy": 0.1, "policy_vectors": 0.0, "critic": 0.1, "critic_vectors": 0.0}


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_saved_critic_can_be_continued(folder, tmp_path, backbone):
    first = agent(folder, critic_backbone=backbone)
    torch.nn.init.constant_(first.value_head.summary.weight, 0.25)
    first.critic_model().save_pretrained(tmp_path / "critic")
    second = agent(folder, critic_backbone=backbone, critic_name_or_path=str(tmp_path / "critic"))
    assert torch.equal(second.value_head.summary.weight, first.value_head.summary.weight)
    with pytest.raises(CapabilityError, match="holds no critic"):
        agent(folder, critic_name_or_path=folder)


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_completions_that_were_cut_off_are_valued_where_they_would_go_on(folder, backbone):
    """The critic's value behind the last token, whatever the padding; the values before it are those without."""
    torch.manual_seed(2)
    module = agent(folder, critic_backbone=backbone, bootstrap_truncated=True, max_new_tokens=4).eval()
    torch.nn.init.normal_(module.value_head.summary.weight)
    experience = module.rollout(batch_of(UNEVEN))
    truncated, ended = experience.need_rollouts().truncated, module.last_rollout.ended
    assert torch.equal(truncated, ~ended)
    assert 0 < truncated.sum() < len(truncated)
    assert agent(folder).rollout(batch_of(UNEVEN)).need_rollouts().truncated is None
    with torch.no_grad():
        values = module.score_values(with_next_place(experience, truncated))
        before = module.score_values(experience)
    torch.testing.assert_close(values[:, :-1], before, rtol=1e-5, atol=1e-6)
    found = bootstrap_values(values, experience.attention_mask)
    for row in truncated.nonzero().flatten().tolist():
        real = experience.input_ids[row][experience.attention_mask[row] > 0]
        longer = torch.cat([real, real.new_tensor([5])]).unsqueeze(0)  # any token: its own value is not read
        alone = module.critic_model()(longer, torch.ones_like(longer))[0, -1]
        assert found[row].item() == pytest.approx(alone.item(), rel=1e-4)
        assert abs(alone.item()) > 1e-4


def test_what_follows_the_last_token_needs_a_position(folder):
    full = {"max_prompt_tokens": 58, "max_new_tokens": 6}
    agent(folder, **full)
    with pytest.raises(CapabilityError, match="64 positions.* 65 tokens"):
        agent(folder, bootstrap_truncated=True, **full)


def test_what_makes_a_critic_useless_is_refused(folder):
    without = Objective.named("ppo", value_loss=None)
    with pytest.raises(CapabilityError, match="has no value_loss"):
        agent(folder, objective=without).check_objective()
    unread = Objective(estimator=GRPO(), value_loss=ClippedValueLoss())
    with pytest.raises(CapabilityError, match="GRPO reads no critic"):
        agent(folder, objective=unread).check_objective()
    with pytest.raises(CapabilityError, match="needs values of a critic"):
        policy(folder, objective=Objective.named("ppo")).check_objective()
    agent(folder, objective=Objective.named("ppo")).check_objective()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"critic_backbone": "both"}, "critic_backbone is 'both'"),
        ({"critic_learning_rate": -1.0}, "critic_learning_rate is -1.0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps (0 for none) is -1"),
        ({"critic_epochs": 1.5}, "critic_epochs (0 for none) is 1.5"),
    ],
)
def test_bad_options_are_named(folder, options, words):
    with pytest.raises(CapabilityError) as caught:
        agent(folder, **options)
    assert words in str(caught.value)


def test_a_folder_for_a_critic_that_is_not_there_is_refused(folder):
    with pytest.raises(CapabilityError, match="has no critic_model"):
        ExportModel(critic_folder="somewhere").setup(None, policy(folder), "fit")
