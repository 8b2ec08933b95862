"""What a window sees of its objective, and a loss of its window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.columns import Read
from rlobjectives.component import WindowContext
from rlobjectives.corrections.base import PolicyCorrection
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.estimators.base import Estimator
from rlobjectives.layouts import TokenLayout
from rlobjectives.reductions.base import LossReduction
from rlobjectives.statistics import Stat
from rlobjectives.terms.distillation import AdvantageShaping
from rlobjectives.token_parts import TokenMetric, TokenPart, TokenTerm
from rlobjectives.tokens import TokenBatch

__all__ = ["OpenWindow", "WindowParts"]


class WindowParts(Protocol):
    """An `Objective`, as far as a window needs it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def estimator(self) -> Estimator: ...  # noqa: D102
    @property
    def reduction(self) -> LossReduction: ...  # noqa: D102
    @property
    def entropy_coef(self) -> float: ...  # noqa: D102
    @property
    def capabilities(self) -> Capabilities: ...  # noqa: D102
    @property
    def reports_reference(self) -> bool: ...  # noqa: D102
    @property
    def own_columns(self) -> tuple[str, ...]: ...  # noqa: D102
    def columns(self) -> tuple[str, ...]: ...  # noqa: D102
    def reads(self) -> Mapping[str, Read]: ...  # noqa: D102
    def estimator_reads(self) -> Mapping[str, Read]: ...  # noqa: D102

    def descriptions(self) -> dict[str, str]: ...  # noqa: D102
    def token_terms(self) -> Mapping[str, TokenTerm]: ...  # noqa: D102
    def token_metrics(self) -> Mapping[str, TokenMetric]: ...  # noqa: D102
    def token_parts(self) -> Mapping[str, TokenPart]: ...  # noqa: D102
    def corrections(self) -> Mapping[str, PolicyCorrection]: ...  # noqa: D102
    def shapings(self) -> tuple[AdvantageShaping, ...]: ...  # noqa: D102
    def metric_kinds(self) -> dict[str, type[Stat]]: ...  # noqa: D102


class OpenWindow(Protocol):
    """A frozen `Window`, as far as its loss needs it."""

    objective: WindowParts
    communicator: Communicator

    def context(self, scope: str, turn: int = 0) -> WindowContext: ...  # noqa: D102
    def shaped(self, tokens: TokenBatch, metrics: dict[str, Stat] | None = None) -> TokenBatch: ...  # noqa: D102
    def kept_layout(self, tokens: TokenBatch) -> TokenLayout: ...  # noqa: D102
    def raw_weights(  # noqa: D102
        self, layout: TokenLayout, context: WindowContext, dtype: torch.dtype = torch.float64
    ) -> Tensor: ...
