"""KL-Cov: hold back the few tokens that cost the policy the most entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from rlobjectives.capabilities import Capabilities
from rlobjectives.component import Metric, WindowContext
from rlobjectives.losses.base import PolicyLoss
from rlobjectives.masking import select
from rlobjectives.maths.divergences import kl_estimate
from rlobjectives.maths.quantile import histograms, quantile_rounds, window_cutoff, window_quantile
from rlobjectives.maths.ratio_metrics import RATIO_METRICS, ratio_metrics
from rlobjectives.maths.ratios import token_ratio
from rlobjectives.options import option
from rlobjectives.statistics import Maximum, Mean, Stat
from rlobjectives.token_parts import Round, TokenLoss
from rlobjectives.tokens import TokenBatch

__all__ = ["KLCov", "token_covariance"]


def token_covariance(
    logprobs: Tensor, advantages: Tensor, mean_logprob: Tensor, mean_advantage: Tensor
) -> Tensor:
    """Each token's share ``(ℓ − mean ℓ)·(A − mean A)`` of the covariance of log-probability and advantage.

    A large one belongs to a likely token that is made more likely still: what the policy's entropy pays for.

    Args:
        logprobs: ℓ in nats, any shape.
        advantages: A, the same shape.
        mean_logprob: Of the window, 0-d.
        mean_advantage: Of the window, 0-d.

    Returns:
        Float64, the same shape, without gradient.

    Example:
        >>> one = torch.ones(())
        >>> token_covariance(torch.tensor([-0.5, -3.5]), torch.tensor([1.0, -1.0]), -2 * one, 0 * one)
        tensor([1.5000, 1.5000], dtype=torch.float64)
    """
    return (logprobs.detach().double() - mean_logprob) * (advantages.detach().double() - mean_advantage)


@dataclass(frozen=True, kw_only=True)
class KLCov(PolicyLoss):
    """KL-Cov: an unclipped surrogate, with a divergence penalty on the tokens of largest covariance.

        cₜ = (ℓₜ − mean ℓ)·(Aₜ − mean A)        means over all counted tokens of the window
        Lₜ = −Aₜρₜ + coef·Kₜ·[cₜ among the ⌊fraction·N⌋ largest of the window]        ρₜ = exp(ℓₜ − ℓₜᵒˡᵈ)

    Which tokens are chosen is a constant: the slope is ``−Aₜρₜ + coef·K′ₜ``. At least one token is chosen;
    equal covariances are chosen together, and one that is not positive never is, so a window without
    contrast in its advantages is left alone. In the first update on a rollout ρ is 1 and K′ is 0: the
    penalty acts from the second one on.

    The choice is exact for float32 covariances and the same for any cut of the window: one exchange of means
    and three of histograms, four collectives per step (the first is the window's own), a fifth where advantages
    are only final after the first (GDPO).

    Args:
        fraction: Share of tokens that are penalised, in (0, 1]. The paper takes 2e-3 for 7 B and 2e-4 for
            32 B parameters.
        coef: Weight of the penalty, ≥ 0.
        divergence: K. ``"abs"``: ``|log ρ|``, as in the released code. ``"k3"``: ``ρ − 1 − log ρ``, which
            estimates the formula's ``KL(π_old ‖ π)`` without bias. ``"k2"``: ``(log ρ)²/2``.

    Raises:
        CapabilityError: If an option is out of range.

    Source:
        arXiv:2505.22617, Eq. 11 and 13 and its released code. That code and verl choose in each micro-batch
        by itself, one token in each at least, whatever its covariance. The paper's other rule, Clip-Cov, draws
        the tokens it detaches at random; which ones would depend on the cut of the window, since a token has
        no number of its own that any cut preserves, so it is not offered.

    Example:
        >>> KLCov(fraction=2e-4).required().needs_prepass
        True
    """

    capabilities: ClassVar[Capabilities] = Capabilities(requires_sampled_distribution=True)
    metrics: ClassVar[Mapping[str, Metric]] = {
        **RATIO_METRICS,
        "kl_cov/threshold": Metric(Maximum, "nats·advantage", "covariance from which tokens are penalised"),
        "kl_cov/covariance": Metric(Mean, "nats·advantage", "covariance of log-probability and advantage"),
        "kl_cov/penalized_fraction": Metric(Mean, "fraction", "tokens that are penalised"),
        "kl_cov/penalty": Metric(Mean, "loss/token", "the penalty, over all tokens"),
    }
    prepass_reads_advantages: ClassVar[bool] = True
    examples = ({"fraction": 0.3},)

    fraction: float = option(2e-3, low=0, high=1, open_low=True)
    coef: float = option(1.0, low=0)
    divergence: Literal["abs", "k2", "k3"] = "abs"

    def rounds(self) -> tuple[Round, ...]:
        """Two means, then histograms of the covariances that can still be the threshold."""
        means = Round(dict.fromkeys(_MEANS, Mean), self._means)
        return (means, *quantile_rounds(self._covariance, self.fraction, largest=True))

    def value_and_slope(self, tokens: TokenBatch, context: WindowContext) -> TokenLoss:
        """Loss, slope and metrics of each token."""
        ratio, layout = token_ratio(tokens), tokens.layout
        advantages = layout.select(tokens.need("advantages", "KLCov")).to(ratio.value.dtype)
        covariance = self._covariance(tokens, context)
        rounds = histograms(context)
        threshold = window_quantile(rounds, self.fraction, largest=True)
        cutoff = window_cutoff(rounds, self.fraction, largest=True)
        chosen = layout.mask & (covariance.float() >= cutoff) & (covariance > 0)
        # K is the divergence of the old policy from this one, so its argument is ℓᵒˡᵈ − ℓ.
        divergence, pull = kl_estimate(-ratio.log, self.divergence)
        penalty = select(self.coef * divergence, chosen)
        loss = -advantages * ratio.value
        metrics: dict[str, Stat] = {
            **ratio_metrics(ratio, layout.mask),
            "kl_cov/threshold": Maximum.of(threshold.expand(layout.shape), layout.mask),
            "kl_cov/covariance": Mean.of(covariance, layout.mask),
            "kl_cov/penalized_fraction": Mean.of(chosen, layout.mask),
            "kl_cov/penalty": Mean.of(penalty, layout.mask),
        }
        slope = select(loss, ratio.inside) - select(self.coef * pull, chosen)
        return TokenLoss(loss + penalty, slope, metrics)

    def _means(self, tokens: TokenBatch, context: WindowContext) -> dict[str, Stat]:
        del context
        columns = (tokens.logprobs, tokens.need("advantages", self))
        return {
            name: Mean.of(column, tokens.layout.mask) for name, column in zip(_MEANS, columns, strict=True)
        }

    def _covariance(self, tokens: TokenBatch, context: WindowContext) -> Tensor:
        select = tokens.layout.select
        means = [context.get(name, Mean).value for name in _MEANS]
        advantages = tokens.need("advantages", "KLCov")
        return select(token_covariance(select(tokens.logprobs), select(advantages), *means))


_MEANS = ("logprob", "advantage")
