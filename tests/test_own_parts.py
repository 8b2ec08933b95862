"""A user's own part in every field of an objective, spelled alike in Python, in YAML and in TRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml

from rlobjectives import (
    GRPO,
    CapabilityError,
    ClippedSurrogate,
    Combined,
    FixedBudget,
    FunctionEstimator,
    GivenAdvantages,
    ImportanceCorrection,
    KLPenalty,
    MissingColumnError,
    Objective,
    PaddedLayout,
    Rejection,
    Rollouts,
    TokenBatch,
    UnknownAlgorithmError,
)
from tests import own_parts
from tests.own_parts import SLOTS, OwnCorrection, OwnMetric, OwnShaping, OwnTerm

MODULE = "tests.own_parts"


def written(kind: type) -> dict[str, Any]:
    """Each spelling that a file may have, and whether it says the option."""
    name = kind.__name__
    return {
        "name": name,
        "colon": f"{MODULE}:{name}",
        "dots": f"{MODULE}.{name}",
        "mapping": {"class_path": f"{MODULE}:{name}", "init_args": {"scale": 2.0}},
        "dotted mapping": {"class_path": f"{MODULE}.{name}", "init_args": {"scale": 2.0}},
    }


SPELLINGS = [*written(OwnTerm)]


def expected(kind: Any, spelling: str) -> Any:
    return kind(scale=2.0) if "mapping" in spelling else kind()


def in_slot(role: str, value: Any) -> Any:
    return [value] if role in ("terms", "metrics") else value


def held(objective: Objective, role: str) -> Any:
    found = getattr(objective, role)
    return found[0] if role in ("terms", "metrics") else found


def in_yaml(path: Any, objective: Any, **more: Any) -> Objective:
    pytest.importorskip("lightning")
    from tests.cli.test_named import POLICY, parsed

    arguments = {"objective": objective, **more}
    path.write_text(yaml.safe_dump({"model": {"class_path": POLICY, "init_args": arguments}}))
    found: Objective = parsed("--config", str(path))
    return found


def in_trl(path: Any, name: str, arguments: Any) -> Objective:
    pytest.importorskip("trl")
    from trl import TrlParser

    from rlobjectives.integrations.trl import ObjectiveConfig
    from rlobjectives.integrations.trl.objective_source import as_objective, one_of

    usual = {"output_dir": str(path.parent), "use_cpu": True, "bf16": False, "report_to": "none"}
    path.write_text(yaml.safe_dump({**usual, "objective": name, "objective_args": arguments}))
    (config,) = TrlParser((ObjectiveConfig,)).parse_args_and_config(["--config", str(path)])
    return as_objective(one_of(None, None, config), config)


class TestEveryField:
    @pytest.mark.parametrize("role", list(SLOTS))
    def test_python(self, role: str) -> None:
        kind: Any = SLOTS[role]
        for value in (kind(), kind):
            given = {"estimator": GRPO(), role: in_slot(role, value)}
            assert held(Objective(**given), role) == kind()
            assert held(Objective.named("grpo", **{role: in_slot(role, value)}), role) == kind()
        for spelling, value in written(kind).items():
            given = {"estimator": GRPO(), role: in_slot(role, value)}
            assert held(Objective(**given), role) == expected(kind, spelling)
            built = Objective.named("grpo", **{role: in_slot(role, value)})
            assert held(built, role) == expected(kind, spelling)

    @pytest.mark.parametrize("spelling", SPELLINGS)
    @pytest.mark.parametrize("role", list(SLOTS))
    def test_yaml(self, role: str, spelling: str, tmp_path: Any) -> None:
        kind = SLOTS[role]
        value = in_slot(role, written(kind)[spelling])
        found = in_yaml(tmp_path / "run.yaml", {"estimator": "GRPO", role: value})
        assert held(found, role) == expected(kind, spelling)
        found = in_yaml(tmp_path / "run.yaml", "dapo", objective_args={role: value})
        assert held(found, role) == expected(kind, spelling)
        assert found.policy_loss == ClippedSurrogate(clip_high=0.28) or role == "policy_loss"

    @pytest.mark.parametrize("spelling", SPELLINGS)
    @pytest.mark.parametrize("role", list(SLOTS))
    def test_trl(self, role: str, spelling: str, tmp_path: Any) -> None:
        kind = SLOTS[role]
        found = in_trl(tmp_path / "run.yaml", "dapo", {role: in_slot(role, written(kind)[spelling])})
        assert held(found, role) == expected(kind, spelling)


class TestAlike:
    """Options, lists and parts inside parts mean the same wherever they are written."""

    @pytest.mark.parametrize(
        ("arguments", "role", "part"),
        [
            ({"policy_loss": {"clip_low": 0.1}}, "policy_loss", ClippedSurrogate(clip_low=0.1, clip_high=0.28)),
            ({"kl": {"coef": 0.1}}, "kl", KLPenalty(coef=0.1)),
            ({"kl": "KLPenalty"}, "kl", KLPenalty()),
            (
                {"correction": {"reject": [{"over": "sum", "high": 2.0}]}},
                "correction",
                ImportanceCorrection(reject=(Rejection(over="sum", high=2.0),)),
            ),
            (
                {"estimator": {"class_path": "Combined", "init_args": {"estimators": ["GRPO", f"{MODULE}:OwnEstimator"], "weights": [1.0, 2.0]}}},
                "estimator",
                Combined(estimators=(GRPO(), own_parts.OwnEstimator()), weights=(1.0, 2.0)),
            ),
            (
                {"estimator": {"class_path": "FunctionEstimator", "init_args": {"function": f"{MODULE}.centred"}}},
                "estimator",
                FunctionEstimator(function=own_parts.centred),
            ),
            (
                {"terms": [f"{MODULE}:OwnTerm", {"class_path": "KLPenalty", "init_args": {"coef": 0.5}}]},
                "terms",
                (OwnTerm(), KLPenalty(coef=0.5)),
            ),
        ],
    )  # fmt: skip
    def test_a_file_means_what_python_means(
        self, arguments: Any, role: str, part: Any, tmp_path: Any
    ) -> None:
        assert getattr(Objective.named("dapo", **arguments), role) == part
        if True:
            assert getattr(in_yaml(tmp_path / "run.yaml", "dapo", objective_args=arguments), role) == part
        assert getattr(in_trl(tmp_path / "trl.yaml", "dapo", arguments), role) == part

    def test_the_whole_objective_by_the_path_of_an_estimator(self, tmp_path: Any) -> None:
        name, arguments = f"{MODULE}:OwnEstimator", {"estimator": {"scale": 2.0}, "entropy_coef": 0.1}
        told = Objective.named(name, **arguments)
        assert (told.estimator, told.entropy_coef) == (own_parts.OwnEstimator(scale=2.0), 0.1)
        assert in_yaml(tmp_path / "run.yaml", name, objective_args=arguments) == told
        assert in_trl(tmp_path / "trl.yaml", name, arguments) == told

    def test_on_the_command_line(self) -> None:
        pytest.importorskip("lightning")
        from tests.cli.test_named import POLICY, parsed

        option = "--model.init_args.objective"
        found = parsed("--model", POLICY, f"{option}=dapo", f"{option}.correction={MODULE}:OwnCorrection")
        assert found.correction == OwnCorrection()

    def test_a_function_that_makes_the_whole_objective(self, tmp_path: Any) -> None:
        name, arguments = f"{MODULE}:ready", {"budget": 5}
        told = Objective.named(name, **arguments)
        assert told.reduction == FixedBudget(max_tokens=5)
        assert in_trl(tmp_path / "trl.yaml", name, arguments) == told
        with pytest.raises(CapabilityError, match="a function, which a configuration cannot hold"):
            in_yaml(tmp_path / "run.yaml", name, objective_args=arguments)

    def test_a_mapping_of_all_fields_goes_to_trl_too(self) -> None:
        pytest.importorskip("trl")
        from rlobjectives.integrations.trl.objective_source import as_objective

        assert as_objective({"estimator": "GRPO", "kl": {"coef": 0.1}}).kl == KLPenalty(coef=0.1)
        with pytest.raises(CapabilityError, match="a mapping needs 'name'"):
            as_objective({"kl": {"coef": 0.1}})

    def test_an_instance_and_a_function_by_their_paths(self) -> None:
        assert Objective(estimator="tests.own_parts:centred").name == "centred"
        assert Objective(estimator=GRPO, kl="tests.own_parts:whole").kl == OwnTerm(scale=3.0)

    def test_a_text_with_a_colon_stays_what_it_is(self, tmp_path: Any) -> None:
        """Only what names something is a path."""
        assert in_yaml(tmp_path / "run.yaml", {"estimator": "GRPO", "name": "a:b"}).name == "a:b"


class TestRefused:
    @pytest.mark.parametrize(
        ("field", "value", "error", "message"),
        [
            ("correction", OwnTerm(), CapabilityError, "expected an instance of PolicyCorrection or None"),
            ("terms", OwnTerm(), CapabilityError, "expected a list, each an instance of TokenTerm"),
            ("terms", [OwnCorrection()], CapabilityError, r"terms\[0\] is OwnCorrection.*expected an instance of TokenTerm"),
            ("kl", f"{MODULE}:Nothing", UnknownAlgorithmError, "module 'tests.own_parts' has no 'Nothing'"),
            ("kl", "OwnTrem", UnknownAlgorithmError, "no class 'OwnTrem' is known. Did you mean OwnTerm?"),
            ("kl", "GRPO", CapabilityError, "GRPO is an Estimator; expected a TokenTerm"),
            ("kl", {"class_path": "OwnTerm", "scale": 2.0}, CapabilityError, "expected {class_path: …, init_args"),
            ("kl", {"class_path": "OwnTerm", "init_args": {"scael": 2}}, CapabilityError, "Did you mean 'scale'"),
            ("policy_loss", {"clip_low": 0.1}, CapabilityError, "has no policy_loss to take options"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit(self, field: str, value: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            Objective(**{"estimator": GRPO(), field: value})


LAYOUT = PaddedLayout(torch.tensor([[True, True, False], [True, False, False]]))


def loss(objective: Objective, advantages: Any = None) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics and the gradient in the log-probabilities of one window."""
    estimate = torch.tensor([1.0, -1.0], dtype=torch.float64) if advantages is None else advantages
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0]], dtype=torch.float64, requires_grad=True)
    window = objective.freeze([(estimate, LAYOUT)])
    output = window.loss(
        TokenBatch(logprobs=logprobs, layout=LAYOUT, advantages=window.advantages(estimate, LAYOUT))
    )
    output.loss.backward()
    assert logprobs.grad is not None
    return dict(window.summarize([output])), logprobs.grad


