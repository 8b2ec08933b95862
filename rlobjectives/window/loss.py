"""The loss of one micro-batch: what every part says of it, with all gradients in closed form."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlobjectives.checks import check_choice, nonfinite_count
from rlobjectives.columns import COLUMNS
from rlobjectives.component import WindowContext
from rlobjectives.masking import count, select
from rlobjectives.metrics.advantages import advantage_metrics
from rlobjectives.statistics import Mean, Stat, Sum, fold
from rlobjectives.terms.kl import reference_metrics
from rlobjectives.token_parts import TokenLoss, reading
from rlobjectives.tokens import TokenBatch
from rlobjectives.window.gradients import with_gradients
from rlobjectives.window.micro_batches import check_read, column_faults, readable
from rlobjectives.window.parts import OpenWindow
from rlobjectives.window.summary import ObjectiveOutput

__all__ = ["window_loss"]

_LOSS_NAMES = {"policy_loss": "policy"}


def window_loss(window: OpenWindow, tokens: TokenBatch) -> ObjectiveOutput:
    """See `Window.loss`.

    The micro-batch is worked on in blocks of whole sequences: what comes and goes on the way stays in the cache, and
    nothing but the gradient is as large as the micro-batch. Parts cannot tell that from a finer cut; one that can
    (``depends_on_cut``) gets its micro-batch whole.

    Args:
        window: What the blocks' weights and parts must know.
        tokens: The micro-batch, its layout as this rank may count it.
    """
    check_read(tokens.extra, window.objective.reads(), window.objective.name)
    layout, frozen = tokens.layout, tokens.detach()
    everything = [(slice(0, layout.num_sequences), slice(0, layout.shape[0]))]
    # Context-parallel ranks exchange sums on the way, and one may hold more tokens than another.
    together = window.communicator.context_group is not None or window.objective.capabilities.depends_on_cut
    blocks = everything if together else list(layout.blocks()) or everything
    gradients = _Gradients(tokens)
    metrics: dict[str, list[Stat]] = {}
    faults: dict[str, list[tuple[Tensor, Tensor]]] = {}
    contexts: dict[str, WindowContext] = {}
    for sequences, places in blocks:
        part = frozen if len(blocks) == 1 else frozen.block(sequences, places)
        block = _Block(window, part, contexts)
        for name, gradient in block.gradients().items():
            gradients.put(name, places, gradient)
        for label, stat in (block.metrics | block.losses).items():
            metrics.setdefault(label, []).append(stat)
        for name, found in block.faults().items():
            faults.setdefault(name, []).append(found)
    merged = {name: fold(type(stats[0]), stats) for name, stats in metrics.items()}
    total = sum((merged[name].row for name in block.losses), torch.zeros(()))
    merged["loss/total"] = Sum(total)
    return ObjectiveOutput(
        loss=gradients.attach(total[0].to(tokens.logprobs.dtype)),
        metrics=merged,
        tokens=count(layout.mask),
        faults={name: _added(found) for name, found in faults.items()},
    )


class _Block:
    """Some sequences of a micro-batch: their weights, losses, slopes and metrics. No gradient anywhere.

    Args:
        window: The window.
        tokens: Columns of the block.
        contexts: What each part may know, by scope; filled when first asked for.

    Attributes:
        weights: Of each token, in the log-probabilities' precision; anything under a false mask.
        value: Weighted loss of each token, all terms together; anything under a false mask.
        slopes: Unweighted slope in each differentiable column.
        metrics: What the parts report.
        losses: The share of each term, by the metric it becomes; a part's own metric may look like one.
    """

    def __init__(self, window: OpenWindow, tokens: TokenBatch, contexts: dict[str, WindowContext]) -> None:
        self.window, self.contexts = window, contexts
        self.metrics: dict[str, Stat] = {}
        self.losses: dict[str, Stat] = {}
        self.tokens = window.shaped(tokens, self.metrics)
        objective, layout = window.objective, tokens.layout
        self.weights = window.raw_weights(layout, self.context("reduction"), tokens.logprobs.dtype)
        self.value: Tensor | None = None
        self.slopes: dict[str, Tensor] = {}
        own = (one.column for one in objective.reads().values())
        known = (one.name for one in (*COLUMNS.values(), *own) if one.gradient and one.name != "logprobs")
        self.differentiable = tuple(dict.fromkeys(known))
        self._gradients: dict[str, Tensor] | None = None
        for scope, part in objective.token_terms().items():
            with reading(part, self.tokens):
                found = part.value_and_slope(self.tokens, self.context(scope))
            layout.check(f"{type(part).__name__} value", found.value)
            layout.check(f"{type(part).__name__} slope", found.slope)
            for column, slope in found.slopes.items():
                check_choice(f"A key of {type(part).__name__} slopes", column, self.differentiable)
                layout.check(f"{type(part).__name__} slopes[{column!r}]", slope)
            self.metrics.update(found.metrics)
            if scope == "policy_loss":
                found = self.corrected(found)
            self.add(_LOSS_NAMES.get(scope, scope), found.value, {"logprobs": found.slope, **found.slopes})
        for scope, measured in objective.token_metrics().items():
            with reading(measured, self.tokens):
                self.metrics.update(measured.measure(self.tokens, self.context(scope)))
        if objective.entropy_coef:
            entropy = self.tokens.need("entropy", "The entropy bonus")
            slope = torch.full_like(entropy, -objective.entropy_coef)
            self.add("entropy", slope * entropy, {"entropy": slope})
        if objective.reports_reference:
            self.metrics.update(reference_metrics(self.tokens))
        if self.tokens.entropy is not None:
            self.metrics["policy/entropy"] = Mean.of(self.tokens.entropy, layout.mask)
        if self.tokens.advantages is not None:
            read = self.tokens.advantages.to(self.weights.dtype)
            self.metrics.update(advantage_metrics(read, layout))

    def context(self, scope: str) -> WindowContext:
        """What the part in a scope may know."""
        if scope not in self.contexts:
            self.contexts[scope] = self.window.context(scope)
        return self.contexts[scope]

    def add(self, name: str, value: Tensor, slopes: Mapping[str, Tensor]) -> None:
        """One more term of the loss."""
        weighted = value * self.weights
        self.losses[f"loss/{name}"] = Sum.of(weighted, self.tokens.layout.mask)
        self.value = weighted if self.value is None else self.value + weighted
        for column, slope in slopes.items():
            self.slopes[column] = self.slopes[column] + slope if column in self.slopes else slope

    def corrected(self, found: TokenLoss) -> TokenLoss:
        """The policy loss as the corrections leave it."""
        # Corrections multiply, and drop by selection: a dropped token's loss may be anything.
        objective, tokens = self.window.objective, self.tokens
        factor, keep = None, tokens.layout.mask
        for scope, part in objective.corrections().items():
            with reading(part, tokens):
                one = part.token_weights(tokens, self.context(scope))
            factor = one.weight if factor is None else factor * one.weight
            keep = keep & one.keep
            self.metrics.update(one.metrics)
        if any(part.shrinks_denominator for part in objective.token_parts().values()):
            smaller = self.window.kept_layout(tokens)
            before = self.window.raw_weights(tokens.layout, self.context("reduction"))
            after = self.window.raw_weights(smaller, self.context("kept"))
            share = after / torch.where(before > 0, before, 1.0)
            factor = share if factor is None else factor * share
        if factor is None:
            return found
        factor = factor.to(found.value.dtype)

        def scaled(column: Tensor) -> Tensor:
            return select(column * factor, keep)

        slopes = {name: scaled(other) for name, other in found.slopes.items()}
        return found._replace(value=scaled(found.value), slope=scaled(found.slope), slopes=slopes)

    def gradients(self) -> dict[str, Tensor]:
        """What backward will hand to each differentiable column, in its precision; made once."""
        if self._gradients is None:
            self._gradients = {
                name: self.tokens.layout.select(slope * self.weights).to(
                    self.tokens.need(name, "The loss").dtype
                )
                for name, slope in self.slopes.items()
            }
        return self._gradients

    def faults(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Entries that may not be, and counted ones, of every column that was read and of what came out."""
        tokens, mask = self.tokens, self.tokens.layout.mask
        total = count(mask)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        objective = self.window.objective
        for name in dict.fromkeys((*objective.columns(), "advantages", *objective.own_columns)):
            column = tokens.get(name)
            if column is not None:
                where = readable(objective, tokens, name)
                found |= column_faults(name, column, where, total if where is mask else None)
        assert self.value is not None
        found["loss"] = (nonfinite_count(self.value, mask), total)
        for name, gradient in self.gradients().items():  # 0 under a false mask
            found["slope" if name == "logprobs" else f"slope in {name}"] = (nonfinite_count(gradient), total)
        return found


class _Gradients:
    """The gradients of a micro-batch's columns, put together from those of its blocks.

    Args:
        tokens: The micro-batch, with gradient.
    """

    def __init__(self, tokens: TokenBatch) -> None:
        self.tokens = tokens
        self.whole: dict[str, Tensor] = {}

    def put(self, name: str, places: slice, gradient: Tensor) -> None:
        """The gradient of one block, into its place."""
        column = self.tokens.need(name, "The loss")
        if not (column.requires_grad and torch.is_grad_enabled()):
            return
        if gradient.shape == column.shape:
            self.whole[name] = gradient
            return
        if name not in self.whole:
            self.whole[name] = torch.zeros_like(column)
        self.whole[name][places] = gradient

    def attach(self, loss: Tensor) -> Tensor:
        """The loss, with these gradients behind it."""
        if not self.whole:
            return loss
        columns = [self.tokens.need(name, "The loss") for name in self.whole]
        return with_gradients(loss, columns, list(self.whole.values()))


def _added(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    bad, total = zip(*found, strict=True)
    return sum(bad[1:], bad[0]), sum(total[1:], total[0])
