"""No option of TRL is ignored in silence: kept, read, carried over, or refused by name."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import transformers
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig

from rlobjectives import (
    GDPO,
    GRPO,
    RLOO,
    CapabilityError,
    FixedBudget,
    FunctionEstimator,
    ImportanceCorrection,
    KLPenalty,
    Objective,
)
from rlobjectives.integrations.trl import (
    ObjectiveConfig,
    ObjectiveGRPOTrainer,
    ObjectiveMixin,
    ObjectiveRLOOTrainer,
)
from rlobjectives.integrations.trl.facts import updates_per_rollout, violations
from rlobjectives.integrations.trl.objective_source import as_objective, carry_over, with_reference
from rlobjectives.integrations.trl.options import INHERITED, OPTIONS, markdown
from tests.integrations.trl import tiny

PAGE = Path(__file__).resolve().parents[3] / "docs" / "coming_from_trl.md"
BASE = {one.name for one in dataclasses.fields(TrainingArguments)}


def refuse(match: str, kind: type = ObjectiveGRPOTrainer, config: type = GRPOConfig, **given: Any) -> str:
    objective = given.pop("objective", "gdpo")
    extra = {name: given.pop(name) for name in ("reward_funcs", "rollout_func") if name in given}
    with pytest.raises(CapabilityError, match=match) as caught:
        tiny.trainer(kind, config(**tiny.options(**given)), objective=objective, **extra)
    return str(caught.value)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_every_option_has_a_line(config: type) -> None:
    own = {one.name for one in dataclasses.fields(config)} - BASE
    assert not own - set(OPTIONS), "new options of TRL: say what becomes of them"


def test_the_table_names_no_option_twice_and_only_real_ones() -> None:
    assert not set(OPTIONS) & set(INHERITED)
    assert set(INHERITED) <= BASE
    known = {one.name for kind in (GRPOConfig, RLOOConfig) for one in dataclasses.fields(kind)}
    # Options that only some supported versions have.
    gone = {"use_transformers_paged", "vllm_importance_sampling_cap"}
    newer = {name for name in OPTIONS if name not in known}
    assert newer <= gone | {
        "router_aux_loss_coef", "trust_remote_code", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min",
        "entropy_coef_max", "entropy_coef_delta", "entropy_target", "log_multimodal",
        "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
        "use_transformers_continuous_batching", "transformers_continuous_batching_config",
    }  # fmt: skip


def test_the_docs_page_holds_the_table() -> None:
    assert markdown() in PAGE.read_text()


@pytest.mark.parametrize(
    ("option", "value", "replacement"),
    [
        ("loss_type", "bnpo", "Objective.named"),
        ("scale_rewards", "batch", "scale"),
        ("multi_objective_aggregation", "normalize_then_sum", "GDPO"),
        ("importance_sampling_level", "sequence", "gspo"),
        ("epsilon", 0.1, "clip_low"),
        ("epsilon_high", 0.28, "clip_high"),
        ("delta", 2.0, "ratio_cap"),
        ("sapo_temperature_pos", 2.0, "sapo"),
        ("vespo_k_pos", 1.0, "vespo"),
        ("top_entropy_quantile", 0.2, "entropy_mask"),
        ("entropy_coef", 0.01, "of the objective"),
        ("use_adaptive_entropy", True, "constant"),
        ("off_policy_mask_threshold", 0.5, "off_policy_mask=OPSM"),
        ("vllm_importance_sampling_mode", "token_mask", "correction"),
    ],
)
def test_what_the_objective_replaces_is_refused_by_name(option: str, value: object, replacement: str) -> None:
    if option not in {one.name for one in dataclasses.fields(GRPOConfig)}:
        pytest.skip("this TRL has no such option")
    message = refuse(f"{option} = ", objective="grpo", **{option: value})
    assert replacement in message


def test_everything_wrong_is_said_at_once() -> None:
    message = refuse("for 3 reasons", loss_type="grpo", epsilon=0.1, reward_funcs=[tiny.even])
    assert "GDPO separates at least 2 rewards" in message


def test_a_critic_or_a_single_update_cannot_be_had() -> None:
    refuse("one update per rollout", objective="rloo", num_iterations=2)
    refuse("one update per rollout", objective="reinforce", steps_per_generation=2)


def test_cut_sampling_needs_the_cut_distributions_logprobs() -> None:
    config = {"rollout_func": None, "top_p": 0.9}
    assert "top_p = 0.9" in refuse("sampling is cut", **config)
    assert "top_k = 5" in refuse("sampling is cut", rollout_func=None, generation_kwargs={"top_k": 5})
    refuse("repetition_penalty = 1.1", rollout_func=None, repetition_penalty=1.1)
    refuse("samples at temperature 0.5", rollout_func=None, generation_kwargs={"temperature": 0.5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.3),
        ("do_sample", False),
        ("do_sample", None),
        ("epsilon_cutoff", 1e-3),
        ("eta_cutoff", 1e-3),
        ("no_repeat_ngram_size", 2),
        ("num_beams", 2),
        ("min_new_tokens", 3),
        ("suppress_tokens", [5]),
        ("repetition_penalty", 1.2),
    ],
)
def test_other_distributions_are_refused_where_a_ratio_needs_the_one_that_sampled(
    name: str, value: object
) -> None:
    refuse(f"{name} = ", objective="gdpo", rollout_func=None, generation_kwargs={name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("suppress_tokens", [5]), ("no_repeat_ngram_size", 2), ("min_p", 0.2)]
)
def test_what_generate_takes_from_the_model_is_refused(name: str, value: object) -> None:
    """TRL leaves open what its configuration does not know, and generate asks the model's own configuration."""

    def made(objective: str = "grpo", generated: bool = True, **told: object) -> Any:
        model = tiny.model()
        setattr(model.generation_config, name, value)
        config = GRPOConfig(**tiny.options(generation_kwargs=told or None))
        return tiny.trainer(
            ObjectiveGRPOTrainer, config, objective=objective, model=model, generated=generated
        )

    if name != "min_p" or int(transformers.__version__.split(".")[0]) >= 5:
        with pytest.raises(CapabilityError, match=f"the model's own generation_config says {name} = "):
            made()
    # What TRL says goes first; a plain policy gradient has no ratio; and a sampler of one's own does not ask.
    neutral = {"suppress_tokens": [], "no_repeat_ngram_size": 0, "min_p": 0.0}
    if value != [5]:
        made(**{name: neutral[name]})
    made("reinforce")
    made(generated=False)


