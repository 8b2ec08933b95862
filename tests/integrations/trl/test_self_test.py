"""TRL's scoring forward says of a token what `generate` says, for absolute positions too; or the model is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from trl import TrlParser

from rlobjectives.errors import CapabilityError
from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer, ObjectiveRLOOTrainer
from rlobjectives.integrations.trl import scoring as hook
from rlobjectives.integrations.trl.columns import forward
from rlobjectives.integrations.trl.scoring import counted_positions
from tests.integrations.transformers.architectures import HYBRIDS
from tests.integrations.transformers.architectures import tiny as architecture
from tests.integrations.trl import tiny


def built(kind: str) -> Any:
    model = architecture(kind, eos_token_id=1)
    model.warnings_issued = {}
    return model


def trainer(model: Any, kind: type = ObjectiveGRPOTrainer, **extra: Any) -> Any:
    """Samples with the model's own `generate`; one prompt is shorter than the other."""
    options = extra.pop("options", {})
    config = extra.pop("args", None) or ObjectiveConfig(
        **tiny.options(max_steps=1, learning_rate=0.0, **options)
    )
    return tiny.trainer(
        kind,
        config,
        model=model,
        generated=True,
        reward_funcs=[tiny.even],
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3 w4 w5 w6 w7 w8"]}),
        **extra,
    )


def alone(model: Any, tokens: list[int]) -> list[float]:
    """Log-probability of each token but the first, by the definition: one forward of this sequence and nothing else."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double()
    table = logits - logits.exp().sum(-1, keepdim=True).log()
    return [float(table[place, token]) for place, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neo", "llama", "mamba"])
def test_scores_of_a_short_prompt_do_not_depend_on_the_longest(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 was off by up to 3.5 nats: padding took up positions."""
    seen: list[tuple[dict[str, Any], Any]] = []

    def watched(trained: Any, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        found = forward(trained, model, inputs, **options)
        seen.append((inputs, found[0].detach()))
        return found

    monkeypatch.setattr("rlobjectives.integrations.trl.mixin.forward", watched)
    trained = trainer(built(kind), objective="grpo")
    trained.train()
    (inputs, logprobs), padded = seen[0], 0
    for row in range(len(logprobs)):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()].tolist()
        expected = alone(trained.model, prompt + completion)[len(prompt) - 1 :]
        assert logprobs[row, : len(completion)].tolist() == pytest.approx(expected, abs=1e-4)
        padded += len(prompt) < inputs["prompt_ids"].shape[1]
    assert 0 < padded < len(logprobs)


@pytest.mark.parametrize(
    "kind", sorted(HYBRIDS.keys() - {"granitemoehybrid"}) + ["falcon_mamba", "recurrent_gemma"]
)
def test_other_architectures_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that TRL trains; its forward asks GraniteMoeHybrid for experts under another name."""
    trained = trainer(built(kind), objective="grpo")
    monkeypatch.setattr(trained, "_open", lambda batches: pytest.skip("the test has passed"))
    with pytest.raises(pytest.skip.Exception):
        trained.train()
    assert trained._tested


def test_a_model_that_padding_changes_is_refused() -> None:
    model = built("rwkv")
    with pytest.raises(CapabilityError, match=r"recurrent state\. Padding before") as error:
        trainer(model, objective="grpo").train()
    assert "log-probabilities, padded left: 0." in str(error.value)
    assert "self_test=False in ObjectiveConfig, or in the class body" in str(error.value)


def test_without_positions_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "forward_keywords", lambda model: frozenset())
    with pytest.raises(CapabilityError, match="does not pass position_ids"):
        trainer(built("gpt2"), objective="grpo").train()


def test_rloo_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import RLOOConfig

    monkeypatch.setattr(hook, "forward_keywords", lambda model: frozenset())
    config = RLOOConfig(**tiny.options(max_steps=1, beta=0.0))
    with pytest.raises(CapabilityError, match="GPT2LMHeadModel fails the self-test"):
        trainer(built("gpt2"), ObjectiveRLOOTrainer, args=config, objective="rloo").train()


def test_a_wrapped_model_gets_its_positions() -> None:
    peft = pytest.importorskip("peft")
    model = built("gpt2")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    ids, mask = torch.tensor([[0, 0, 0, 5, 6, 7]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    with torch.no_grad(), counted_positions(wrapped):
        padded = wrapped(input_ids=ids, attention_mask=mask).logits[:, 3:]
        given = wrapped(input_ids=ids[:, 3:], attention_mask=mask[:, 3:]).logits
    torch.testing.assert_close(padded, given)
    assert not wrapped._forward_pre_hooks
    trained = trainer(wrapped, objective="grpo")
    trained.train()
    assert trained._tested and trained.state.global_step == 1


def test_positions_that_are_given_stay() -> None:
    model = built("gpt2")
    ids, mask = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])
    own = torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=own).logits
        with counted_positions(model):
            found = model(input_ids=ids, attention_mask=mask, position_ids=own).logits
    assert torch.equal(found, expected)


# The option.


class Untested(ObjectiveGRPOTrainer):
    self_test = False


def test_it_is_turned_off_in_the_class_or_in_the_configuration(tmp_path: Any) -> None:
    off = ObjectiveConfig(**tiny.options(max_steps=1, self_test=False))
    for kind, config in ((Untested, None), (ObjectiveGRPOTrainer, off)):
        trained = trainer(built("rwkv"), kind, args=config, objective="grpo")
        assert trained.self_test is False
    with pytest.raises(CapabilityError, match="self_test is given in 2 places"):
        trainer(built("llama"), Untested, args=off, objective="grpo")
    with pytest.raises(CapabilityError, match="self_test is 'no'; expected True or False"):
        trainer(built("llama"), args=ObjectiveConfig(**tiny.options(self_test="no")), objective="grpo")
    file = tmp_path / "grpo.yaml"
    file.write_text("self_test: false\nobjective: grpo\nuse_cpu: true\nbf16: false\n")
    (parsed,) = TrlParser((ObjectiveConfig,)).parse_args_and_config(
        ["--config", str(file), "--output_dir", str(tmp_path)]
    )
    assert parsed.self_test is False


def test_it_runs_once_and_changes_nothing() -> None:
    """Weights after two steps on sampled completions, to the last bit."""
    found = []
    for tested in (True, False):
        model = architecture("llama", eos_token_id=1, attention_dropout=0.2)
        model.warnings_issued = {}
        options = tiny.options(max_steps=2, self_test=tested, disable_dropout=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that dropout is on
            trained = trainer(model, args=ObjectiveConfig(**options), objective="grpo")
        trained.train()
        assert trained._tested is tested and trained.model.training
        found.append(tiny.parameters(trained))
    assert torch.equal(*found)
