"""ECHO, corrections, filters and reward shaping."""

# pyright: reportIndexIssue=false, reportArgumentType=false
# Tolist() and item() are typed as any list or scalar.

import math

import mlx.core as mx
import pytest

from mlxrl.algo import (
    AlgorithmBatch,
    Correction,
    EchoSchedule,
    charge_kl,
    echo_loss,
    echo_weights,
    informative_rows,
    make_algorithm,
    mask_truncated,
    masked_weights,
    sampler_ratio,
    soft_overlong_penalties,
    truncated_weights,
)


def approx(values, tolerance=1e-6):
    return pytest.approx(values, abs=tolerance)


ECHO_LOGPROBS = mx.array([[-0.5, -1.5], [-1.0, -77.0]])
ECHO_MASK = mx.array([[1, 1], [1, 0]])


def test_echo_is_the_mean_nll_of_environment_tokens_beside_the_action_loss():
    # (0.5 + 1.5 + 1) / 3 = 1; an action loss of -0.4 and lambda 0.05 make -0.4 + 0.05 * 1 = -0.35.
    loss = echo_loss(ECHO_LOGPROBS, ECHO_MASK)
    assert loss.item() == approx(1.0)
    assert -0.4 + 0.05 * loss.item() == approx(-0.35)
    slope = mx.grad(lambda x: echo_loss(x, ECHO_MASK))(ECHO_LOGPROBS)
    assert slope.tolist() == [approx([-1 / 3, -1 / 3]), approx([-1 / 3, 0.0])]


def test_echo_can_average_each_trajectory_first():
    # ((0.5 + 1.5) / 2 + 1) / 2 = 1 as well; with -2.5 for -1.5, (1.5 + 1) / 2 = 1.25 against 4 / 3.
    logp = mx.array([[-0.5, -2.5], [-1.0, 0.0]])
    assert echo_loss(logp, ECHO_MASK, per_sequence=True).item() == approx(1.25)
    assert echo_loss(logp, ECHO_MASK).item() == approx(4 / 3)


def test_echo_without_environment_tokens_is_zero_with_zero_gradient():
    value, slope = mx.value_and_grad(lambda x: echo_loss(x, mx.zeros((2, 2))))(ECHO_LOGPROBS)
    assert value.item() == 0.0
    assert slope.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("per_sequence", [False, True])
def test_echo_weights_of_the_whole_batch_survive_any_split(per_sequence):
    weights = echo_weights(ECHO_MASK, per_sequence=per_sequence)
    parts = [mx.sum(-ECHO_LOGPROBS[i] * weights[i]).item() for i in range(2)]
    assert sum(parts) == approx(echo_loss(ECHO_LOGPROBS, ECHO_MASK, per_sequence).item())


def test_observations_of_failed_trajectories_are_not_learnt():
    assert echo_weights(ECHO_MASK, [False, True]).tolist() == [[0.0, 0.0], [1.0, 0.0]]
    # Another rank has one more token: 1 / 4 each.
    assert echo_weights(ECHO_MASK, total=4).tolist() == [[0.25, 0.25], [0.25, 0.0]]


def test_the_echo_weight_tapers_to_zero_and_stays_there():
    # 0.05 * (1 - step / 4) at steps 0 to 4, then 0.
    taper = EchoSchedule(0.05, "linear_taper_to_zero", 4)
    assert [taper(step) for step in (0, 1, 2, 3, 4, 9)] == approx([0.05, 0.0375, 0.025, 0.0125, 0.0, 0.0], 1e-12)
    assert [EchoSchedule(0.05)(step) for step in (0, 9)] == [0.05, 0.05]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha must be a finite number of at least 0, got -0.1"),
        ({"alpha": float("nan")}, "alpha must be a finite number of at least 0, got nan"),
        ({"alpha": 0.1, "schedule": "cosine"}, "schedule must be constant or linear_taper_to_zero, got 'cosine'"),
        ({"alpha": 0.1, "schedule": "linear_taper_to_zero"}, "taper_steps must be at least 1 .*, got None"),
        ({"alpha": 0.1, "taper_steps": 5}, "taper_steps has no effect on the constant schedule, got 5"),
    ],
)
def test_schedules_refuse_what_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        EchoSchedule(**options)