def test_generation_options_that_change_nothing_are_kept() -> None:
    kwargs = {"typical_p": 1.0, "num_beams": 1, "do_sample": True, "bad_words_ids": None, "top_k": 0}
    config = GRPOConfig(**tiny.options(generation_kwargs=kwargs))
    tiny.trainer(ObjectiveGRPOTrainer, config, objective="gdpo", generated=True)
    # A plain policy gradient has no ratio; a sampler of the user's own says what it sampled from.
    config = GRPOConfig(**tiny.options(generation_kwargs={"typical_p": 0.3}))
    tiny.trainer(ObjectiveGRPOTrainer, config, objective="reinforce", generated=True)
    tiny.trainer(ObjectiveGRPOTrainer, config, objective="gdpo")


def test_a_correction_needs_a_sampler() -> None:
    corrected = Objective(estimator=GRPO(), correction=ImportanceCorrection())
    said = refuse("every weight would be 1", objective=corrected, rollout_func=None)
    assert "rollout_func that returns logprobs" in said
    refuse(
        "every weight would be 1",
        ObjectiveRLOOTrainer,
        RLOOConfig,
        objective=corrected,
        rollout_func=None,
        beta=0.0,
    )


def facts(**changed: object) -> SimpleNamespace:
    usual = {
        "generation_kwargs": None,
        "temperature": 1.0,
        "repetition_penalty": 1.0,
        "use_vllm": False,
        "use_liger_kernel": False,
    }
    return SimpleNamespace(**{**usual, **changed})


