"""Named algorithms: one literal dictionary of strings, resolved when used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlobjectives._moved import moved_names
from rlobjectives.checks import shown, suggestion
from rlobjectives.errors import RLObjectivesError, UnknownAlgorithmError

__all__ = ["ALGORITHMS", "AlgorithmSpec", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """A named combination of parts, all by name.

    Attributes:
        summary: What it is, in a few words.
        parts: Class name of each part, by `Objective` field.
        options: Options of each part where they differ from the class's defaults, by field.
        settings: Plain `Objective` fields.
        source: Where it comes from.
    """

    summary: str
    parts: Mapping[str, str]
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    source: str


ALGORITHMS: dict[str, AlgorithmSpec] = {
    "cispo": AlgorithmSpec(
        summary="bounded importance weight on the plain gradient, so that no token loses its own",
        parts={"estimator": "GRPO", "policy_loss": "CISPO", "reduction": "TokenMean"},
        source="arXiv:2506.13585",
    ),
    "dapo": AlgorithmSpec(
        summary="group-relative advantage, higher upper clip, every token counts the same",
        parts={"estimator": "GRPO", "policy_loss": "ClippedSurrogate", "reduction": "TokenMean"},
        options={"policy_loss": {"clip_low": 0.2, "clip_high": 0.28}},
        source="arXiv:2503.14476",
    ),
    "dapo_entropy": AlgorithmSpec(
        summary="DAPO on the 20 % of tokens with the highest entropy",
        parts={
            "estimator": "GRPO",
            "policy_loss": "ClippedSurrogate",
            "reduction": "TokenMean",
            "entropy_mask": "EntropyMask",
        },
        options={"policy_loss": {"clip_low": 0.2, "clip_high": 0.28}},
        source="arXiv:2506.01939",
    ),
    "decoupled_ppo": AlgorithmSpec(
        summary="clip around the policy that starts the updates, weight from the one that sampled",
        parts={"estimator": "GRPO", "policy_loss": "DecoupledClip", "reduction": "TokenMean"},
        options={"policy_loss": {"behavior_cap": 5.0}},
        source="arXiv:2110.00641, arXiv:2505.24298",
    ),
    "dppo": AlgorithmSpec(
        summary="trust region on token probabilities (total variation) instead of their ratio",
        parts={"estimator": "GRPO", "policy_loss": "DPPO", "reduction": "TokenMean"},
        options={"policy_loss": {"base": "behavior"}},
        source="arXiv:2602.04879",
    ),
    "dppo_kl": AlgorithmSpec(
        summary="trust region on token probabilities (binary KL) instead of their ratio",
        parts={"estimator": "GRPO", "policy_loss": "DPPO", "reduction": "TokenMean"},
        options={"policy_loss": {"divergence": "kl", "base": "behavior"}},
        source="arXiv:2602.04879",
    ),
    "dr_grpo": AlgorithmSpec(
        summary="centred rewards without a std, constant token budget (give reduction.max_tokens)",
        parts={"estimator": "GRPO", "policy_loss": "ClippedSurrogate", "reduction": "FixedBudget"},
        options={"estimator": {"scale": "none"}},
        source="arXiv:2503.20783",
    ),
    "dro": AlgorithmSpec(
        summary="centred reward, policy gradient with a quadratic leash on the log-ratio",
        parts={"estimator": "GRPO", "policy_loss": "DRO", "reduction": "SequenceMean"},
        options={"estimator": {"scale": "none"}},
        source="arXiv:2405.19107, arXiv:2501.12599",
    ),
    "gdpo": AlgorithmSpec(
        summary="each reward standardised by itself, weighted sum, whitened over the step",
        parts={"estimator": "GDPO", "policy_loss": "ClippedSurrogate", "reduction": "TokenMean"},
        source="arXiv:2601.05242",
    ),
    "gmpo": AlgorithmSpec(
        summary="geometric mean of token ratios, each clipped in log space",
        parts={"estimator": "GRPO", "policy_loss": "GMPO", "reduction": "SequenceMean"},
        source="arXiv:2507.20673",
    ),
    "gpg": AlgorithmSpec(
        summary="centred reward, scaled up by the share of the step that carries a signal, plain policy gradient",
        parts={"estimator": "GPG", "policy_loss": "Reinforce", "reduction": "TokenMean"},
        source="arXiv:2504.02546",
    ),
    "grpo": AlgorithmSpec(
        summary="reward standardised in its prompt group, every sequence counts the same",
        parts={"estimator": "GRPO", "policy_loss": "ClippedSurrogate", "reduction": "SequenceMean"},
        source="arXiv:2402.03300",
    ),
    "gspo": AlgorithmSpec(
        summary="one clipped ratio per sequence, every sequence counts the same",
        parts={"estimator": "GRPO", "policy_loss": "GSPO", "reduction": "SequenceMean"},
        source="arXiv:2507.18071",
    ),
    "gspo_token": AlgorithmSpec(
        summary="the sequence's clipped ratio with a gradient of its own for each token",
        parts={"estimator": "GRPO", "policy_loss": "GSPOToken", "reduction": "SequenceMean"},
        source="arXiv:2507.18071, Eq. 14-15",
    ),
    "kl_cov": AlgorithmSpec(
        summary="unclipped ratio, a divergence penalty on the few tokens that cost the most entropy",
        parts={"estimator": "GRPO", "policy_loss": "KLCov", "reduction": "TokenMean"},
        source="arXiv:2505.22617",
    ),
    "luspo": AlgorithmSpec(
        summary="one clipped ratio per sequence, weighted by the sequence's length",
        parts={"estimator": "GRPO", "policy_loss": "GSPO", "reduction": "SequenceSum"},
        options={"policy_loss": {"clip_low": 2e-3, "clip_high": 2.5e-3}},
        source="arXiv:2602.05261",
    ),
    "m2po": AlgorithmSpec(
        summary="clip bounds from a budget on the second moment of log-ratios, for stale data",
        parts={"estimator": "GRPO", "policy_loss": "M2PO", "reduction": "TokenMean"},
        source="arXiv:2510.01161",
    ),
    "max_rl": AlgorithmSpec(
        summary="centred reward over the group's mean, rewards must not be negative",
        parts={"estimator": "MaxRL", "policy_loss": "ClippedSurrogate", "reduction": "TokenMean"},
        source="SkyRL",
    ),
    "opo": AlgorithmSpec(
        summary="length-weighted group baseline, plain policy gradient",
        parts={"estimator": "OPO", "policy_loss": "Reinforce", "reduction": "SequenceSum"},
        source="arXiv:2505.23585",
    ),
    "optimal_token_baseline": AlgorithmSpec(
        summary="one baseline per token, weighted by the uncertainty of each path",
        parts={
            "estimator": "OptimalTokenBaseline",
            "policy_loss": "ClippedSurrogate",
            "reduction": "TokenMean",
        },
        source="verl 0.9",
    ),
    "p3o": AlgorithmSpec(
        summary="policy gradient capped by the effective sample size, a behaviour divergence for the rest",
        parts={"estimator": "GRPO", "policy_loss": "P3O", "reduction": "TokenMean"},
        source="arXiv:2605.12380",
    ),
    "pass_at_k": AlgorithmSpec(
        summary="advantage of the best of k answers, analytic",
        parts={"estimator": "PassAtK", "policy_loss": "ClippedSurrogate", "reduction": "TokenMean"},
        source="arXiv:2508.10751",
    ),
    "pass_at_k_lead": AlgorithmSpec(
        summary="only the best answer of a group is rewarded, by its lead over the second",
        parts={"estimator": "PassAtK", "policy_loss": "ClippedSurrogate", "reduction": "TokenMean"},
        options={"estimator": {"form": "max_minus_second", "epsilon": 1e-6}},
        source="arXiv:2503.19595",
    ),
    "ppo": AlgorithmSpec(
        summary="generalised advantages of a critic over action tokens, whitened over the step",
        parts={
            "estimator": "GAE",
            "policy_loss": "ClippedSurrogate",
            "reduction": "TokenMean",
            "value_loss": "ClippedValueLoss",
        },
        options={"estimator": {"normalize": "window"}},
        source="arXiv:1707.06347, arXiv:1506.02438",
    ),
    "reinforce": AlgorithmSpec(
        summary="group-centred reward, plain policy gradient",
        parts={"estimator": "GRPO", "policy_loss": "Reinforce", "reduction": "SequenceSum"},
        options={"estimator": {"scale": "none"}},
        source="Williams 1992",
    ),
    "reinforce_batch": AlgorithmSpec(
        summary="reward minus the mean reward of the step, plain policy gradient",
        parts={"estimator": "BatchBaseline", "policy_loss": "Reinforce", "reduction": "SequenceSum"},
        source="Williams 1992",
    ),
    "reinforce_pp": AlgorithmSpec(
        summary="KL-shaped return whitened over the step's tokens, no critic and no group",
        parts={"estimator": "ReinforcePlusPlus", "policy_loss": "ClippedSurrogate", "reduction": "TokenMean"},
        options={"estimator": {"kl_coef": 0.01}},
        source="arXiv:2501.03262",
    ),
    "reinforce_pp_baseline": AlgorithmSpec(
        summary="group-centred reward whitened over the step's tokens, k2 penalty in the loss",
        parts={
            "estimator": "ReinforcePlusPlusBaseline",
            "policy_loss": "ClippedSurrogate",
            "reduction": "TokenMean",
            "kl": "KLPenalty",
        },
        options={"kl": {"coef": 0.01, "estimator": "k2"}},
        source="arXiv:2501.03262",
    ),
    "remax": AlgorithmSpec(
        summary="reward to go minus the reward of the greedy answer, plain policy gradient",
        parts={"estimator": "ReMax", "policy_loss": "Reinforce", "reduction": "SequenceSum"},
        source="arXiv:2310.10505",
    ),
    "rloo": AlgorithmSpec(
        summary="leave-one-out baseline, plain policy gradient",
        parts={"estimator": "RLOO", "policy_loss": "Reinforce", "reduction": "TokenMean"},
        source="arXiv:2402.14740",
    ),
    "sapo": AlgorithmSpec(
        summary="sigmoid gate on the ratio instead of a clip",
        parts={"estimator": "GRPO", "policy_loss": "SAPO", "reduction": "SequenceMean"},
        source="arXiv:2511.20347",
    ),
    "vapo": AlgorithmSpec(
        summary="length-adaptive trace decay for the policy, 1 for the critic, higher upper clip",
        parts={
            "estimator": "GAE",
            "policy_loss": "ClippedSurrogate",
            "reduction": "TokenMean",
            "value_loss": "ClippedValueLoss",
        },
        options={
            "estimator": {"adaptive_alpha": 0.05, "value_trace_decay": 1.0, "normalize": "window"},
            "policy_loss": {"clip_low": 0.2, "clip_high": 0.28},
        },
        source="arXiv:2504.05118",
    ),
    "vespo": AlgorithmSpec(
        summary="smooth weight of the sequence's likelihood ratio on the plain gradient",
        parts={"estimator": "GRPO", "policy_loss": "VESPO", "reduction": "TokenMean"},
        source="arXiv:2602.10693",
    ),
    "vtrace": AlgorithmSpec(
        summary="off-policy corrected values and advantages of a critic",
        parts={
            "estimator": "VTrace",
            "policy_loss": "ClippedSurrogate",
            "reduction": "TokenMean",
            "value_loss": "ClippedValueLoss",
        },
        source="arXiv:1802.01561",
    ),
}


def resolve(path: str, role: str = "", error: type[RLObjectivesError] = UnknownAlgorithmError) -> Any:
    """A public name of `rlobjectives`, ``"package.module:Name"``, or the same with a dot.

    Args:
        path: The name.
        role: What it is for, as messages call it.
        error: What is raised.

    Raises:
        UnknownAlgorithmError: If nothing is there; or another error, as told.

    Example:
        >>> resolve("GDPO").__name__, resolve("rlobjectives.estimators:GDPO").__name__, resolve("math.sqrt")(4.0)
        ('GDPO', 'GDPO', 2.0)
    """
    said = f"{role} {shown(path)}".lstrip()
    home, _, name = path.rpartition(":" if ":" in path else ".")
    home = home or "rlobjectives"
    try:
        module = importlib.import_module(home)
    except (ImportError, TypeError, ValueError) as cause:
        absent = getattr(cause, "name", None)
        if isinstance(cause, ImportError) and not (absent and f"{home}.".startswith(f"{absent}.")):
            raise  # the module is there, and something that it imports is not
        raise error(
            f"{said} cannot be resolved: there is no module {absent or home!r}. Check the spelling, and that its folder "
            "is installed or on PYTHONPATH."
        ) from cause
    if not hasattr(module, name):
        public = [one for one in vars(module) if not one.startswith("_")]
        raise error(
            f"{said} cannot be resolved: module {home!r} has no {name!r}.{suggestion(name, public)} Give a public name of "
            "rlobjectives, or 'package.module:Name'."
        )
    return getattr(module, name)


__getattr__ = moved_names(__name__)
