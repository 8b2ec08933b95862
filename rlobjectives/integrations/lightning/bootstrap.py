"""The value of what would have come next, for sequences that were cut off."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlobjectives.integrations.lightning.experience import TOKEN_COLUMNS, Experience
from rlobjectives.layouts import PaddedLayout

__all__ = ["bootstrap_values", "with_next_place"]


def _next_place(attention_mask: Tensor) -> Tensor:
    """Position behind the last real token of each row, ``[n, 1]``; 0 without any."""
    places = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return pad(places * (attention_mask > 0), (1, 0)).amax(1, keepdim=True)


def with_next_place(experience: Experience, truncated: Tensor) -> Experience:
    """The experience with one more position, at which truncated sequences go on.

    What stands there stands for a token nobody drew: it counts nowhere, and the value *before* it is that of the state
    after the last token. Under causal attention nothing before it changes. A model must have one position more than the
    longest sequence.

    Args:
        experience: Sequences ``[n, t]``; columns in ``extra`` stay as they are, ``[n, t]`` ones too.
        truncated: Bool ``[n]``, True where a sequence was cut off.

    Returns:
        Sequences ``[n, t + 1]``, without rollouts.
    """
    columns = {
        name: pad(column, (0, 1))
        for name in TOKEN_COLUMNS
        if (column := getattr(experience, name)) is not None
    }
    attention, going_on = columns["attention_mask"], truncated.unsqueeze(1).to(experience.device)
    here = _next_place(experience.attention_mask)
    columns["attention_mask"] = attention.scatter(1, here, going_on.to(attention.dtype))
    layout = PaddedLayout(pad(experience.layout.mask, (0, 1)), **experience.layout.facts)
    return experience.replace(layout=layout, rollouts=None, **columns)


def bootstrap_values(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Value of the state after each row's last token.

    Args:
        values: ``[n, t + 1]``, of what `with_next_place` gave.
        attention_mask: ``[n, t]``, of the sequences as they are.

    Returns:
        ``[n]``, without meaning where a sequence was not truncated.

    Example:
        >>> bootstrap_values(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1, 1]]))
        tensor([2.])
    """
    return values.gather(1, _next_place(attention_mask)).squeeze(1)
