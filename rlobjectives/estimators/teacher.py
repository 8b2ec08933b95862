"""On-policy distillation as an advantage: how much better the teacher likes each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlobjectives.estimators.normalized import Normalized
from rlobjectives.rollouts import Rollouts

__all__ = ["TeacherSignal"]


@dataclass(frozen=True, kw_only=True)
class TeacherSignal(Normalized):
    """The teacher's log-probability minus the student's, token by token.

        Aₜ = −c·(ℓₜ − ℓₜᵀ)

    Its policy gradient is that of the reverse divergence to the teacher, on the student's own samples; no
    reward is read. Add it to an outcome reward with `Combined`.

    Args:
        coef: c.
        normalize: ``"none"``, or ``"window"`` to whiten over the window's tokens.
        ddof: 1 sample, 0 population variance of that whitening.
        epsilon: Its stability constant.
        epsilon_mode: ``"add"``, ``"variance"`` or ``"floor"``.

    Raises:
        CapabilityError: If an option is out of range.
        MissingColumnError: Without old or teacher log-probabilities.

    Source:
        The k1 form of on-policy distillation, as in Relax, NeMo and tinker. Other estimates of the
        divergence are not the policy gradient of anything.

    Example:
        >>> import torch
        >>> from rlobjectives import PaddedLayout
        >>> rollouts = Rollouts(
        ...     rewards=torch.zeros(1), group_ids=torch.tensor([0]),
        ...     layout=PaddedLayout(torch.tensor([[True]])),
        ...     old_logprobs=torch.tensor([[-0.8]]), teacher_logprobs=torch.tensor([[-0.9]]),
        ... )
        >>> TeacherSignal(coef=0.5).estimate(rollouts)
        tensor([[-0.0500]])
    """

    reads = ("old_logprobs", "teacher_logprobs")
    token_level: ClassVar[bool] = True

    coef: float = 1.0

    def estimate(self, rollouts: Rollouts) -> Tensor:
        """Advantages, shaped like the mask. Scope: token."""
        old, teacher = (rollouts.need(name, "TeacherSignal") for name in ("old_logprobs", "teacher_logprobs"))
        return rollouts.tokens("TeacherSignal").select(-self.coef * (old - teacher))
