"""The critic: what it sees, how it is aligned, and that it comes back from disk as it went."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from rlobjectives import CapabilityError
from rlobjectives.integrations.transformers import CausalLMWithValue, ValueHead


def tiny(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).to(dtype)


def test_the_head_starts_small_and_stays_in_float32():
    torch.manual_seed(0)
    head = ValueHead(4096)
    assert head.summary.bias.item() == 0.0
    assert head.summary.weight.std().item() == pytest.approx(0.02, rel=0.05)
    critic = CausalLMWithValue(tiny(torch.bfloat16))
    values = critic(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long))
    assert values.dtype is torch.float32
    assert critic.value_head.summary.weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_that_was_cast_still_computes_in_float32(dtype):
    """Values of a few hundredths beside 3: half precision would round every one of them to the same."""
    torch.manual_seed(0)
    head = ValueHead(256)
    torch.nn.init.constant_(head.summary.bias, 3.0)
    hidden = torch.randn(64, 256).to(dtype)
    head.to(dtype)
    weight, bias = head.summary.weight.detach().double(), head.summary.bias.detach().double()
    with torch.autocast("cpu", torch.bfloat16):
        values = head(hidden)
    assert values.dtype is torch.float32
    expected = (hidden.double() @ weight.T + bias).squeeze(-1)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=2e-6)
    values.sum().backward()
    assert head.summary.weight.grad.dtype is dtype
    assert head.summary.bias.grad.item() == 64.0
    assert list(head.state_dict()) == ["summary.weight", "summary.bias"]
    assert head.double()(hidden).dtype is torch.float64


def test_a_value_reads_only_what_is_before_its_token():
    critic = CausalLMWithValue(tiny())
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    exists = torch.ones(1, 5, dtype=torch.long)
    values = critic(ids, exists)
    for place in range(5):
        changed = ids.clone()
        changed[0, place] = 20
        same = (critic(changed, exists) == values)[0]
        assert same[: place + 1].all(), "a value may not look at its own token or a later one"
        assert not same[place + 1 :].any(), "a value reads every token before its own"


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("right", [0, 2])
def test_padding_changes_nothing(left, right):
    critic = CausalLMWithValue(tiny())
    ids = torch.tensor([[4, 5, 6, 7]])
    plain = critic(ids, torch.ones(1, 4, dtype=torch.long))
    padded = critic(
        torch.nn.functional.pad(ids, (left, right), value=9),
        torch.nn.functional.pad(torch.ones(1, 4, dtype=torch.long), (left, right)),
    )
    torch.testing.assert_close(padded[:, left : left + 4], plain, rtol=1e-5, atol=1e-6)
    assert not padded[:, :left].any()
    assert not padded[:, left + 4 :].any()
    assert plain[0, 0] == 0.0


def test_a_shared_backbone_is_the_policy_itself():
    policy = tiny()
    critic = CausalLMWithValue(policy)
    critic(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long)).sum().backward()
    assert policy.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_the_head_is_as_wide_as_what_the_output_layer_reads():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=32, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
                       max_position_embeddings=16, word_embed_proj_dim=8)  # fmt: skip
    critic = CausalLMWithValue(OPTForCausalLM(config))
    assert critic(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long)).shape == (1, 3)
    assert critic.value_head.summary.in_features == 8


def test_it_comes_back_from_disk_as_it_went(tmp_path):
    critic = CausalLMWithValue(tiny())
    critic.save_pretrained(tmp_path / "critic")
    again = CausalLMWithValue.from_pretrained(tmp_path / "critic")
    ids, exists = torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.long)
    assert torch.equal(again(ids, exists), critic(ids, exists))
    assert {name for name, _ in again.named_parameters()} == {name for name, _ in critic.named_parameters()}
    torch.nn.init.zeros_(critic.value_head.summary.weight)
    critic.save_pretrained(tmp_path / "critic")  # an older critic is replaced
    assert not CausalLMWithValue.from_pretrained(tmp_path / "critic")(ids, exists).any()
    assert [path.name for path in tmp_path.iterdir()] == ["critic"], "nothing temporary stays behind"


def test_a_failed_save_leaves_the_old_critic(tmp_path, monkeypatch):
    critic = CausalLMWithValue(tiny())
    critic.save_pretrained(tmp_path / "critic")
    before = {path.name: path.read_bytes() for path in (tmp_path / "critic").iterdir()}

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(critic.backbone, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        critic.save_pretrained(tmp_path / "critic")
    assert {path.name: path.read_bytes() for path in (tmp_path / "critic").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["critic"]


def test_other_folders_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CapabilityError, match="holds no critic"):
        CausalLMWithValue(tiny()).save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match=r"has no value_head\.safetensors"):
        CausalLMWithValue.from_pretrained(tmp_path)