def test_settings_that_need_other_software() -> None:
    objective = as_objective("gdpo")

    def said(config: SimpleNamespace, **flags: Any) -> list[str]:
        usual = {"liger_loss": False, "entropy_gradient": True}
        return list(violations(flags.pop("objective", objective), config, **{**usual, **flags}))

    assert not said(facts())
    (vllm,) = said(facts(use_vllm=True, vllm_importance_sampling_correction=True))
    assert "Objective(correction=...)" in vllm
    assert not said(facts(use_vllm=True, vllm_importance_sampling_correction=False))
    assert "use_liger_kernel" in said(facts(use_liger_kernel=True), liger_loss=True)[0]
    assert not said(facts(use_liger_kernel=True))
    per_token = Objective(estimator=FunctionEstimator(function=len, token_level=True))
    assert "dynamic_sampling = 'drop'" in said(facts(), dynamic_sampling="drop", objective=per_token)[0]
    assert not said(facts(), dynamic_sampling="drop")
    for flag, name in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence")):
        parallel = SimpleNamespace(**{f"{flag}_enabled": True})
        (sentence,) = said(facts(parallelism_config=parallel))
        assert f"{name} parallelism" in sentence and f"Set {flag}_size=1" in sentence
    # Noise makes the pass before the losses another policy than the one under them, like dropout.
    noisy = facts(neftune_noise_alpha=5.0)
    assert not said(noisy)
    assert "neftune_noise_alpha = 5.0" in said(noisy, objective=as_objective("p3o"))[0]


def test_entropy_without_gradient_is_refused() -> None:
    objective = Objective(estimator=GRPO(), entropy_coef=0.1)
    said = violations(objective, facts(), liger_loss=False, entropy_gradient=False)
    assert "entropies with gradient" in next(iter(said))


def test_beta_is_carried_over_and_may_not_contradict() -> None:
    config = SimpleNamespace(beta=0.04, use_bias_correction_kl=True)
    objective, found = carry_over(as_objective("gdpo"), config)
    assert objective.kl == KLPenalty(coef=0.04, estimator="ratio_k3")
    assert not found
    objective, _ = carry_over(as_objective("gdpo"), SimpleNamespace(beta=0.04))
    assert objective.kl == KLPenalty(coef=0.04, estimator="k3")
    own = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1, estimator="k2"))
    config = SimpleNamespace(beta=0.0)
    assert carry_over(own, config) == (own, [])
    assert with_reference(own, config).beta == 0.1  # so that TRL builds the reference model
    assert config.beta == 0.0
    assert with_reference(as_objective("gdpo"), config) is config
    assert "contradicts" in carry_over(own, SimpleNamespace(beta=0.2))[1][0]
    assert carry_over(own, SimpleNamespace(beta=0.1)) == (own, [])
    # TRL's own default contradicts nothing: RLOOConfig has 0.05.
    assert carry_over(own, SimpleNamespace(beta=0.05), usual_beta=0.05) == (own, [])


def test_a_ratio_on_the_kl_may_not_be_contradicted() -> None:
    usual = {one.name: one.default for one in dataclasses.fields(GRPOConfig)}["use_bias_correction_kl"]
    agrees = {"coef": 0.1, "estimator": "k3" if usual else "ratio_k3"}
    other = {"coef": 0.1, "estimator": "ratio_k3" if usual else "k3"}
    refuse(
        f"use_bias_correction_kl = {not usual} contradicts the objective's kl",
        objective={"name": "grpo", "kl": other},
        use_bias_correction_kl=not usual,
    )
    for kl, value in ((agrees, not usual), (other, usual), (agrees, usual)):
        config = GRPOConfig(**tiny.options(use_bias_correction_kl=value))
        tiny.trainer(ObjectiveGRPOTrainer, config, objective={"name": "grpo", "kl": kl}, model=tiny.saved())
    # Carried over with beta, it is the estimator.
    config = GRPOConfig(**tiny.options(use_bias_correction_kl=not usual, beta=0.1))
    made = tiny.trainer(ObjectiveGRPOTrainer, config, objective="grpo", model=tiny.saved())
    assert made.objective.kl == KLPenalty(**agrees)


def test_a_configuration_serves_twice() -> None:
    """What one objective needs of TRL does not reach the next trainer through their configuration."""
    config = GRPOConfig(**tiny.options())
    made = lambda objective: tiny.trainer(
        ObjectiveGRPOTrainer, config, objective=objective, model=tiny.saved()
    )
    with_kl = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1))
    watched = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.0))
    for objective, beta in ((with_kl, 0.1), (watched, 1.0)):
        for _ in range(2):
            trained = made(objective)
            assert trained.objective.kl == objective.kl
            assert trained.ref_model is not None
            assert (trained.args.beta, config.beta) == (beta, 0.0)
    plain = made("reinforce_pp")
    again = made("reinforce_pp")
    assert plain.objective.kl is None and again.objective.kl is None
    plain = made("grpo")
    assert plain.objective.kl is None and plain.ref_model is None
    assert plain.args is config


