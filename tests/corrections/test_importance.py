"""Mismatch correction: published numbers, every option against the oracle, denominators, and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from rlobjectives import (
    GRPO,
    CapabilityError,
    ClippedSurrogate,
    FixedBudget,
    ImportanceCorrection,
    KLPenalty,
    MissingColumnError,
    NonFiniteError,
    Objective,
    PolicyLoss,
    PromptMean,
    Rejection,
    SequenceMean,
    SequenceSum,
    TokenMean,
    TrainerFacts,
)
from rlobjectives.corrections.mismatch import MISMATCH_METRICS
from tests.losses.offpolicy import Data, Given, run, single
from tests.oracles import correction as oracle

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def fixture() -> Data:
    """The fixture of two sequences, three and two tokens; the masked place holds garbage."""
    return Data(
        torch.tensor([[True, True, True], [True, True, False]]),
        torch.tensor([1.2, -0.8], dtype=torch.float64),
        {
            "logprobs": torch.tensor([[-0.8, -2.3, -0.4], [-1.0, -1.1, -9.0]], dtype=torch.float64),
            "old_logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.7, -3.0]], dtype=torch.float64),
            "behavior_logprobs": torch.tensor([[-1.1, -1.8, -0.5], [-1.6, -0.9, 0.0]], dtype=torch.float64),
        },
    )


def objective(correction=None, **options) -> Objective:
    options.setdefault("policy_loss", ClippedSurrogate(clip_high=0.28))
    return Objective(estimator=Given(), correction=correction, **options)


def weights(correction: ImportanceCorrection, data: Data | None = None) -> tuple[list[float], list[bool]]:
    data = data or fixture()
    layout = data.layout()
    part = objective(correction)
    builder = part.window()
    builder.add(estimate=data.advantages, layout=layout)
    tokens = data.tokens(layout, data.columns["logprobs"], advantages=data.columns["logprobs"] * 0)
    builder.add_prepass(tokens)
    window = builder.freeze()
    found = correction.token_weights(tokens, window.context("correction"))
    return found.weight[data.mask].tolist(), found.keep[data.mask].tolist()


def logs(data: Data) -> list[list[float]]:
    x = data.columns["old_logprobs"] - data.columns["behavior_logprobs"]
    return [row[mask].tolist() for row, mask in zip(x, data.mask, strict=True)]


RAW = [1.105170918076, 0.818730753078, 1.0, 1.105170918076, 1.22140275816]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"high": None}, RAW),
        ({"high": 1.15}, [*RAW[:4], 1.15]),
        ({"low": 0.85, "high": 1.15, "outside": "mask"}, [RAW[0], 0, 1, RAW[3], 0]),
        ({"weight": "sequence", "high": None}, [0.904837418036] * 3 + [1.349858807576] * 2),
        ({"weight": "geometric", "high": None}, [0.967216100482] * 3 + [1.161834242728] * 2),
        (
            {"high": 1.15, "normalize": True},
            [1.066958320273, 0.790422164367, 0.965423811668, 1.066958320273, 1.110237383418],
        ),
    ],
)
def test_published_weights(options, expected):
    assert weights(ImportanceCorrection(**options))[0] == pytest.approx(expected, abs=1e-12)


def test_published_losses():
    tis = ImportanceCorrection(high=1.15)
    assert float(single(objective(tis), fixture()).loss) == pytest.approx(-0.296035484425, abs=1e-12)
    pop = {"low": 0.85, "high": 1.15, "outside": "mask"}
    original = single(objective(ImportanceCorrection(**pop)), fixture())
    assert float(original.loss) == pytest.approx(-0.297668126094, abs=1e-12)
    kept = single(objective(ImportanceCorrection(**pop, denominator="kept")), fixture())
    assert float(kept.loss) == pytest.approx(-0.49611354349, abs=1e-11)
    torch.testing.assert_close(kept.gradient, original.gradient * 5 / 3, **CLOSE)


def test_published_metrics():
    found = single(objective(ImportanceCorrection(high=1.15)), fixture()).metrics
    assert found["mismatch/kl"] == pytest.approx(-0.04, abs=1e-12)
    assert found["mismatch/k3"] == pytest.approx(0.010095069478, abs=1e-12)
    assert found["mismatch/chi2_token"] == pytest.approx(0.120990051999, abs=1e-12)
    assert found["mismatch/ess"] == pytest.approx(0.983683711532, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", ["token", "sequence", "geometric", "none"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize(
    "test",
    [
        None,
        ("k1", "token", 0.5, 2.0),
        ("k1", "sum", 0.4, 3.0),
        ("k1", "mean", 0.8, 1.3),
        ("k1", "max", 0.3, None),
        ("k2", "token", None, 0.2),
        ("k2", "mean", None, 0.15),
        ("k3", "sum", None, 0.5),
        ("k3", "max", None, 0.4),
    ],
    ids=str,
)
def test_every_option_equals_the_oracle(seed, weight, outside, test):
    if weight == "none" and test is None:
        return
    data = Data.random([4, 1, 3, 6], seed=seed, spread=0.4)
    rejects = ()
    if test is not None:
        rejects = (Rejection(measure=test[0], over=test[1], low=test[2], high=test[3]),)
    part = ImportanceCorrection(weight=weight, outside=outside, low=0.6, high=1.7, reject=rejects)
    log = logs(data)
    expected, keep = oracle.bounded(log, weight, outside, 0.6, 1.7)
    if weight == "none":
        expected, keep = oracle.raw(log, "none"), [[True] * len(row) for row in log]
    if test is not None:
        verdict = oracle.passes(log, test[0], test[1], test[2], test[3])
        keep = [[a and b for a, b in zip(x, y, strict=True)] for x, y in zip(keep, verdict, strict=True)]
    flat = [
        w if k else 0.0
        for row, flags in zip(expected, keep, strict=True)
        for w, k in zip(row, flags, strict=True)
    ]
    found, kept = weights(part, data)
    assert kept == [k for row in keep for k in row]
    assert found == pytest.approx(flat, abs=1e-12)
    result = single(objective(part), data)
    plain = single(objective(), data)
    factor = torch.zeros_like(plain.gradient)
    factor[data.mask.flatten()] = torch.tensor(flat, dtype=torch.float64)
    torch.testing.assert_close(result.gradient, plain.gradient * factor, **CLOSE)
    for name, number in oracle.metrics(log).items():
        assert result.metrics[name] == pytest.approx(number, rel=1e-10), name
    assert result.metrics["correction/dropped_fraction"] == pytest.approx(1 - sum(kept) / len(kept))
    assert set(MISMATCH_METRICS) <= set(result.metrics)


def test_veto_drops_the_whole_sequence():
    data = Data.random([4, 2], spread=0.1)
    data.columns["old_logprobs"][0, 2] = data.columns["behavior_logprobs"][0, 2] - 12.0
    found, kept = weights(ImportanceCorrection(veto=1e-4), data)
    assert kept == [False] * 4 + [True] * 2
    assert found[:4] == [0.0] * 4


REDUCTIONS = [
    TokenMean(),
    SequenceMean(),
    SequenceMean(count="nonempty"),
    SequenceSum(),
    FixedBudget(max_tokens=9),
]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_kept_denominators_equal_a_window_without_the_dropped_tokens(reduction, packed):
    data = Data.random([4, 1, 3, 6], seed=3, spread=0.5)
    part = ImportanceCorrection(low=0.7, high=1.4, outside="mask", denominator="kept")
    _, keep = weights(part, data)
    smaller = Data(data.mask.clone(), data.advantages, data.columns)
    smaller.mask[data.mask] = torch.tensor(keep)
    cut = [data.rows([0, 2]), data.rows([1, 3])]
    same = [smaller.rows([0, 2]), smaller.rows([1, 3])]
    raw = ImportanceCorrection(low=0.0, high=None)
    for pieces, others in (([data], [smaller]), (cut, same)):
        found = run(objective(part, reduction=reduction), pieces, packed=packed)
        expected = run(objective(raw, reduction=reduction), others, packed=packed)
        torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
        torch.testing.assert_close(found.gradient, expected.gradient, **CLOSE)


def test_penalties_keep_their_denominators():
    data = Data.random([4, 3], seed=3, spread=0.5)
    part = ImportanceCorrection(low=0.7, high=1.4, outside="mask", denominator="kept")
    with_kl = single(objective(part, kl=KLPenalty(coef=0.5)), data)
    plain = single(objective(kl=KLPenalty(coef=0.5)), data)
    assert with_kl.metrics["loss/kl"] == pytest.approx(plain.metrics["loss/kl"], rel=1e-12)


def test_everything_dropped_is_a_zero_without_nan():
    data = Data.random([4, 3], spread=0.1)
    data.columns["behavior_logprobs"] -= 8.0
    for denominator in ("original", "kept"):
        part = ImportanceCorrection(high=2.0, outside="mask", denominator=denominator)
        result = single(objective(part), data)
        assert float(result.loss) == 0.0
        assert torch.equal(result.gradient, torch.zeros_like(result.gradient))


def test_normalised_weights_are_the_same_for_every_cut():
    data = Data.random([4, 1, 3, 6], spread=0.5)
    part = ImportanceCorrection(high=1.5, normalize=True)
    whole = single(objective(part), data)
    pieces = run(objective(part), [data.rows([0]), data.rows([1, 2]), data.rows([3])])
    torch.testing.assert_close(pieces.gradient, whole.gradient, **CLOSE)
    assert whole.metrics["correction/weight_mean"] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "options", [{"normalize": True}, {"denominator": "kept", "outside": "mask"}, {"weight": "sequence"}]
)
def test_masked_garbage_and_layouts(options):
    part = objective(ImportanceCorrection(**options))
    data = Data.random([4, 1, 3])
    clean = single(part, data)
    for garbage in (float("nan"), float("inf"), float("-inf"), 1e30):
        columns = {name: torch.where(data.mask, c, garbage) for name, c in data.columns.items()}
        found = single(part, Data(data.mask, data.advantages, columns))
        assert torch.equal(found.gradient, clean.gradient)
        assert found.metrics == clean.metrics
    packed = single(part, data, packed=True)
    torch.testing.assert_close(packed.gradient, clean.gradient, **CLOSE)


@pytest.mark.parametrize("gap", [-100.0, 100.0, -500.0, 500.0])
@pytest.mark.parametrize("weight", ["token", "sequence", "geometric"])
def test_extremes_are_finite(gap, weight):
    data = Data.random([3, 2])
    data.columns["old_logprobs"][0, 0] = min(gap, 0.0) - 1.0
    data.columns["behavior_logprobs"][0, 0] = min(-gap, 0.0) - 1.0
    result = single(objective(ImportanceCorrection(weight=weight, high=None)), data)
    assert torch.isfinite(result.gradient).all()
    assert all(math.isfinite(number) for number in result.metrics.values())


class TestMissing:
    def test_no_column(self):
        data = fixture()
        del data.columns["behavior_logprobs"]
        with pytest.raises(MissingColumnError, match="behavior_logprobs"):
            single(objective(ImportanceCorrection()), data)

    @pytest.mark.parametrize("options", [{}, {"normalize": True}])
    def test_a_nan_is_an_error(self, options):
        data = fixture()
        data.columns["behavior_logprobs"][0, 1] = float("nan")
        with pytest.raises(NonFiniteError, match="behavior_logprobs has 1 non-finite"):
            single(objective(ImportanceCorrection(**options)), data)

    def test_an_unknown_place_is_an_error_unless_it_is_said_what_happens(self):
        known = torch.tensor([[True, False, True], [True, True, False]])
        with pytest.raises(NonFiniteError, match="behavior_logprobs has 1 non-finite"):
            single(objective(ImportanceCorrection()), fixture(), behavior_known=known)

    @pytest.mark.parametrize("options", [{"high": 1.15}, {"high": 1.15, "normalize": True}])
    def test_weight_one_outside_every_test_and_metric(self, options):
        known = torch.tensor([[True, False, True], [True, True, False]])
        data = fixture()
        data.columns["behavior_logprobs"][0, 1] = float("nan")
        part = ImportanceCorrection(
            **options, missing="one", reject=(Rejection(measure="k1", over="token", low=0.1, high=1.01),)
        )
        result = single(objective(part), data, behavior_known=known)
        assert result.metrics["mismatch/kl"] == pytest.approx(-0.1)
        assert result.metrics["correction/dropped_fraction"] == pytest.approx(3 / 5)
        assert float(result.gradient[1]) != 0.0


class TestRefusals:
    def test_same_tensor_twice(self):
        data = fixture()
        data.columns["old_logprobs"] = data.columns["behavior_logprobs"]
        with pytest.raises(CapabilityError, match="are the same tensor"):
            single(objective(ImportanceCorrection()), data)

    @pytest.mark.parametrize(
        ("facts", "reason"),
        [
            (TrainerFacts(old_logprobs="behavior"), "would count the same mismatch twice"),
            (TrainerFacts(importance_correction=True), "would do it again"),
            (TrainerFacts(top_p=0.9), "top_p = 0.9"),
            (TrainerFacts(behavior_logprobs="none"), "the sampler's log-probabilities"),
        ],
    )
    def test_trainer(self, facts, reason):
        with pytest.raises(CapabilityError, match=reason):
            objective(ImportanceCorrection()).check(facts)
        objective(ImportanceCorrection()).check(TrainerFacts(old_logprobs="recomputed"))

    def test_token_weights_on_a_sequence_loss(self):
        @dataclass(frozen=True, kw_only=True)
        class OneNumber(PolicyLoss):
            sequence_level = True

        for bad in (
            ImportanceCorrection(),
            ImportanceCorrection(weight="sequence", reject=(Rejection(high=2.0),)),
        ):
            with pytest.raises(CapabilityError, match="differ inside a sequence"):
                objective(bad, policy_loss=OneNumber())
        objective(ImportanceCorrection(weight="sequence", outside="mask", high=3.0), policy_loss=OneNumber())

    def test_prompt_mean_cannot_shrink(self):
        with pytest.raises(CapabilityError, match="PromptMean gets from the layout"):
            objective(ImportanceCorrection(denominator="kept"), reduction=PromptMean())

    @pytest.mark.parametrize(
        "options",
        [
            {"weight": "none"},
            {"weight": "product"},
            {"low": 2.0, "high": 1.0},
            {"outside": "drop"},
            {"denominator": "other"},
            {"missing": "zero"},
            {"veto": 0.0},
            {"reject": ("k1",)},
        ],
    )
    def test_options(self, options):
        with pytest.raises(CapabilityError):
            ImportanceCorrection(**options)

    @pytest.mark.parametrize(
        "options", [{}, {"measure": "k3", "low": 0.1, "high": 1.0}, {"low": 2.0, "high": 1.0}]
    )
    def test_rejection_options(self, options):
        with pytest.raises(CapabilityError):
            Rejection(**options)

    def test_rejections_from_a_file(self):
        """A mapping of options stands for each, in `Objective.named` as in the constructor."""
        tests = [{"over": "sum", "high": 2.0}, {"measure": "k2", "high": 1.0}]
        made = ImportanceCorrection(
            reject=(Rejection(over="sum", high=2.0), Rejection(measure="k2", high=1.0))
        )
        assert ImportanceCorrection(reject=tests) == made
        assert Objective.named("grpo", correction={"reject": tests}).correction == made
        with pytest.raises(CapabilityError, match=r"reject: Rejection has no option 'ower'.*mean 'over'\?"):
            ImportanceCorrection(reject=[{"ower": "sum", "high": 2.0}])
        with pytest.raises(CapabilityError, match="expected a list of tests"):
            ImportanceCorrection(reject=tests[0])

    def test_field_must_be_of_its_kind(self):
        with pytest.raises(CapabilityError, match="correction is"):
            Objective(estimator=GRPO(), correction=KLPenalty())
