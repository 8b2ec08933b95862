"""GAE against a plain recursion, published numbers, and every option."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlobjectives import (
    GAE,
    GRPO,
    CapabilityError,
    MissingColumnError,
    NonFiniteError,
    Objective,
    OptimalTokenBaseline,
    PaddedLayout,
    ReMax,
    Rollouts,
    ShapeError,
    TDLambda,
    TeacherSignal,
    TrainerFacts,
    VTrace,
)
from rlobjectives.functional import adaptive_trace_decay, lambda_returns
from tests.estimators.helpers import LAYOUTS, close, column, final, layout_of, rollouts_of, rows_of
from tests.measure import Cost
from tests.oracles import credit as oracle

V5, M5 = [0.1, 7.0, 0.2, 8.0, 0.3], [1, 0, 1, 0, 1]
both_layouts = pytest.mark.parametrize("kind", LAYOUTS)


def run(mask, rewards, values, kind="padded", options=None, **columns):
    """Advantages and value targets as ragged lists."""
    rollouts = rollouts_of(mask, rewards, kind, values=values, **columns)
    found = GAE(**(options or {})).credit(rollouts)
    return tuple(rows_of(one, mask, kind) for one in found)


@both_layouts
def test_four_values(kind):
    advantages, returns = run(
        [[1, 1, 1, 1]], [1.0], [[0.5, 0.6, 0.4, 0.7]], kind, {"discount": 0.99, "trace_decay": 0.95}
    )
    close(advantages, [[0.41088132478750, 0.336928575, 0.57515, 0.3]])
    close(returns, [[0.91088132478750, 0.936928575, 0.97515, 1.0]])


@both_layouts
def test_observations_are_no_steps(kind):
    advantages, returns = run([M5], [1.0], [V5], kind)
    close(advantages, [[0.9, 0, 0.8, 0, 0.7]])
    close(returns, [[1.0, 0, 1.0, 0, 1.0]])
    advantages, returns = run([M5], [1.0], [V5], kind, {"discount": 0.9, "trace_decay": 0.8})
    close(advantages, [[0.49328, 0, 0.574, 0, 0.7]])
    close(returns, [[0.59328, 0, 0.774, 0, 1.0]])


@both_layouts
@pytest.mark.parametrize(
    ("observations", "expected"),
    [("step", [2.221309952, 0, 1.79728, 0, 0.7]), ("zero_value", [0.214813952, 0, 0.35728, 0, 0.7])],
)
def test_the_other_conventions_for_observations(kind, observations, expected):
    options = {"discount": 0.9, "trace_decay": 0.8, "observations": observations}
    close(run([M5], [1.0], [V5], kind, options)[0], [expected])


def test_values_at_observations_are_ignored_whatever_they_hold():
    clean = run([M5], [1.0], [V5], options={"discount": 0.9, "trace_decay": 0.8})
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        dirty = [v if m else garbage for v, m in zip(V5, M5, strict=True)]
        for observations in ("skip", "zero_value"):
            options = {"discount": 0.9, "trace_decay": 0.8, "observations": observations}
            assert run([M5], [1.0], [dirty], options=options) == run([M5], [1.0], [V5], options=options)
    assert clean == run([M5], [1.0], [V5], options={"discount": 0.9, "trace_decay": 0.8})


@both_layouts
def test_two_observations_in_a_row(kind):
    advantages, returns = run(
        [[1, 1, 0, 0, 1]], [1.0], [[0.5, 0.4, 9.0, 9.0, 0.3]], kind, {"discount": 0.9, "trace_decay": 0.8}
    )
    close(advantages, [[0.12928, 0.374, 0, 0, 0.7]])
    close(returns, [[0.62928, 0.774, 0, 0, 1.0]])


@both_layouts
def test_the_reward_goes_to_the_last_action_token_not_the_last_token(kind):
    advantages, _ = run([[1, 1, 0]], [1.0], [[0.0, 0.0, 5.0]], kind, {"discount": 0.0})
    close(advantages, [[0.0, 1.0, 0.0]])


@both_layouts
def test_segments_and_sessions(kind):
    mask, values = [[1, 1], [1, 1]], [[0.1, 0.2], [0.3, 0.4]]
    options = {"discount": 0.9, "trace_decay": 0.8}
    close(
        run(mask, [1.0, 1.0], values, kind, options),
        [[[0.656, 0.8], [0.492, 0.6]], [[0.756, 1.0], [0.792, 1.0]]],
    )
    session = {**options, "reward_scope": "session"}
    expected = [[[0.3854528, 0.42424], [0.492, 0.6]], [[0.4854528, 0.62424], [0.792, 1.0]]]
    scored = torch.tensor([False, True])
    close(run(mask, [1.0, 1.0], values, kind, session, session_ids=[5, 5]), expected)
    close(run(mask, [0.0, 1.0], values, kind, session, session_ids=[5, 5], scored=scored), expected)
    repeated = {**options, "reward_scope": "session_replicated"}
    close(
        run(mask, [0.0, 1.0], values, kind, repeated, session_ids=[5, 5], scored=scored),
        run(mask, [1.0, 1.0], values, kind, options),
    )


@both_layouts
def test_interleaved_sessions_equal_sessions_by_themselves(kind):
    mask = [[1, 0, 1], [1], [0, 1], [1, 1, 0]]
    values = [[0.3, 9.0, 0.1], [0.7], [9.0, 0.4], [0.2, 0.5, 9.0]]
    options = {"discount": 0.9, "trace_decay": 0.8, "reward_scope": "session"}
    found, returns = run(mask, [1.0, 2.0, 1.0, 2.0], values, kind, options, session_ids=[8, 3, 8, 3])
    for rows, reward in (((0, 2), 1.0), ((1, 3), 2.0)):
        joined = [v for row in rows for v in values[row]]
        expected = oracle.masked_gae(joined, [m for row in rows for m in mask[row]], reward, 0.9, 0.8)
        close([a for row in rows for a in found[row]], expected[0])
        close([a for row in rows for a in returns[row]], expected[1])


def test_a_truncated_session_goes_on_after_its_last_sequence_only():
    mask, values = [[1, 1], [1, 1]], [[0.1, 0.2], [0.3, 0.4]]
    options = {"discount": 0.9, "trace_decay": 0.8, "reward_scope": "session"}
    more = {"session_ids": [5, 5], "truncated": [True, True], "bootstrap_values": [math.nan, 2.0]}
    with pytest.raises(NonFiniteError, match="bootstrap_values"):
        run(mask, [1.0, 1.0], values, options=options, **more)
    more["bootstrap_values"] = [50.0, 2.0]
    found, _ = run(mask, [1.0, 1.0], values, options=options, **more)
    expected = oracle.masked_gae([0.1, 0.2, 0.3, 0.4], [1] * 4, 1.0, 0.9, 0.8, bootstrap=2.0)[0]
    close([a for row in found for a in row], expected)


@pytest.mark.parametrize("reward", [-1.0, 1.0])
def test_unscored_sequences_say_nothing_about_their_session(reward):
    scored = torch.tensor([False, True, False])
    options = {"reward_scope": "session_replicated"}
    columns = {"values": [[0.0]] * 3, "session_ids": [5, 5, 5], "scored": scored}
    found = GAE(**options).estimate(rollouts_of([[1], [1], [1]], [0.0, reward, 0.0], **columns))
    close(found, [[reward]] * 3)


def test_a_session_that_contradicts_itself_is_refused():
    rollouts = rollouts_of([[1], [1]], [1.0, 2.0], values=[[0.0], [0.0]], session_ids=[5, 5])
    with pytest.raises(CapabilityError, match=r"1 of 1 sessions have .* different scores .* \(session 5\)"):
        GAE(reward_scope="session").estimate(rollouts)
    with pytest.raises(MissingColumnError, match="session_ids"):
        GAE(reward_scope="session").estimate(rollouts_of([[1]], [1.0], values=[[0.0]]))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    discount=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    decay=st.sampled_from([0.0, 0.01, 0.5, 0.95, 1.0]),
    observations=st.sampled_from(["skip", "zero_value", "step"]),
    kind=st.sampled_from(LAYOUTS),
    holes=st.sampled_from([0.0, 0.4]),
)
def test_equals_the_plain_recursion(seed, lengths, discount, decay, observations, kind, holes):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=rng, dtype=torch.float64).tolist()
    mask = [[int(x >= holes) for x in torch.rand(n, generator=rng).tolist()] for n in lengths]
    values, extra = [draw(n) for n in lengths], [draw(n) for n in lengths]
    rewards, ends, cut = (
        draw(len(lengths)),
        draw(len(lengths)),
        (torch.rand(len(lengths), generator=rng) < 0.5).tolist(),
    )
    options = {
        "discount": discount,
        "trace_decay": decay,
        "observations": observations,
        "on_lost_reward": "drop",
        "on_observation_reward": "drop",
    }
    advantages, returns = run(
        mask,
        rewards,
        values,
        kind,
        options,
        token_rewards=extra,
        truncated=cut,
        bootstrap_values=torch.tensor(ends, dtype=torch.float64),
    )
    for row in range(len(lengths)):
        expected = oracle.masked_gae(
            values[row],
            mask[row],
            rewards[row],
            discount,
            decay,
            token_rewards=extra[row],
            bootstrap=ends[row] if cut[row] else 0.0,
            observations=observations,
        )
        close(advantages[row], expected[0])
        close(returns[row], expected[1])


@pytest.mark.parametrize("discount", [0.9, 0.99, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.5, 0.95, 1.0])
def test_float32_stays_within_a_millionth_of_float64(discount, decay):
    length = 4096
    rng = torch.Generator().manual_seed(3)
    mask = [(torch.rand(length, generator=rng) > 0.2).int().tolist()]
    values = (100.0 + torch.randn(1, length, generator=rng)).float()
    found = lambda_returns(
        layout_of(mask), values=values, final_rewards=torch.ones(1), discount=discount, trace_decay=decay
    )
    assert found.advantages.dtype is torch.float32
    expected = oracle.masked_gae(values[0].double().tolist(), mask[0], 1.0, discount, decay)
    for one, other in zip(found, expected, strict=True):
        exact = torch.tensor(other, dtype=torch.float64)
        assert float((one[0].double() - exact).abs().max() / exact.abs().max()) < 1e-6


def test_a_sequence_of_32k_tokens_stays_finite():
    layout = PaddedLayout(torch.ones(1, 32_768, dtype=torch.bool))
    found = lambda_returns(
        layout, values=torch.zeros(1, 32_768), final_rewards=torch.ones(1), discount=0.99, trace_decay=0.95
    )
    assert bool(torch.isfinite(found.advantages).all())
    assert float(found.advantages[0, -1]) == 1.0


def test_lambda_one_gives_the_reward_to_go_whatever_the_values():
    _, returns = run([[1, 1, 1]], [2.0], [[9.0, -9.0, 4.0]], token_rewards=[[0.5, 0.0, 0.25]])
    close(returns, [[2.75, 2.25, 2.25]])


def test_kl_shaping_on_action_tokens_only():
    mask = [[1, 0, 1]]
    options = {"discount": 0.9, "trace_decay": 0.8, "kl_coef": 0.1}
    rollouts = rollouts_of(
        mask,
        [1.0],
        values=[[0.1, 7.0, 0.3]],
        token_rewards=[[0.5, math.nan, 0.0]],
        old_logprobs=[[-1.0, math.nan, -2.0]],
        ref_logprobs=[[-1.5, math.inf, -1.0]],
    )
    found = GAE(**options).estimate(rollouts)
    expected = oracle.masked_gae([0.1, 7.0, 0.3], mask[0], 1.0, 0.9, 0.8, token_rewards=[0.5 - 0.05, 0, 0.1])
    close(found, [expected[0]])
    close(rollouts.token_rewards[0, [0, 2]], [0.5, 0.0])  # the input is left alone
    assert GAE(**options).required().needs_ref_logprobs
    assert not GAE().required().needs_ref_logprobs
    with pytest.raises(MissingColumnError, match="old_logprobs"):
        GAE(kl_coef=0.1).estimate(rollouts_of(mask, [1.0], values=[[0.1, 7.0, 0.3]]))


def test_several_reward_columns_are_weighed():
    rollouts = rollouts_of([[1]], [[1.0, 10.0]], values=[[0.0]])
    close(GAE(weights=(2.0, 0.5)).estimate(rollouts), [[7.0]])


class TestTruncation:
    def test_only_marked_sequences_are_bootstrapped(self):
        mask, values = [[1, 1], [1, 1]], [[0.1, 0.2], [0.1, 0.2]]
        advantages, _ = run(
            mask,
            [0.0, 0.0],
            values,
            options={"discount": 0.9, "trace_decay": 0.8},
            truncated=[True, False],
            bootstrap_values=torch.tensor([2.0, math.nan]),
        )
        close(advantages[0], oracle.masked_gae(values[0], mask[0], 0.0, 0.9, 0.8, bootstrap=2.0)[0])
        close(advantages[1], oracle.masked_gae(values[1], mask[1], 0.0, 0.9, 0.8)[0])

    def test_the_two_columns_come_together(self):
        with pytest.raises(MissingColumnError, match="bootstrap_values"):
            run([[1]], [0.0], [[0.1]], truncated=[True])
        for part in (GAE(), TDLambda(), VTrace()):
            columns = {"values": [[0.1]] * 2, "old_logprobs": [[-1.0]] * 2, "behavior_logprobs": [[-1.0]] * 2}
            data = rollouts_of([[1], [1]], [1.0, 1.0], truncated=[False, False], **columns)
            part.estimate(data)  # nothing was cut off, so nothing need be known
            with pytest.raises(MissingColumnError, match="bootstrap_values"):
                part.estimate(dataclasses.replace(data, truncated=torch.tensor([False, True])))
            dummy = data.layout.with_facts(sequence_mask=torch.tensor([True, False]))
            cut = torch.tensor([False, True])
            part.estimate(dataclasses.replace(data, truncated=cut, layout=dummy))
            known = dataclasses.replace(data, truncated=cut, bootstrap_values=torch.ones(2))
            assert not known.unbootstrapped
        with pytest.raises(MissingColumnError, match="truncated"):
            run([[1]], [0.0], [[0.1]], bootstrap_values=torch.tensor([1.0]))

    def test_an_integer_flag_is_refused(self):
        with pytest.raises(ShapeError, match="truncated has dtype"):
            run([[1]], [0.0], [[0.1]], truncated=[1], bootstrap_values=torch.tensor([1.0]))


class TestRewardsWithoutAnActionToken:
    def test_are_an_error_unless_zero(self):
        with pytest.raises(CapabilityError, match=r"1 of 2 sequences have a reward .* \(sequence 1\)"):
            run([[1, 0], [0, 0]], [1.0, 2.0], [[0.0, 0.0], [0.0, 0.0]])
        advantages, returns = run([[1, 0], [0, 0]], [1.0, 0.0], [[0.0, 0.0], [5.0, 5.0]])
        close(advantages, [[1.0, 0.0], [0.0, 0.0]])
        close(returns, [[1.0, 0.0], [0.0, 0.0]])

    def test_may_be_dropped_by_name(self):
        run([[0]], [1.0], [[0.0]], options={"on_lost_reward": "drop"})

    def test_of_a_session_are_counted_by_session(self):
        mask, values = [[1], [0]], [[0.0], [0.0]]
        for scope in ("session", "session_replicated"):
            options = {"reward_scope": scope}
            advantages, _ = run(mask, [1.0, 1.0], values, options=options, session_ids=[4, 4])
            close(advantages, [[1.0], [0.0]])
            with pytest.raises(CapabilityError, match=r"no action token .* \(session 4\)"):
                run([[0], [0]], [1.0, 1.0], values, options=options, session_ids=[4, 4])

    def test_of_dummy_rows_do_not_matter(self):
        layout = layout_of([[1], [0]]).with_facts(sequence_mask=torch.tensor([True, False]))
        rollouts = Rollouts(
            rewards=torch.ones(2), group_ids=torch.tensor([0, 1]), layout=layout, values=torch.zeros(2, 1)
        )
        close(GAE().estimate(rollouts), [[1.0], [0.0]])

    @pytest.mark.parametrize("scope", ["session", "session_replicated"])
    def test_of_dummy_rows_do_not_matter_to_sessions(self, scope):
        """Alone in a session, at the end of one, and with a reward that contradicts it."""
        counted = torch.tensor([True, False, True, False])
        layout = layout_of([[1], [0], [1], [0]]).with_facts(sequence_mask=counted)
        rollouts = Rollouts(
            rewards=torch.tensor([1.0, 1.0, 2.0, 3.0]),
            group_ids=torch.arange(4),
            layout=layout,
            values=torch.tensor([[0.25], [math.nan], [0.5], [math.nan]]),
            session_ids=torch.tensor([3, 9, 4, 4]),
            truncated=torch.tensor([False, True, False, True]),
            bootstrap_values=torch.full((4,), 50.0),
        )
        for observations in ("skip", "zero_value"):
            credit = GAE(reward_scope=scope, discount=0.5, observations=observations).credit(rollouts)
            close(credit.advantages, [[0.75], [0.0], [1.5], [0.0]])
            close(credit.returns, [[1.0], [0.0], [2.0], [0.0]])
        unscored = torch.tensor([True, False, False, True])
        rollouts = dataclasses.replace(rollouts, scored=unscored, bootstrap_values=None, truncated=None)
        with pytest.raises(CapabilityError, match=r"1 of 3 sessions have no scored reward.* \(session 4\)"):
            GAE(reward_scope=scope).estimate(rollouts)

    def test_a_dummy_row_inside_a_session_is_no_step(self):
        options = {"discount": 0.5, "trace_decay": 0.5, "reward_scope": "session"}
        columns = {"group_ids": torch.arange(3), "session_ids": torch.tensor([7, 7, 7])}
        found, bare = (
            GAE(**options, observations=observations).estimate(
                Rollouts(
                    rewards=torch.ones(3)[:rows],
                    layout=layout_of([[1], [0], [1]]).with_facts(
                        sequence_mask=torch.tensor([True, False, True])
                    )
                    if rows == 3
                    else layout_of([[1], [1]]),
                    values=torch.tensor([[0.25], [9.0], [0.5]] if rows == 3 else [[0.25], [0.5]]),
                    **{name: column[:rows] for name, column in columns.items()},
                )
            )
            for rows, observations in ((3, "step"), (2, "skip"))
        )
        close(found[[0, 2]], bare)


class TestReturnsCheckWhatTheyGet:
    layout = layout_of([[1, 1], [1, 0]])

    @pytest.mark.parametrize("column", ["trace_decay", "final_rewards"])
    @pytest.mark.parametrize("length", [1, 3])
    def test_lengths(self, column, length):
        with pytest.raises(ShapeError, match=rf"{column} has shape \[{length}\]; expected \[2\]"):
            lambda_returns(self.layout, **{column: torch.full((length,), 0.5)})

    def test_gradients_end_here(self):
        columns = {name: torch.rand(2, 2).requires_grad_() for name in ("values", "token_rewards")}
        more = {name: torch.rand(2).requires_grad_() for name in ("final_rewards", "trace_decay")}
        credit = lambda_returns(self.layout, **columns, **more)
        assert not credit.advantages.requires_grad
        assert not credit.returns.requires_grad


class TestTraceDecays:
    def test_length_adaptive(self):
        close(adaptive_trace_decay(torch.tensor([0, 10, 20, 100]), 0.05), [0.0, 0.0, 0.0, 0.8], 1e-15)

    @both_layouts
    def test_policy_and_critic_have_their_own(self, kind):
        mask = [[1] * 40, [1, 0] * 15]
        rng = torch.Generator().manual_seed(1)
        values = [torch.randn(len(row), generator=rng, dtype=torch.float64).tolist() for row in mask]
        options = {"discount": 0.99, "trace_decay": 0.5, "adaptive_alpha": 0.05, "value_trace_decay": 0.9}
        advantages, returns = run(mask, [1.0, -1.0], values, kind, options)
        for row, (reward, count) in enumerate(((1.0, 40), (-1.0, 15))):
            own = max(0.0, 1 - 1 / (0.05 * count))
            close(advantages[row], oracle.masked_gae(values[row], mask[row], reward, 0.99, own)[0])
            close(returns[row], oracle.masked_gae(values[row], mask[row], reward, 0.99, 0.9)[1])

    def test_the_critic_keeps_the_plain_decay_when_only_the_policy_adapts(self):
        values = [[0.1, 0.2, 0.3]]
        _, returns = run([[1, 1, 1]], [1.0], values, options={"trace_decay": 0.5, "adaptive_alpha": 1.0})
        close(returns, [oracle.masked_gae(values[0], [1, 1, 1], 1.0, 1.0, 0.5)[1]])


class TestNormalisation:
    def test_population_with_epsilon_added(self):
        estimator = GAE(
            discount=0.9, trace_decay=0.8, normalize="window", ddof=0, epsilon=1e-8, epsilon_mode="add"
        )
        expected = [-1.126350862067, 0, -0.177432392967, 0, 1.303783255034]
        close(final(estimator, rollouts_of([M5], [1.0], values=[V5])), [expected], 1e-10)

    def test_sample_with_epsilon_in_the_variance(self):
        estimator = GAE(discount=0.9, trace_decay=0.8, normalize="window")
        expected = [-0.91966131227, 0, -0.144872892498, 0, 1.064534204768]
        close(final(estimator, rollouts_of([M5], [1.0], values=[V5])), [expected], 1e-10)

    @pytest.mark.parametrize("mode", ["add", "variance", "floor"])
    @pytest.mark.parametrize("ddof", [0, 1])
    def test_over_the_tokens_of_all_sequences(self, mode, ddof):
        mask, values = [[1, 1, 1], [1, 0]], [[0.3, 0.9, 0.1], [0.2, 9.0]]
        raw = run(mask, [1.0, -2.0], values)[0]
        tokens = [a for row, m in zip(raw, mask, strict=True) for a in oracle.actions(row, m)]
        expected = oracle.whiten(tokens, ddof, 0.01, mode)
        estimator = GAE(normalize="window", ddof=ddof, epsilon=0.01, epsilon_mode=mode)
        found = final(estimator, rollouts_of(mask, [1.0, -2.0], values=values))
        close([*found[0].tolist(), found[1, 0].item()], expected)
        assert found[1, 1:].tolist() == [0.0, 0.0]

    def test_returns_and_estimate_are_never_touched(self):
        plain, white = GAE(), GAE(normalize="window")
        rollouts = rollouts_of([M5], [1.0], values=[V5])
        assert torch.equal(plain.value_targets(rollouts), white.value_targets(rollouts))
        assert torch.equal(plain.estimate(rollouts), white.estimate(rollouts))

    def test_constant_advantages_become_exact_zeros(self):
        rollouts = rollouts_of([[1, 1, 1]], [0.7], values=[[0.0, 0.0, 0.0]])
        assert final(GAE(normalize="window"), rollouts).tolist() == [[0.0, 0.0, 0.0]]

    def test_a_single_token_and_no_token_become_zero(self):
        with pytest.warns(UserWarning, match="fewer than two that count"):
            assert final(GAE(normalize="window"), rollouts_of([[1]], [0.7], values=[[0.2]])).tolist() == [
                [0.0]
            ]
        assert final(GAE(normalize="window"), rollouts_of([[0]], [0.0], values=[[0.2]])).tolist() == [[0.0]]

    @pytest.mark.parametrize("kind", [GAE, TDLambda, VTrace, ReMax, OptimalTokenBaseline, TeacherSignal])
    def test_twice_is_reported(self, kind):
        facts = TrainerFacts(offers={"values": True}, normalize_advantages=True)
        with pytest.raises(CapabilityError, match="whitens advantages itself"):
            Objective(estimator=kind(normalize="window")).check(facts)
        Objective(estimator=kind()).check(facts)


@pytest.mark.parametrize(
    "options",
    [
        {"discount": 1.01},
        {"discount": -0.1},
        {"trace_decay": 1.5},
        {"value_trace_decay": -1.0},
        {"adaptive_alpha": 0.0},
        {"kl_coef": -1.0},
        {"kl_estimator": "k4"},
        {"reward_scope": "turn"},
        {"observations": "drop"},
        {"normalize": "batch"},
        {"ddof": 2},
        {"epsilon": -1.0},
        {"epsilon_mode": "max"},
        {"on_lost_reward": "warn"},
        {"weights": (float("nan"),)},
        {"discount": True},
        {"discount": None},
        {"trace_decay": None},
        {"weights": 1.0},
        {"weights": "12"},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(CapabilityError):
        GAE(**options)


def test_needs_a_critic_and_whole_sequences():
    objective = Objective.named("ppo")
    assert objective.capabilities.needs_critic
    with pytest.raises(CapabilityError, match="critic"):
        objective.check(TrainerFacts(offers={"values": False}))
    with pytest.raises(CapabilityError, match="context parallelism"):
        objective.check(TrainerFacts(offers={"values": True}, context_parallel_size=2))
    with pytest.raises(MissingColumnError, match="values"):
        GAE().estimate(rollouts_of([[1]], [1.0]))
    with pytest.raises(MissingColumnError, match="layout"):
        GAE().estimate(Rollouts(rewards=torch.ones(1), group_ids=torch.tensor([0])))
    with pytest.raises(CapabilityError, match="reads no critic"):
        GRPO().value_targets(rollouts_of([[1]], [1.0]))


def test_low_precision_values_give_float32():
    rollouts = Rollouts(
        rewards=torch.ones(1),
        group_ids=torch.tensor([0]),
        layout=layout_of([[1, 1]]),
        values=torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16),
    )
    assert GAE().estimate(rollouts).dtype is torch.float32


def test_no_gradient_reaches_the_values():
    values = torch.tensor([[0.1, 0.2]], requires_grad=True)
    rollouts = Rollouts(
        rewards=torch.ones(1), group_ids=torch.tensor([0]), layout=layout_of([[1, 1]]), values=values
    )
    assert not GAE().estimate(rollouts).requires_grad
    assert not GAE().value_targets(rollouts).requires_grad


def test_cost_does_not_grow_with_tokens_beyond_the_results():
    extra, counts = [], []
    for rows in (32, 128):
        layout = PaddedLayout(torch.ones(rows, 8192, dtype=torch.bool))
        values, final_rewards = torch.zeros(rows, 8192), torch.ones(rows)
        with Cost() as cost:
            lambda_returns(layout, values=values, final_rewards=final_rewards, trace_decay=0.95)
        extra.append(cost.peak - 2 * values.numel() * 4)
        counts.append(cost.operations * 131_072 / values.numel())
    assert extra[0] == pytest.approx(extra[1], rel=0.05)
    assert extra[1] < 16 * 2**20
    assert counts[0] == pytest.approx(counts[1], rel=0.05)  # a fixed number of operations a piece


def test_shapes_are_checked_by_the_function():
    layout = layout_of([[1, 1]])
    with pytest.raises(ShapeError, match="values"):
        lambda_returns(layout, values=torch.zeros(2, 1))
    with pytest.raises(ShapeError, match="final_rewards"):
        lambda_returns(layout, final_rewards=torch.zeros(2))
    with pytest.raises(CapabilityError, match="discount"):
        lambda_returns(layout, discount=2.0)
    with pytest.raises(ShapeError, match="layout is Tensor"):
        lambda_returns(layout.mask)
    with pytest.raises(CapabilityError, match="alpha"):
        adaptive_trace_decay(torch.tensor([4]), 0.0)
    close(lambda_returns(layout, token_rewards=column([[1.0, 2.0]])).returns, [[3.0, 2.0]])
