"""Old places of modules and names: they go on working, and say once where the thing is now."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MODULES", "NAMES", "install", "moved_names"]

_KEPT: Mapping[tuple[str, str], str] = {
    ("estimators", "maths"): "groups returns reward_sum sessions shaping token_rewards whitening",
    (
        "integrations.lightning",
        "causal_lm",
    ): "actor_critic behavior_policy callbacks data dotted language_models op_build optimizer policy policy_options prompt_rollouts prompt_rows prompts rewards sampling scoring self_test sharding strategy transcript validation",
    ("integrations.lightning.callbacks", "causal_lm.callbacks"): "completions curves export history progress",
    ("losses", "corrections"): "entropy_mask mismatch opsm",
    ("losses", "maths"): "quantile ratios second_moment",
    ("losses", "terms"): "adaptive distillation kl value",
}
"""Modules that have moved under their name, by old and new package; here as below without `rlobjectives` in front."""
_RENAMED: Mapping[str, str] = {
    "distributions": "statistics.distributions",
    "estimators.advantage_metrics": "metrics.advantages",
    "estimators.credit_metrics": "metrics",
    "estimators.diagnostics": "metrics.rewards",
    "integrations.lightning.resting": "integrations.lightning.freezing",
    "integrations.trl.probe": "integrations.probe",
    "integrations.trl.settle": "integrations.trl.objective_source",
    "losses.corrections": "corrections.base",
    "losses.divergence": "maths.divergences",
    "losses.importance_correction": "corrections.importance",
    "losses.weighted_sum": "window.gradients",
}
"""Modules that have another name now."""

MODULES: Mapping[str, str] = {
    **{f"{old}.{name}": f"{new}.{name}" for (old, new), names in _KEPT.items() for name in names.split()},
    **_RENAMED,
}
"""Modules that have moved, old place to new."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "capabilities": {"fit": "check"},
    "checks": {"columns": "LOGPROBS"},
    "estimators": {
        "functional": "adaptive_trace_decay grpo_estimate lambda_returns overlong_penalty vtrace_returns whiten",
        "maths": "Credit",
        "metrics": "advantage_metrics group_metrics length_metrics reward_metrics value_metrics",
    },
    "estimators.grpo": {
        "maths.group_advantages": "standardised",
        "maths.reward_sum": "weighted_columns",
    },
    "integrations.lightning": {
        "causal_lm": "CausalLMActorCritic CausalLMPolicy DeepSpeedCPUStrategy ExportModel PolicyProgressBar PolicySnapshots PromptBatch PromptDataModule RunHistory SamplingOptions SaveCompletions Transcript resolve_strategy sample_completions",
    },
    "integrations.trl.columns": {"integrations.probe": "TEACHER silent_teacher teacher_column"},
    "integrations.trl.step_window": {"integrations.probe": "reads_prompts"},
    "losses": {
        "corrections": "EntropyMask ImportanceCorrection OPSM PolicyCorrection Rejection TokenWeights",
        "functional": "clipped_surrogate importance_ratio kl_estimate sequence_ratio sequence_sums token_ratio topk_divergence vocabulary_divergence weighted_gradient weighted_sum window_quantile",
        "terms": "AdaptiveCoefficient AdvantageShaping ClippedValueLoss Distillation DivergenceDistillation KLPenalty ReverseKLDistillation SteppedCoefficient clipped_value_loss",
        "token_parts": "TokenLoss TokenPart TokenTerm",
    },
    "losses.base": {
        "token_parts": "TokenLoss TokenPart reading",
    },
    "losses.clipped": {
        "maths.ratio_metrics": "clip_metrics",
    },
    "registry": {
        "building": "build",
    },
    "terms.kl": {
        "maths.divergences": "KL_ESTIMATORS",
    },
}
"""Names that a module gives no longer: their new module, and the names, with spaces between."""

_PACKAGE = "rlobjectives."


def _say(old: str, new: str) -> None:
    warnings.warn(f"{_PACKAGE}{old} is now {_PACKAGE}{new}", DeprecationWarning, stacklevel=3)


class _Finder(MetaPathFinder, Loader):
    """Imports the module of the new place under the old one: it is the same module, so its classes are the same."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        moved = fullname.startswith(_PACKAGE) and fullname.removeprefix(_PACKAGE) in MODULES
        return ModuleSpec(fullname, self) if moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_PACKAGE + MODULES[spec.name.removeprefix(_PACKAGE)])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state  # importlib has written the old place's over it
        old = spec.name.removeprefix(_PACKAGE)
        if old.rpartition(".")[0] not in MODULES:  # else its package has said so
            _say(old, MODULES[old])


def moved_names(module: str, *, warn: bool = True) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module that some names have left, and for a package that some modules have left.

    Args:
        module: Its ``__name__``.
        warn: Whether to say where a name is now; not where the old place stays a good one.

    Raises:
        AttributeError: From what is returned, for a name that was never there.
    """
    own = module.removeprefix(_PACKAGE)
    places = {name: place for place, names in NAMES.get(own, {}).items() for name in names.split()}

    def get(name: str) -> Any:
        if name in places:
            if warn:
                _say(f"{own}.{name}", f"{places[name]}.{name}")
            value = getattr(importlib.import_module(_PACKAGE + places[name]), name)
            setattr(sys.modules[module], name, value)  # the next one is not asked for here
            return value
        if f"{own}.{name}" in MODULES:
            return importlib.import_module(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def install() -> None:
    """Let old places of modules be imported. Before other finders: a new folder must not load its files twice."""
    sys.meta_path.insert(0, _Finder())
    for old, new in MODULES.items():
        parent, _, name = old.rpartition(".")
        if any(name in names.split() for names in NAMES.get(parent, {}).values()):
            # A name of its package, too, which importing the module would overwrite.
            sys.modules[_PACKAGE + old] = importlib.import_module(_PACKAGE + new)
