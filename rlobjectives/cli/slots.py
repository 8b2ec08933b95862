"""Places of a configuration: a model and data at its root, and below them whatever they take."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlobjectives import slots
from rlobjectives.errors import UnknownAlgorithmError
from rlobjectives.registry import resolve

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Slot"]


@dataclass(frozen=True)
class Slot(slots.Slot):
    """A place of a configuration.

    Attributes:
        kinds: Classes that may stand there; none if that is not known.
        root: Whether it is the configuration itself.

    Example:
        >>> from rlobjectives import Objective
        >>> Slot((Objective,), root=False).below("policy_loss").no_class("TokenMean")
        'TokenMean is a LossReduction; expected a PolicyLoss'
    """

    root: bool = True

    @classmethod
    def of(cls, *hints: Any) -> Self:
        """The place of an annotation."""
        return dataclasses.replace(super().of(*hints), root=False)

    def below(self, key: str) -> Self:
        """The place that a key leads to, several names joined by dots."""
        if not self.root:
            return super().below(key)
        first, _, rest = key.partition(".")
        kinds = dict(zip(("model", "data"), self.families()[1:], strict=True))
        slot = type(self)((kinds[first],) if first in kinds else (), root=False)
        return slot.below(rest) if rest else slot

    def filled(self, path: str) -> Slot:
        """The place with a class in it, which says what its keys are."""
        try:
            found = resolve(path)
        except UnknownAlgorithmError:
            return Slot(root=False)
        return Slot((found,) if isinstance(found, type) else (), root=False)

    @staticmethod
    def families() -> tuple[type, ...]:
        """The bases of parts, models and data."""
        from lightning.pytorch import LightningDataModule, LightningModule

        return (*slots.Slot.families(), LightningModule, LightningDataModule)