class TestWhatTheyDo:
    def test_terms_are_added_and_reported_by_their_class(self) -> None:
        report, gradient = loss(
            Objective(estimator=GRPO(), policy_loss="Reinforce", terms=[OwnTerm(scale=0.5), OwnTerm()])
        )
        squares = 1.0 + 4.0 + 0.25
        assert report["loss/own_term"] == pytest.approx(0.5 * squares / 3)
        assert report["loss/own_term_2"] == pytest.approx(squares / 3)
        assert report["loss/total"] == pytest.approx(report["loss/policy"] + 1.5 * squares / 3)
        slopes = [(-1.0 + 3 * -1.0) / 3, (-1.0 + 3 * -2.0) / 3, (1.0 + 3 * -0.5) / 3]
        assert gradient[LAYOUT.mask].tolist() == pytest.approx(slopes)
        assert gradient[~LAYOUT.mask].tolist() == [0.0, 0.0, 0.0]

    def test_metrics_are_reported_and_change_nothing(self) -> None:
        plain, gradient = loss(Objective(estimator=GRPO(), policy_loss="Reinforce"))
        report, same = loss(
            Objective(estimator=GRPO(), policy_loss="Reinforce", metrics=[OwnMetric(scale=2.0)])
        )
        assert report.pop("own/certainty") == pytest.approx(
            2 * (math.exp(-1) + math.exp(-2) + math.exp(-0.5)) / 3
        )
        assert report == plain
        assert torch.equal(same, gradient)

    def test_a_term_takes_no_name_that_is_taken(self) -> None:
        kinds: list[Any] = [type(name, (OwnTerm,), {}) for name in ("Policy", "KL")]
        objective = Objective(estimator=GRPO(), terms=tuple(kind() for kind in kinds))
        assert [*objective.parts()][-2:] == ["policy_2", "kl_2"]
        assert {"loss/policy_2", "loss/kl_2"} < set(objective.declared_metrics())

    def test_corrections_of_ones_own_multiply(self) -> None:
        plain, halved = (
            loss(Objective(estimator=GRPO(), policy_loss="Reinforce", **more))[1]
            for more in (
                {},
                {"correction": OwnCorrection(scale=0.5), "entropy_mask": OwnCorrection(scale=0.5)},
            )
        )
        assert halved.tolist() == (0.25 * plain).tolist()

    def test_a_shaping_of_ones_own(self) -> None:
        plain, doubled = (
            loss(Objective(estimator=GRPO(), policy_loss="Reinforce", distillation=part))[1]
            for part in (None, OwnShaping(scale=2.0))
        )
        assert doubled.tolist() == (2.0 * plain).tolist()

    def test_the_options_of_terms_are_compared_between_ranks(self) -> None:
        one, other = (
            Objective(estimator=GRPO(), terms=[OwnTerm(scale=scale)]).description for scale in (1.0, 2.0)
        )
        assert one != other