# log old - log mu = ln 4, ln 0.5 and a masked position: token weights 4 and 0.5, product 2, geometric mean sqrt 2.
OLD = mx.log(mx.array([[0.8, 0.1, 0.5]]))
SAMPLER = mx.log(mx.array([[0.2, 0.2, 0.1]]))
TOKENS = mx.array([[1, 1, 0]])


@pytest.mark.parametrize(
    ("level", "weights"),
    [("token", [4.0, 0.5, 1.0]), ("sequence", [2.0] * 3), ("geometric", [1.414214] * 3)],
)
def test_the_sampler_ratio_has_three_levels(level, weights):
    assert sampler_ratio(OLD, SAMPLER, TOKENS, level).tolist()[0] == approx(weights, 1e-5)


def test_truncation_caps_and_masking_drops():
    ratio = mx.array([[4.0, 0.5, 2.0, 0.4, 1.0]])
    # TIS: min(w, 2). MIS: w within [0.5, 2] with both ends in, else 0.
    assert truncated_weights(ratio).tolist() == [approx([2.0, 0.5, 2.0, 0.4, 1.0])]
    assert masked_weights(ratio).tolist() == [approx([0.0, 0.5, 2.0, 0.0, 1.0])]
    assert truncated_weights(ratio, cap=1.0).tolist() == [approx([1.0, 0.5, 1.0, 0.4, 1.0])]
    assert masked_weights(ratio, low=0.9, high=5.0).tolist() == [approx([4.0, 0.0, 2.0, 0.0, 1.0])]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_sampler_ratio_is_a_constant_for_the_gradient(level):
    slope = mx.grad(lambda x: mx.sum(sampler_ratio(x, SAMPLER, TOKENS, level)))(OLD)
    assert slope.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("correct", [truncated_weights, masked_weights])
def test_corrections_are_constants_whatever_ratio_they_are_given(correct):
    assert mx.grad(lambda ratio: mx.sum(correct(ratio)))(mx.ones((1, 3))).tolist() == [[0.0, 0.0, 0.0]]


def test_a_matching_sampler_needs_no_correction():
    for level in ("token", "sequence", "geometric"):
        assert masked_weights(truncated_weights(sampler_ratio(OLD, OLD, TOKENS, level))).tolist() == [[1.0, 1.0, 1.0]]


def test_corrections_refuse_impossible_limits():
    with pytest.raises(ValueError, match="cap must be above 0, got 0"):
        truncated_weights(OLD, cap=0)
    with pytest.raises(ValueError, match="0 <= low < high, got 2 and 1"):
        masked_weights(OLD, low=2, high=1)
    with pytest.raises(ValueError, match="level must be one of token, sequence, geometric, got 'turn'"):
        sampler_ratio(OLD, SAMPLER, TOKENS, "turn")


def test_a_correction_is_its_functions_in_one_object():
    # log w = 1, 0, -2: w = e, 1, e^-2; TIS at 2 gives 2, 1, 0.135; MIS keeps [0.1, 2]: 0, 1, 0.135
    old, sampler, mask = mx.array([[1.0, 0.0, -2.0]]), mx.zeros((1, 3)), mx.ones((1, 3))
    assert Correction("tis")(old, sampler, mask).tolist() == [approx([2.0, 1.0, math.exp(-2)])]
    assert Correction("mis", band=(0.1, 2.0))(old, sampler, mask).tolist() == [approx([0.0, 1.0, math.exp(-2)])]
    # the sequence's w is exp(1 + 0 - 2) = e^-1; the geometric mean exp(-1/3)
    assert Correction("tis", "sequence")(old, sampler, mask).tolist() == [approx([math.exp(-1)] * 3)]
    assert Correction("tis", "geometric")(old, sampler, mask).tolist() == [approx([math.exp(-1 / 3)] * 3)]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"kind": "is"}, "kind"), ({"kind": "tis", "cap": 0.0}, "cap"), ({"kind": "mis", "band": (2.0, 1.0)}, "low")],
)
def test_a_correction_that_makes_no_sense_is_refused_when_it_is_built(options, words):
    with pytest.raises(ValueError, match=words):
        Correction(**options)


