"""Hidden states in other memory layouts, and ids that no vocabulary holds."""

from __future__ import annotations

import torch

from rlobjectives.logprobs import hidden_logprobs, sequence_logprobs


def test_transposed_hidden_states_have_the_same_gradient() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(3, 2, 8), torch.randn(7, 8)  # [s, b, h], as Megatron keeps them
    ids = torch.randint(7, (2, 3))
    gradients = []
    for made in (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1).contiguous()):
        leaf = states.clone().requires_grad_()
        hidden_logprobs(made(leaf), weight, ids)[0].sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_an_id_outside_the_vocabulary_is_no_number() -> None:
    states, weight = torch.randn(1, 4, 8), torch.randn(7, 8)
    found = hidden_logprobs(states, weight, torch.tensor([[-100, 7, 5000, 3]]))[0]
    assert found.isnan().tolist() == [[True, True, True, False]]
    mask = torch.tensor([[False, False, False, True]])
    assert hidden_logprobs(states, weight, torch.tensor([[-100, 7, 5000, 3]]), mask=mask)[0].isfinite().all()


def test_position_0_cannot_count() -> None:
    logits, ids = torch.zeros(2, 3, 4), torch.tensor([[2, 0, 1], [2, 0, 1]])
    mask = torch.tensor([[True, True, True], [False, True, True]])
    found = sequence_logprobs(logits, ids, mask=mask)[0]
    assert found.isnan().tolist() == [[True, False, False], [False, False, False]]