class TestGivenAdvantages:
    def test_they_are_the_advantages(self) -> None:
        advantages = torch.tensor([[0.5, -1.0, 7.0], [2.0, 7.0, 7.0]], dtype=torch.float64)
        _, gradient = loss(Objective(estimator=GivenAdvantages(), policy_loss="Reinforce"), advantages)
        assert gradient[LAYOUT.mask].tolist() == pytest.approx([-0.5 / 3, 1.0 / 3, -2.0 / 3])
        _, gradient = loss(Objective(estimator=GivenAdvantages(token_level=False), policy_loss="Reinforce"))
        assert gradient[LAYOUT.mask].tolist() == pytest.approx([-1 / 3, -1 / 3, 1 / 3])

    def test_rollouts_without_them_are_refused(self) -> None:
        rollouts = Rollouts(
            rewards=torch.zeros(2, 1), group_ids=torch.zeros(2, dtype=torch.long), layout=LAYOUT
        )
        with pytest.raises(MissingColumnError, match=r'reads Rollouts.extra\["advantages"\].*builder.add'):
            GivenAdvantages().estimate(rollouts)


EVERYTHING = {
    role: in_slot(role, f"{MODULE}:{kind.__name__}") for role, kind in SLOTS.items() if role != "value_loss"
}


class TestRuns:
    """One step of each host with a part of one's own in every field."""

    def test_trl(self) -> None:
        pytest.importorskip("trl")
        from rlobjectives.integrations.trl import ObjectiveConfig, ObjectiveGRPOTrainer
        from tests.integrations.trl import tiny

        config = ObjectiveConfig(**tiny.options(objective="grpo", objective_args=EVERYTHING, max_steps=1))
        run = tiny.trainer(ObjectiveGRPOTrainer, config)
        before = tiny.parameters(run)
        run.train()
        assert {"loss/own_term", "own/certainty"} < run.state.log_history[0].keys()
        assert not torch.equal(before, tiny.parameters(run))

    def test_a_yaml_file(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("lightning")
        from rlobjectives.cli import main
        from tests.cli.test_configuration import CONFIG

        policy: Any = CONFIG["model"]
        arguments = {"objective": "grpo", "objective_args": EVERYTHING, "out": str(tmp_path / "weights.pt")}
        model = {**policy, "init_args": {**arguments, "micro_batch_size": 2}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "model": model}))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["rlobjectives"])
        assert main(["fit", "--config", "run.yaml"]) == 0
        assert torch.load(tmp_path / "weights.pt").isfinite().all()