def test_dynamic_sampling_keeps_groups_whose_rewards_differ():
    # All right, one right of four... only the middle group has a spread.
    assert informative_rows([1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0], 4) == [4, 5, 6, 7]


def test_a_constant_group_stays_constant_in_float32():
    # Eight times 0.1 has a float32 standard deviation above 0; a spread of rounding size is no signal either.
    assert informative_rows([0.1] * 8, 8) == []
    assert informative_rows([0.3, 0.1 + 0.2], 2) == []
    assert informative_rows([0.0, 1e-3], 2) == [0, 1]


def test_a_kept_group_keeps_its_failed_rows_and_a_dropped_one_loses_them():
    rewards = [1, None, 0, 1, None, 1]
    assert informative_rows(rewards, ["a", "a", "a", "b", "b", "b"]) == [0, 1, 2]
    assert informative_rows([None, None], 2) == []


def test_dapo_filters_and_grpo_does_not():
    batch = AlgorithmBatch.single_turn(rewards=[1, 1, 0, 1], group_structure=2, action_mask=mx.ones((4, 1)))
    assert make_algorithm("dapo").filter_batch(batch) == [2, 3]
    assert make_algorithm("dapo").filter_batch(batch, 4) == [0, 1, 2, 3]
    assert make_algorithm("dapo", dynamic_sampling=False).filter_batch(batch) is None
    assert make_algorithm("grpo").filter_batch(batch) is None
    assert make_algorithm("grpo", dynamic_sampling=True).filter_batch(batch) == [2, 3]


def test_a_length_penalty_does_not_make_a_constant_group_informative():
    # The task rewards are all 1; judged after the penalty of the long answer the group would pass.
    rewards, penalties = [1.0, 1.0], soft_overlong_penalties([10, 20], max_length=20, buffer=10)
    assert informative_rows(rewards, 2) == []
    assert informative_rows([r + p for r, p in zip(rewards, penalties, strict=True)], 2) == [0, 1]


def test_the_soft_overlong_penalty_is_linear_over_its_buffer():
    # L = 20, buffer 5: 0 up to 15, then -1/5 a token, -1 at 20 and beyond.
    penalties = soft_overlong_penalties([0, 15, 16, 18, 20, 21], max_length=20, buffer=5)
    assert penalties == approx([0.0, 0.0, -0.2, -0.6, -1.0, -1.0], 1e-12)
    with pytest.raises(ValueError, match="buffer must be between 1 and max_length 20, got 0"):
        soft_overlong_penalties([1], max_length=20, buffer=0)


def test_the_overlong_filter_masks_every_token_of_a_truncated_trajectory():
    assert mask_truncated(mx.array([[1, 2], [1, 2]]), [False, True]).tolist() == [[1, 2], [0, 0]]


def test_the_kl_of_a_trajectory_is_taken_off_its_reward():
    # Sums 2 and 1 at beta 0.1: 1 - 0.2 and 0 - 0.1.
    assert charge_kl([1.0, 0.0, None], [[1.5, 0.5], [1.0], [9.0]], 0.1) == [approx(0.8), approx(-0.1), None]
    assert charge_kl([1.0, 1.0, 1.0], [[math.nan], [math.inf, -math.inf], []], 0.1) == [None, None, 1.0]
