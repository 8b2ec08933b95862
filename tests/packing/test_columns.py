"""Columns come back from packing as they went in, and a real model does not notice."""

import pytest
import torch

from rlobjectives import GRPO, FixedBudget, Objective, PaddedLayout, SequenceMean, TokenBatch, TokenMean
from rlobjectives.errors import CapabilityError, ShapeError
from rlobjectives.packing import Packing, schedule

LEFT_AND_RIGHT = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("rows", [None, (3, 0), (1,), ()])
@pytest.mark.parametrize("trailing", [(), (3,)])
def test_unpack_inverts_pack(rows, trailing):
    torch.manual_seed(0)
    column = torch.randn(4, 5, *trailing)
    packing = Packing(LEFT_AND_RIGHT, rows)
    back = packing.unpack(packing.pack(column), fill=float("nan"))
    for row in range(4):
        there = (
            LEFT_AND_RIGHT[row].bool() if rows is None or row in rows else torch.zeros(5, dtype=torch.bool)
        )
        assert torch.equal(back[row][there], column[row][there])
        assert back[row][~there].isnan().all()


def test_positions_restart_and_boundaries_follow_the_order_given():
    packing = Packing(LEFT_AND_RIGHT, (3, 2, 0))
    assert packing.cu_seqlens.tolist() == [0, 5, 5, 8]
    assert packing.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert packing.position_ids.dtype is torch.int64
    flat = packing.layout(PaddedLayout(LEFT_AND_RIGHT.bool()))
    for boundaries in (packing.cu_seqlens, flat.cu_seqlens, flat.rows(torch.tensor([2, 0])).cu_seqlens):
        assert boundaries.dtype is torch.int32  # what variable-length attention takes


def test_facts_travel_with_the_rows_that_are_packed():
    padded = PaddedLayout(LEFT_AND_RIGHT.bool(), total_tokens=torch.tensor([3.0, 2.0, 0.0, 5.0]))
    flat = Packing(LEFT_AND_RIGHT, (3, 0)).layout(padded)
    assert flat.token_counts().tolist() == [5.0, 3.0]
    assert flat.local_counts().tolist() == [5.0, 3.0]


def test_a_gradient_returns_to_its_own_token():
    column = torch.arange(20.0).view(4, 5).requires_grad_()
    packing = Packing(LEFT_AND_RIGHT, (1, 3))
    (packing.pack(column) * torch.arange(1.0, 8.0)).sum().backward()
    assert column.grad.tolist() == [[0] * 5, [1, 2, 0, 0, 0], [0] * 5, [3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([True, False, False, True]), r"rows has dtype torch.bool; expected integers"),
        (torch.tensor([0.0, 1.0]), r"rows has dtype torch.float32; expected integers"),
        ((1, 1), r"rows is \[1, 1\]; expected different positions from 0 to 3"),
        ((4,), r"rows is \[4\]; expected different positions from 0 to 3"),
        ((-1,), r"rows is \[-1\]; expected different positions from 0 to 3"),
        (torch.zeros(1, 1, dtype=torch.int64), "in one dimension"),
    ],
    ids=str,
)
def test_rows_are_different_positions(rows, message):
    with pytest.raises(ShapeError, match=message):
        Packing(LEFT_AND_RIGHT, rows)


def test_bad_masks_are_refused():
    with pytest.raises(ShapeError, match="attention_mask is list"):
        Packing([[1, 1]])
    with pytest.raises(ShapeError, match="padding between tokens in 1 rows"):
        Packing(torch.tensor([[1, 0, 1]]))
    with pytest.raises(ShapeError, match=r"expected \[b, t\]"):
        Packing(torch.tensor([1, 1]))
    with pytest.raises(ShapeError, match="counts tokens where attention_mask has padding"):
        Packing(torch.tensor([[1, 1, 0]])).layout(PaddedLayout(torch.tensor([[False, True, True]])))
    with pytest.raises(ShapeError, match="expected 2 tokens first"):
        Packing(torch.tensor([[1, 1, 0]])).unpack(torch.zeros(3))
    with pytest.raises(ShapeError, match="as attention_mask"):
        Packing(torch.tensor([[1, 1, 0]])).pack(torch.zeros(1, 4))