def test_a_configuration_that_stands_third() -> None:
    config = GRPOConfig(**tiny.options())
    objective = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1))
    trained = ObjectiveGRPOTrainer(
        tiny.saved(),
        [tiny.even],
        config,
        tiny.prompts(),
        processing_class=tiny.tokenizer(),
        objective=objective,
    )
    assert (trained.args.beta, config.beta) == (0.1, 0.0)


def test_a_reference_without_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = tiny.options()  # TRL's own defaults want a GPU
    monkeypatch.setattr("trl.trainer.grpo_trainer.GRPOConfig", lambda *_: GRPOConfig(**options))
    extra = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer()}
    objective = Objective(estimator=GRPO(), kl=KLPenalty(coef=0.1))
    with pytest.raises(CapabilityError, match=r"without args TRL builds none. Give args=GRPOConfig"):
        ObjectiveGRPOTrainer(tiny.model(), [tiny.even], objective=objective, **extra)
    assert ObjectiveGRPOTrainer(tiny.model(), [tiny.even], objective="grpo", **extra).args.beta == 0.0


def test_bases_in_the_wrong_order_are_refused() -> None:
    class Own(GRPOTrainer):
        pass

    for base in (GRPOTrainer, Own):
        with pytest.raises(CapabilityError, match=rf"Write class Trainer\(ObjectiveMixin, {base.__name__}\)"):

            class Trainer(base, ObjectiveMixin):  # type: ignore[valid-type, misc]
                objective = "gdpo"

    class Logging:
        pass

    class Fine(Logging, ObjectiveMixin, Own):
        objective = "gdpo"

    class Finer(Fine):
        objective = "grpo"

    assert issubclass(Finer, ObjectiveMixin)


def test_reward_weights_are_carried_over_and_may_not_contradict() -> None:
    config = SimpleNamespace(reward_weights=[1.0, 0.5])
    objective, found = carry_over(as_objective("gdpo"), config)
    assert objective.estimator == GDPO(weights=(1.0, 0.5))
    assert not found
    own = Objective(estimator=GDPO(weights=(1.0, 2.0)))
    assert "does not reach GDPO" in carry_over(own, config)[1][0]
    assert "has no weights" in carry_over(as_objective(lambda rollouts: rollouts.rewards[:, 0]), config)[1][0]


def test_weights_by_reward_name() -> None:
    named = {"name": "gdpo", "estimator": {"weights": {"short": 0.5, "even": 1.0}}}
    trained = tiny.trainer(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options()), objective=named)
    assert trained.reward_weights.tolist() == [1.0, 0.5]
    wrong = {"name": "gdpo", "estimator": {"weights": {"short": 0.5, "evn": 1.0}}}
    refuse("the rewards are", objective=wrong)


def test_the_objective_is_said_once() -> None:
    with pytest.raises(CapabilityError, match="no objective"):
        tiny.trainer(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options()))

    class Named(ObjectiveGRPOTrainer):
        objective = "grpo"

    with pytest.raises(CapabilityError, match="in 2 places"):
        tiny.trainer(Named, GRPOConfig(**tiny.options()), objective="gdpo")
    assert tiny.trainer(Named, GRPOConfig(**tiny.options())).objective.name == "grpo"


