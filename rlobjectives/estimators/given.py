"""Advantages that a host has computed itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlobjectives.errors import MissingColumnError
from rlobjectives.estimators.base import Estimator
from rlobjectives.rollouts import Rollouts

__all__ = ["GivenAdvantages"]


@dataclass(frozen=True, kw_only=True)
class GivenAdvantages(Estimator):
    """Advantages as they are: for hosts that compute them elsewhere and want losses, reductions and corrections.

    In a loop of your own the window takes them in place of an estimate, and no rollouts are needed. Where a host asks for
    an estimate, they are read from ``Rollouts.extra["advantages"]``.

    Args:
        token_level: Whether there is one per token; otherwise one per sequence.

    Raises:
        MissingColumnError: In `estimate`, without that column.

    Example:
        >>> import torch
        >>> from rlobjectives import Objective, PaddedLayout
        >>> layout = PaddedLayout(torch.tensor([[True, True], [True, False]]))
        >>> advantages = torch.tensor([[1.0, 0.5], [-1.0, 0.0]])
        >>> builder = Objective(estimator=GivenAdvantages()).window()
        >>> with builder.guard():
        ...     builder.add(estimate=advantages, layout=layout)
        >>> builder.freeze().advantages(advantages, layout)
        tensor([[ 1.0000,  0.5000],
                [-1.0000,  0.0000]])
    """

    reads = ("advantages",)

    token_level: bool = True  # type: ignore[misc]  # an option here, a constant of every other estimator

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """The advantages of the rollouts.

        Raises:
            MissingColumnError: If they are not there.
        """
        if "advantages" not in rollouts.extra:
            raise MissingColumnError(
                'GivenAdvantages reads Rollouts.extra["advantages"], and these rollouts carry none. Give them there; or hand '
                "them to the window yourself: builder.add(estimate=advantages, layout=layout)."
            )
        return rollouts.extra["advantages"]
