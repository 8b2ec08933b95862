"""The critic's loss: squared or Huber, clipped around the values the rollout was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlobjectives.columns import Read, read
from rlobjectives.component import Metric, WindowContext
from rlobjectives.errors import MissingColumnError
from rlobjectives.layouts import TokenLayout
from rlobjectives.masking import select
from rlobjectives.options import option
from rlobjectives.statistics import Mean
from rlobjectives.token_parts import TokenLoss, TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["ClippedValueLoss", "clipped_value_loss"]


def clipped_value_loss(
    *,
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None,
    layout: TokenLayout,
    clip: float | None = 0.2,
    huber_delta: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``½·max((V − R)², (clip(V, Vᵒˡᵈ ± c) − R)²)``, its derivative in V, and where the clipped branch rules.

    All arguments are keyword-only: the field orders them in three different ways, and swapping two of
    them trains without an error.

    Args:
        values: Current values V, in reward units, shaped like the mask.
        returns: Targets R: raw returns, never normalised.
        old_values: Values of the critic at the rollout; not read, and may be None, if ``clip`` is None.
        layout: Supplies the mask.
        clip: How far V may move from the old value; None does not clip.
        huber_delta: Error beyond which the loss grows linearly; None stays quadratic.

    Returns:
        Value, slope and a boolean, shaped like the mask, without gradient. At a tie the unclipped branch rules.

    Raises:
        MissingColumnError: With ``clip`` and without ``old_values``.
        ShapeError: If a column is not shaped like the mask.

    Example:
        >>> from rlobjectives import PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True]]))
        >>> clipped_value_loss(values=torch.tensor([[0.9, 0.2]]), returns=torch.tensor([[1.0, 0.0]]),
        ...                    old_values=torch.tensor([[0.5, 0.3]]), layout=layout)[0]
        tensor([[0.0450, 0.0200]])
    """
    layout.check("values", values)
    layout.check("returns", returns)
    values, returns = layout.select(values.detach()), layout.select(returns.detach())
    loss, slope = _error(values - returns, huber_delta)
    if clip is None:
        return loss, slope, torch.zeros_like(layout.mask)
    if old_values is None:
        raise MissingColumnError(
            "clipped_value_loss clips around old_values, but there are none. Give those of the rollout, or clip=None."
        )
    layout.check("old_values", old_values)
    old_values = layout.select(old_values.detach())
    near = values.clamp(old_values - clip, old_values + clip)
    held, _ = _error(near - returns, huber_delta)
    clipped = held > loss
    return torch.maximum(loss, held), select(slope, ~clipped), clipped


def _error(difference: Tensor, delta: float | None) -> tuple[Tensor, Tensor]:
    if delta is None:
        return difference.square() / 2, difference
    slope = difference.clamp(-delta, delta)
    return slope * (difference - slope / 2), slope


@dataclass(frozen=True, kw_only=True)
class ClippedValueLoss(TokenTerm):
    """Trains a critic beside the policy, in the same window and under the same reduction.

        Lₜ = coef · ½·max((Vₜ − Rₜ)², (clip(Vₜ, Vₜᵒˡᵈ ± c) − Rₜ)²)

    R is the raw return, `Estimator.value_targets`: whatever whitens the advantages never touches it. The clip
    fraction counts tokens whose clipped branch is active, that is, without gradient.

    Args:
        coef: Weight of the critic's loss beside the policy's.
        clip: How far a value may move from that of the rollout, in reward units; None does not clip.
        huber_delta: Error beyond which the loss grows linearly; None stays quadratic.

    Raises:
        CapabilityError: If an option is out of range.
        MissingColumnError: In a window, without values, returns or (unless ``clip`` is None) old values.

    Source:
        PPO, arXiv:1707.06347 (value clipping: its reference code). The factor ½ is in verl, OpenRLHF, SkyRL, AReaL and
        xtuner, not in slime: ``coef=2`` gives theirs. slime counts ``|V − Vᵒˡᵈ| > c`` as clipped.

    Example:
        >>> [one.column.name for one in ClippedValueLoss(clip=0.2).declared_reads()]
        ['values', 'returns', 'old_values']
    """

    metrics: ClassVar[Mapping[str, Metric]] = {
        "value/clip_fraction": Metric(
            Mean, "fraction", "tokens whose clipped value loss is active (no gradient)"
        ),
        "value/error": Metric(Mean, "reward²", "mean squared distance of values and returns, unclipped"),
    }

    coef: float = option(1.0, low=0)
    clip: float | None = option(0.2, low=0, open_low=True)
    huber_delta: float | None = option(None, low=0, open_low=True)

    def declared_reads(self) -> tuple[Read, ...]:
        """Values and their targets; the old values where changes of them are clipped."""
        names = ("values", "returns") if self.clip is None else ("values", "returns", "old_values")
        return tuple(map(read, names))

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """The critic's loss of each token; its slope is in ``tokens.values``, none in the log-probabilities."""
        del context
        layout = tokens.layout
        values = tokens.need("values", "ClippedValueLoss").detach()
        returns = tokens.need("returns", "ClippedValueLoss")
        loss, slope, clipped = clipped_value_loss(
            values=values,
            returns=returns.to(values.dtype),
            old_values=None if self.clip is None else tokens.need("old_values", "ClippedValueLoss(clip=...)"),
            layout=layout,
            clip=self.clip,
            huber_delta=self.huber_delta,
        )
        metrics = {
            "value/clip_fraction": Mean.of(clipped, layout.mask),
            "value/error": Mean.of((values - returns).square(), layout.mask),
        }
        return TokenLoss(
            self.coef * loss, torch.zeros_like(tokens.logprobs), metrics, {"values": self.coef * slope}
        )