def test_dynamic_sampling_is_said_once_and_checked() -> None:
    def made(config: type = GRPOConfig, body: dict[str, Any] | None = None, **given: Any) -> Any:
        kind = type("Trainer", (ObjectiveGRPOTrainer,), {"objective": "grpo", **(body or {})})
        return tiny.trainer(kind, config(**tiny.options(**given)))

    def settled(*args: Any, **given: Any) -> tuple[str, int]:
        trained = made(*args, **given)
        return trained.dynamic_sampling, trained.max_resamples

    body = {"dynamic_sampling": "drop", "max_resamples": 5}
    assert settled() == settled(ObjectiveConfig) == ("off", 2)
    assert settled(GRPOConfig, body) == settled(ObjectiveConfig, body) == ("drop", 5)
    assert settled(ObjectiveConfig, dynamic_sampling="resample", max_resamples=1) == ("resample", 1)
    assert settled(GRPOConfig, {"dynamic_sampling": False}) == ("off", 2)
    for wrong in ("resmaple", True, 3):
        with pytest.raises(CapabilityError, match=r"dynamic_sampling is .* expected one of 'off', 'drop'"):
            made(GRPOConfig, {"dynamic_sampling": wrong})
    for several in (-1, 1.5, True):
        with pytest.raises(CapabilityError, match="max_resamples is"):
            made(GRPOConfig, {"max_resamples": several})
    with pytest.raises(CapabilityError, match=r"dynamic_sampling is given in 2 places"):
        made(ObjectiveConfig, body, dynamic_sampling="off")
    with pytest.raises(CapabilityError, match=r"max_resamples is given in 2 places"):
        made(ObjectiveConfig, body, max_resamples=2)
    per_token = Objective(estimator=FunctionEstimator(function=len, token_level=True))
    with pytest.raises(CapabilityError, match="gives one advantage per token"):
        made(GRPOConfig, {"dynamic_sampling": "drop", "objective": per_token})


def test_the_budget_of_a_named_objective_is_the_longest_completion() -> None:
    config = SimpleNamespace(max_completion_length=77)
    assert as_objective("dr_grpo", config).reduction == FixedBudget(max_tokens=77)
    own = {"name": "dr_grpo", "reduction": {"max_tokens": 9}}
    assert as_objective(own, config).reduction == FixedBudget(max_tokens=9)
    with pytest.raises(CapabilityError, match="max_tokens"):
        as_objective("dr_grpo")
    with pytest.raises(CapabilityError, match="needs 'name'"):
        as_objective({"kl": {}}, config)


def test_a_configuration_of_another_trainer_is_refused() -> None:
    refuse("args is a RLOOConfig; ObjectiveGRPOTrainer reads a GRPOConfig", config=RLOOConfig)
    said = refuse(
        "args is a ObjectiveConfig; ObjectiveRLOOTrainer reads a RLOOConfig",
        ObjectiveRLOOTrainer,
        ObjectiveConfig,
        rollout_func=None,
    )
    assert "also for rloo" in said


def rloo(objective: Any, **given: Any) -> Any:
    return tiny.trainer(
        ObjectiveRLOOTrainer,
        RLOOConfig(**tiny.options(**given)),
        objective=objective,
        model=tiny.saved(),
        rollout_func=None,
        generated=True,
    )


def test_a_default_rloo_configuration_works() -> None:
    """Its beta of 0.05 becomes the objective's divergence; the objective's own goes first; 0 is none."""
    usual = {one.name: one.default for one in dataclasses.fields(RLOOConfig)}["beta"]
    assert usual > 0.0
    with warnings.catch_warnings(record=True) as said:  # transformers has something to say, too
        warnings.simplefilter("always")
        trained = rloo("rloo", max_steps=1)
    (told,) = (str(one.message) for one in said if "beta" in str(one.message))
    assert f"beta = {usual} becomes the objective's KLPenalty" in told and "from the reward" in told
    assert trained.objective.kl == KLPenalty(coef=usual)
    trained.train()
    (logged,) = (entry for entry in trained.state.log_history if "policy/kl_to_ref" in entry)
    assert logged["policy/kl_to_ref"] == pytest.approx(
        0.0, abs=1e-9
    )  # the first step starts from the reference
    own = Objective(estimator=RLOO(), kl=KLPenalty(coef=0.1))
    assert rloo(own).objective.kl == KLPenalty(coef=0.1)
    none = rloo("rloo", beta=0.0)
    assert none.objective.kl is None and none.ref_model is None


