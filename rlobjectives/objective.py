"""The objective: estimator, policy loss and reduction, with what rides along."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor

from rlobjectives.building import build
from rlobjectives.capabilities import Capabilities, TrainerFacts
from rlobjectives.checks import shown
from rlobjectives.columns import COLUMNS, Read, merged, read
from rlobjectives.component import Component, Metric
from rlobjectives.corrections import OPSM, EntropyMask, ImportanceCorrection
from rlobjectives.corrections.base import PolicyCorrection
from rlobjectives.descriptions import described
from rlobjectives.distributed.communicator import Communicator
from rlobjectives.errors import CapabilityError, WindowError
from rlobjectives.estimators import Estimator, FunctionEstimator
from rlobjectives.fit import check as check_fit
from rlobjectives.fit import conflicts_of, lacking, reads_of, two_normalisations
from rlobjectives.layouts import TokenLayout
from rlobjectives.losses import ClippedSurrogate, PolicyLoss
from rlobjectives.metrics.advantages import ADVANTAGE_METRICS
from rlobjectives.options import check_fields, option
from rlobjectives.reductions import LossReduction, TokenMean
from rlobjectives.slots import slots_of
from rlobjectives.statistics import Mean, Stat, Sum
from rlobjectives.terms import AdvantageShaping, ClippedValueLoss, Distillation, KLPenalty
from rlobjectives.terms.kl import REFERENCE_METRICS
from rlobjectives.token_parts import TokenMetric, TokenPart, TokenTerm
from rlobjectives.window import Window, WindowBuilder

__all__ = ["OBJECTIVE_METRICS", "Objective"]

OBJECTIVE_METRICS = {
    "loss/total": Metric(Sum, "loss", "the window's loss, everything included"),
    "loss/policy": Metric(Sum, "loss", "share of the policy loss"),
    "loss/entropy": Metric(Sum, "loss", "share of the entropy bonus (negative)"),
    "policy/entropy": Metric(Mean, "nats/token", "entropy of the policy"),
    **ADVANTAGE_METRICS,
}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What to train for: three parts, and optional ones.

        loss = Σₜ wₜ · (policy lossₜ + KL penaltyₜ − c_H · entropyₜ)        over the window

    Each part is given as an instance, a class, ``"Name"``, ``"package.module:Class"``,
    ``{"class_path": …, "init_args": {…}}``, or the options of the field's usual class (``kl={"coef": 0.1}``): the same in
    Python, in YAML and in TRL's ``objective_args``.

    Args:
        estimator: Rewards to advantages; a plain function ``(Rollouts) -> advantages`` will do.
        policy_loss: Log-probabilities to one number per token; by default `ClippedSurrogate`.
        reduction: Weight of each token in the window; by default `TokenMean`.
        kl: Penalty on the divergence from a reference policy.
        correction: Weights of the policy loss for the mismatch between sampler and trainer.
        off_policy_mask: Leaves whole sequences that the policy has drifted from out of the policy loss.
        entropy_mask: Leaves the tokens of low entropy out of the policy loss.
        distillation: What a teacher adds, to the advantages or to the loss.
        value_loss: Trains a critic in the same window.
        terms: Losses of your own, each added to every token and reported as ``loss/class_name``.
        metrics: What else to report of the tokens, each a `TokenMetric` of your own.
        entropy_coef: Weight c_H ≥ 0 of the entropy bonus.
        name: What messages call this objective; the algorithm's name, or the estimator's.

    Raises:
        CapabilityError: If a part is not of its kind, or two parts contradict each other.

    Example:
        >>> from rlobjectives import GDPO, FixedBudget
        >>> objective = Objective(estimator=GDPO(weights=(1.0, 0.5)), reduction=FixedBudget(max_tokens=512))
        >>> objective.capabilities.min_group_size
        2
    """

    # Where a slot names two classes, the first takes options that name none, and the last says what may stand there.
    estimator: Estimator
    # None, and not the default part itself: configuration parsers hand the options of a default instance on to another
    # class that is named instead, and GSPO would be clipped at ClippedSurrogate's 0.2.
    policy_loss: PolicyLoss = None  # type: ignore[assignment]
    reduction: LossReduction = None  # type: ignore[assignment]
    kl: KLPenalty | TokenTerm | None = None
    correction: ImportanceCorrection | PolicyCorrection | None = None
    off_policy_mask: OPSM | PolicyCorrection | None = None
    entropy_mask: EntropyMask | PolicyCorrection | None = None
    distillation: Distillation | AdvantageShaping | TokenTerm | None = None
    value_loss: ClippedValueLoss | TokenTerm | None = None
    terms: tuple[TokenTerm, ...] = ()
    metrics: tuple[TokenMetric, ...] = ()
    entropy_coef: float = option(0.0, low=0)
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, usual in (("policy_loss", ClippedSurrogate), ("reduction", TokenMean)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual())
        for name, slot in slots_of(Objective).items():
            object.__setattr__(self, name, slot.make(getattr(self, name), name, self.name))
        if not self.name:
            named = (
                self.estimator.function
                if isinstance(self.estimator, FunctionEstimator)
                else type(self.estimator)
            )
            object.__setattr__(self, "name", getattr(named, "__name__", type(named).__name__))
        parts = self.parts()
        self.reads()  # raises for what is no column
        self.estimator_reads()
        found = [
            sentence for part in parts.values() for sentence in conflicts_of(part, parts, TrainerFacts())
        ]
        if found:
            raise CapabilityError(
                "\n  - ".join([f"{self.name} has parts that contradict each other:", *found])
            )

    @classmethod
    def named(cls, name: str = "", /, **overrides: object) -> Objective:
        """A registered algorithm, or ``"package.module:Class"`` of an estimator or an objective factory.

        Args:
            name: ``"gdpo"``, ``"dr_grpo"`` …; `rlobjectives algorithms` lists them.
            overrides: By field, as for an objective; options without a class are those of the part that the algorithm has.

        Raises:
            UnknownAlgorithmError: If the name is neither.
            CapabilityError: If an option does not exist or a required one is missing.

        Example:
            >>> Objective.named("gdpo", estimator={"weights": (1.0, 0.5)}).estimator.weights
            (1.0, 0.5)
        """
        if not name:
            name = str(overrides.pop("name", ""))
        built = build(name, overrides)
        return built if isinstance(built, cls) else cls(**built)

    @property
    def description(self) -> str:
        """Parts and plain options in words: the same in every process that holds the same objective.

        Example:
            >>> Objective.named("reinforce").description.split("; ")[1]
            "policy_loss=Reinforce(weight='none', weight_cap=None, base='old')"
        """
        return "; ".join(f"{name}={words}" for name, words in self.descriptions().items())

    def descriptions(self) -> dict[str, str]:
        """Each part with its options in words, by field; `described` says what counts."""
        found = {name: described(part) for name, part in self.parts().items()}
        return found | ({"entropy_coef": repr(self.entropy_coef)} if self.entropy_coef else {})

    def parts(self) -> dict[str, Component]:
        """The parts that are there, by field; each of `terms` by its class, as ``length_penalty``."""
        return dict(self._parts)

    @cached_property
    def _parts(self) -> dict[str, Component]:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        parts = {name: part for name, part in found.items() if isinstance(part, Component)}
        for term in (*self.terms, *self.metrics):
            snake = re.sub(
                r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(term).__name__
            ).lower()
            name, count = snake, 1
            while name in {*found, *parts, "policy", "entropy", "total"}:
                name, count = f"{snake}_{count + 1}", count + 1
            parts[name] = term
        return parts

    def token_terms(self) -> dict[str, TokenTerm]:
        """The parts that add a loss to every token, by field."""
        return {name: part for name, part in self._parts.items() if isinstance(part, TokenTerm)}

    def token_metrics(self) -> dict[str, TokenMetric]:
        """The parts that report something and change nothing, by name."""
        return {name: part for name, part in self._parts.items() if isinstance(part, TokenMetric)}

    def token_parts(self) -> dict[str, TokenPart]:
        """The parts that read tokens, by field."""
        return {name: part for name, part in self._parts.items() if isinstance(part, TokenPart)}

    def corrections(self) -> dict[str, PolicyCorrection]:
        """The parts that weight or drop tokens of the policy loss, by field."""
        return {name: part for name, part in self._parts.items() if isinstance(part, PolicyCorrection)}

    def shapings(self) -> tuple[AdvantageShaping, ...]:
        """The parts that change advantages token by token."""
        return tuple(part for part in self._parts.values() if isinstance(part, AdvantageShaping))

    def reads(self) -> Mapping[str, Read]:
        """What the losses read of tokens and the reduction of sequences, by column.

        Log-probabilities and advantages, which every loss may read, are not listed.
        """
        return self._reads

    @cached_property
    def _reads(self) -> Mapping[str, Read]:
        found = [one for part in self._parts.values() if part is not self.estimator for one in reads_of(part)]
        if self.entropy_coef:
            found.append(read("entropy"))
        if "ref_logprobs" in self.estimator_reads():
            found.append(read("ref_logprobs", required=False))
        return merged(found)

    def estimator_reads(self) -> Mapping[str, Read]:
        """What the estimator reads of rollouts, by column."""
        return merged(reads_of(self.estimator))

    @cached_property
    def capabilities(self) -> Capabilities:
        """Needs, prohibitions and support of all parts together."""
        found = Capabilities()
        for part in self._parts.values():
            found = found.merge(part.required())
        return found

    def __getstate__(self) -> dict[str, object]:
        # Cached properties are not pickled: the reader may run another version of the parts.
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def reports_reference(self) -> bool:
        """Whether some part reads the reference's log-probabilities and none reports the divergence from it."""
        return "ref_logprobs" in self.capabilities.reads and self.kl is None

    @cached_property
    def own_columns(self) -> tuple[str, ...]:
        """The columns of tokens that are a user's own."""
        return tuple(name for name in self._reads if name not in COLUMNS)

    def columns(self) -> tuple[str, ...]:
        """The columns that the losses read, besides advantages."""
        return (
            "logprobs",
            "old_logprobs",
            *(name for name, one in self.reads().items() if one.column.per == "token"),
        )

    def declared_metrics(self) -> dict[str, Metric]:
        """Every metric this objective may report, by name."""
        declared = dict(OBJECTIVE_METRICS)
        for name, part in self.parts().items():
            declared.update(part.declared_metrics())
            if isinstance(part, TokenTerm) and name != "policy_loss":
                declared[f"loss/{name}"] = Metric(Sum, "loss", f"share of {type(part).__name__}")
        if self.reports_reference:
            declared.update(REFERENCE_METRICS)
        if not self.entropy_coef:
            del declared["loss/entropy"]
        return declared

    def metric_kinds(self) -> dict[str, type[Stat]]:
        """The statistic behind each metric: the same on every rank, with or without data."""
        return {name: metric.kind for name, metric in self.declared_metrics().items()}

    def check(self, facts: TrainerFacts) -> None:
        """Compare with what the trainer offers; call it once at set-up.

        Raises:
            CapabilityError: Listing every mismatch at once.
        """
        if not isinstance(facts, TrainerFacts):
            raise CapabilityError(
                f"facts is {type(facts).__name__}; expected TrainerFacts(num_generations=..., …)."
            )
        check_fit(self.name, self.capabilities, facts, self.mismatches(facts))

    def mismatches(self, facts: TrainerFacts) -> list[str]:
        """Columns that the trainer lacks, and what else the parts have against it, one sentence each."""
        needed = {
            name: one.column
            for reads in (self.reads(), self.estimator_reads())
            for name, one in reads.items()
            if one.required and facts.gives(name) is False
        }
        own = [lacking(column) for column in needed.values() if column.follows not in needed]
        parts = self.parts()
        own += [sentence for part in parts.values() for sentence in conflicts_of(part, parts, facts)]
        needs, columns = self.capabilities, self.estimator.columns
        if facts.normalize_advantages and columns > 1 and not needs.forbids_normalize_advantages:
            own.append(two_normalisations(self.estimator))
        return own

    def window(self, communicator: Communicator | None = None) -> WindowBuilder:
        """Open a window: one optimizer step.

        Args:
            communicator: The ranks it spreads over; by default all of the run. `LOCAL` keeps it on this rank.
        """
        communicator = Communicator.world() if communicator is None else communicator
        if not isinstance(communicator, Communicator):
            raise WindowError(
                f"communicator is {shown(communicator)}; expected a Communicator, or None for all ranks."
            )
        return WindowBuilder(self, communicator)

    def freeze(
        self,
        micro_batches: Iterable[tuple[Tensor, TokenLayout]],
        communicator: Communicator | None = None,
    ) -> Window:
        """`window`, `add` for each pair of estimate and layout, and `freeze`, in one call.

        For objectives without a pre-pass.
        """
        builder = self.window(communicator)
        with builder.guard():
            for estimate, layout in micro_batches:
                builder.add(estimate=estimate, layout=layout)
        return builder.freeze()