def tiny_llama(attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("capacity", [16, 10], ids=["one pack", "two packs"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("reduction", [TokenMean(), SequenceMean(), FixedBudget(max_tokens=7)])
def test_packed_micro_batches_give_the_loss_and_gradient_of_the_padded_one(attention, reduction, capacity):
    from rlobjectives.integrations.transformers.packed import check_packing, packed_logits

    model = tiny_llama(attention)
    check_packing(model)
    torch.manual_seed(2)
    exists = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    ids = torch.randint(32, (3, 7))
    loss_mask = exists.bool() & (torch.arange(7) > 1)
    loss_mask[2, 4] = False  # a tool's output
    old = torch.randn(3, 7, dtype=torch.float64) * 0.1 - 3.4
    estimate = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    objective = Objective(estimator=GRPO(), reduction=reduction)

    def shifted(logits, targets):
        # The log-probability of each token given what is before it; a sequence's first has none.
        logprobs = logits.log_softmax(-1)[..., :-1, :].gather(-1, targets[..., 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(logprobs, (1, 0))

    layout = PaddedLayout(loss_mask)
    window = objective.freeze([(estimate, layout)])
    logits = model(input_ids=ids, attention_mask=exists, use_cache=False).logits
    padded = window.loss(
        TokenBatch(
            logprobs=shifted(logits, ids),
            old_logprobs=old,
            advantages=window.advantages(estimate, layout),
            layout=layout,
        )
    ).loss
    padded.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    plan = schedule(exists.sum(1), capacity=capacity)
    packings = [Packing(exists, rows) for rows in plan.packs[0][0]]
    assert len(packings) == (1 if capacity == 16 else 2)
    flat = [packing.layout(layout) for packing in packings]
    window = objective.freeze([(estimate[packing.rows], one) for packing, one in zip(packings, flat)])
    packed = torch.zeros((), dtype=torch.float64)
    for packing, one in zip(packings, flat):
        part = window.loss(
            TokenBatch(
                logprobs=shifted(packed_logits(model, ids, packing), packing.pack(ids)),
                old_logprobs=packing.pack(old),
                advantages=window.advantages(estimate[packing.rows], one),
                layout=one,
            )
        ).loss
        part.backward()
        packed += part.detach()
    # Eager attention takes its softmax in float32 whatever the weights are.
    rounding = 1e-7 if attention == "eager" else 1e-12
    torch.testing.assert_close(packed, padded.detach(), rtol=rounding, atol=rounding)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=rounding, atol=rounding)


def test_a_model_that_leaks_is_refused():
    from rlobjectives.integrations.transformers.packed import check_packing

    model = tiny_llama("sdpa")
    inner = model.forward

    def ignoring_positions(**inputs):
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).unsqueeze(0)
        return inner(**inputs)

    model.forward = ignoring_positions
    with pytest.raises(CapabilityError, match="lets packed sequences see each other"):
        check_packing(model)


@pytest.mark.parametrize("share", [0.3, 1e-4])
def test_a_leak_far_below_the_size_of_logits_is_refused(share):
    from rlobjectives.integrations.transformers.packed import check_packing

    model = tiny_llama("sdpa").float()
    embedding = model.get_input_embeddings()

    def mixed(module, inputs, output):  # a convolution over two tokens that knows of no boundary
        return output + share * torch.nn.functional.pad(output[:, :-1], (0, 0, 1, 0))

    check_packing(model)
    embedding.register_forward_hook(mixed)
    with pytest.raises(CapabilityError, match="lets packed sequences see each other"):
        check_packing(model)


@pytest.mark.parametrize("name", ["Mamba", "GPT2"])
def test_real_architectures_are_judged_by_what_they_do(name):
    from rlobjectives.integrations.transformers.packed import check_packing

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tiny = {"vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 16}
    if name == "GPT2":
        config = transformers.GPT2Config(**tiny, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
        check_packing(transformers.GPT2LMHeadModel(config))
        return
    # Its state runs on from one sequence into the next, whatever the position ids say.
    with pytest.raises(CapabilityError, match="MambaForCausalLM lets packed sequences see each other"):
        check_packing(transformers.MambaForCausalLM(transformers.MambaConfig(**tiny, state_size=4)))