def test_the_reference_of_rloo_is_that_of_grpo() -> None:
    """The log-probabilities that RLOOTrainer keeps to itself are those that GRPOTrainer hands out."""
    objective = Objective(estimator=RLOO(), kl=KLPenalty(coef=0.5))
    options = {"max_steps": 3, "learning_rate": 0.05}
    ours = rloo(objective, **options)
    ours.train()
    theirs = tiny.trainer(
        ObjectiveGRPOTrainer,
        GRPOConfig(**tiny.options(**options)),
        objective=objective,
        model=tiny.saved(),
        rollout_func=None,
        generated=True,
    )
    theirs.train()  # only now: making a trainer sets the seed
    logged = [
        [entry["policy/kl_to_ref"] for entry in one.state.log_history if "policy/kl_to_ref" in entry]
        for one in (ours, theirs)
    ]
    assert logged[0] == pytest.approx(logged[1], rel=1e-5, abs=1e-9)
    assert len(logged[0]) == 3 and logged[0][-1] > 1e-6
    assert float((tiny.parameters(ours) - tiny.parameters(theirs)).abs().max()) <= 1e-6


def test_what_agrees_with_the_objective_is_accepted() -> None:
    """An option whose place the objective takes may say what the objective does anyway, and nothing else."""
    length = GRPOConfig(**tiny.options()).max_completion_length
    dr_grpo = {"name": "dr_grpo"}
    agreeing: list[tuple[Any, dict[str, Any]]] = [
        (dr_grpo, {"loss_type": "dr_grpo"}),
        (dr_grpo, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
        (dr_grpo, {"scale_rewards": False}),
        ("grpo", {"loss_type": "grpo"}),
        ("dapo", {"epsilon_high": 0.28}),
        ({"name": "grpo", "policy_loss": {"clip_low": 0.1, "clip_high": 0.1}}, {"epsilon": 0.1}),
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("cispo", {"loss_type": "cispo"}),
        ("gdpo", {"multi_objective_aggregation": "normalize_then_sum"}),
    ]
    known = {one.name for one in dataclasses.fields(GRPOConfig)}
    for objective, options in agreeing:
        if set(options) <= known:
            tiny.trainer(ObjectiveGRPOTrainer, GRPOConfig(**tiny.options(**options)), objective=objective)
    refuse("loss_type = 'grpo' would have no effect", objective=dr_grpo, loss_type="grpo")
    other = {**dr_grpo, "reduction": {"max_tokens": length + 1}}
    refuse("loss_type = 'dr_grpo' would have no effect", objective=other, loss_type="dr_grpo")
    refuse("loss_type = 'bnpo' would have no effect", objective="dapo", loss_type="bnpo")
    refuse("scale_rewards = 'batch' would", objective="grpo", scale_rewards="batch")
    refuse("epsilon = 0.1 would", objective="grpo", epsilon=0.1)


def test_a_refused_cut_names_what_trl_has() -> None:
    said = refuse("sampling is cut", rollout_func=None, top_p=0.9)
    assert "behavior_logprobs" not in said
    assert "use_vllm, or a rollout_func that returns logprobs" in said


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "iterations", "expected"),
    [
        (1, 1, 1, 1),
        (4, 2, 1, 1),
        (2, 4, 1, 2),
        (3, 2, 1, 2),
        (4, 2, 2, 1),
        (2, 2, 2, 2),
        (1, 4, 2, 8),
        (5, 4, 1, 2),
    ],
)
def test_updates_per_rollout(accumulation: int, per_generation: int, iterations: int, expected: int) -> None:
    length = per_generation * iterations
    brute = max(
        len({step // accumulation for step in range(start, start + length)})
        for start in range(0, length * 60, length)
    )
    assert updates_per_rollout(accumulation, per_generation, iterations) == expected == brute


def test_a_divergence_in_rewards_and_in_the_loss_is_refused() -> None:
    told = refuse(r"beta = 0\.04", objective="reinforce_pp", beta=0.04)
    assert "kl_coef" in told
    assert "Keep one" in told
    objective, found = carry_over(
        as_objective({"name": "reinforce_pp", "estimator": {"kl_coef": 0.0}}),
        GRPOConfig(**tiny.options(beta=0.04)),
    )
    assert not found
    assert objective.kl is not None


@pytest.mark.parametrize("objective", ["gdpo", {"name": "grpo", "estimator": {"scale": "batch"}}])
def test_a_step_of_one_sequence_is_refused_where_sequences_are_compared(objective: object) -> None:
    told = refuse(
        "a step here has 1",
        objective=objective,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
    )
    assert "per_device_train_batch_size × gradient_accumulation_steps" in told
