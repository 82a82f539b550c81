import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.algo import (
    centred_advantages,
    gdpo_advantages,
    is_constant,
    leave_one_out_advantages,
    make_algorithm,
    maxrl_advantages,
    standardised_advantages,
    weighted_rewards,
)

ESTIMATORS = [centred_advantages, standardised_advantages, leave_one_out_advantages, maxrl_advantages]


def approx(values, tolerance=1e-6):
    return pytest.approx(values, abs=tolerance)


def test_standardised_rewards_are_in_population_standard_deviations():
    # Group 1: mean 0.5, std 0.5; group 2 is constant.
    assert standardised_advantages([1, 0, 0, 1, 2, 2, 2, 2], 4, eps=0) == [1, -1, -1, 1, 0, 0, 0, 0]


def test_the_sample_standard_deviation_is_an_option():
    # Mean 1.5, squared deviations 2.25 + 0.25 + 0.25 + 2.25 = 5, std sqrt(5 / 3) = 1.290994: -1.161895, ...
    advantages = standardised_advantages([0, 1, 2, 3], 4, eps=0, ddof=1)
    assert advantages == approx([-1.161895004, -0.387298335, 0.387298335, 1.161895004], 1e-9)


def test_eps_is_added_to_the_standard_deviation():
    # Deviations of 0.5 over 0.5 + 0.5 = 1.
    assert standardised_advantages([1, 0], 2, eps=0.5) == [0.5, -0.5]


def test_centred_rewards_keep_their_scale():
    assert centred_advantages([1, 0, 0, 1], 4) == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out_takes_the_mean_of_the_others():
    # Sum 12: 1 - 11/3 = -8/3, 2 - 10/3 = -4/3, 3 - 9/3 = 0, 6 - 6/3 = 4.
    assert leave_one_out_advantages([1, 2, 3, 6], 4) == approx([-8 / 3, -4 / 3, 0, 4], 1e-12)


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 1.0]])
def test_values_of_which_one_is_nan_are_not_constant_wherever_it_stands(values):
    assert not is_constant(values)
    assert is_constant([1.0, 1.0 + 1e-7, 1.0])
    assert not is_constant([1.0, 1.1])


def test_maxrl_divides_by_the_success_rate():
    # Mean 0.25: (1 - 0.25) / 0.25 = 3 and (0 - 0.25) / 0.25 = -1.
    assert maxrl_advantages([1, 0, 0, 0], 4) == [3, -1, -1, -1]


def test_maxrl_is_zero_when_the_mean_is_not_positive():
    assert maxrl_advantages([0, 0, -1, 1, -2, 1], [0, 0, 1, 1, 2, 2]) == [0.0] * 6


def test_gdpo_normalises_each_reward_before_they_are_added():
    # Reward 1 of one group (1, 0, 1, 0): A = 1, -1, 1, -1. Reward 2 (10, 10, 0, 0): A = 1, 1, -1, -1.
    # Weights 1 and 0.5: sums 1.5, -0.5, 0.5, -1.5; mean 0, std sqrt((2.25 + 0.25 + 0.25 + 2.25) / 4) = 1.118034.
    rewards = [[1, 10], [0, 10], [1, 0], [0, 0]]
    expected = [1.5 / 1.118034, -0.5 / 1.118034, 0.5 / 1.118034, -1.5 / 1.118034]
    assert gdpo_advantages(rewards, [1.0, 0.5], 4, eps=0) == approx(expected)


def test_gdpo_whitens_over_the_batch_and_keeps_groups_without_a_signal_at_zero():
    # Group 1 has A = 1, -1, group 2 is constant: std over the four rows sqrt(2 / 4) = 0.707107.
    assert gdpo_advantages([[1], [0], [5], [5]], [1.0], 2, eps=0) == approx([1.414214, -1.414214, 0, 0])
    assert gdpo_advantages([[1], [0], [5], [5]], [1.0], 2)[2:] == [0.0, 0.0]


def test_gdpo_lets_one_reward_function_abstain():
    # Reward 2 exists for rows 0 and 1 only: A_2 = 1, -1. Reward 1 (0, 0, 1, 1): A_1 = -1, -1, 1, 1.
    # Sums 0, -2, 1, 1; std sqrt(6 / 4) = 1.224745.
    rewards = [[0, 3], [0, 1], [1, None], [1, None]]
    expected = [0, -2 / 1.224745, 1 / 1.224745, 1 / 1.224745]
    assert gdpo_advantages(rewards, [1.0, 1.0], 4, eps=0) == approx(expected)


def test_a_reward_function_that_abstains_leaves_the_weighted_sum():
    # 2 * 1 + 3 * 4 = 14; 2 * 1 alone; nothing at all.
    assert weighted_rewards([[1, 4], [1, None], [None, None]], [2.0, 3.0]) == [14.0, 2.0, None]


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_an_abstaining_row_leaves_its_group_and_gets_zero(estimate):
    with_gap = estimate([3, None, 1, 2], 4)
    without = estimate([3, 1, 2], 3)
    assert with_gap == [without[0], 0.0, without[1], without[2]]


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1] * 8,  # the float32 mean of eight 0.1 is not 0.1: a test of std > 0 would let this pass
        [1e6 + 0.1] * 3,  # a spread of rounding size at a large offset
        [7.0],
        [None, 7.0, None],
        [None, None],
        [1e9, 1e9 + 1],  # a spread of 1e-9 of the magnitude is noise of the reward function
    ],
)
def test_constant_and_single_member_groups_give_exactly_zero(estimate, rewards):
    assert estimate(rewards, [0] * len(rewards)) == [0.0] * len(rewards)


def test_a_small_but_real_spread_is_a_signal():
    # 1e-5 is above the tolerance 1e-6 * max(1, 0.1).
    assert standardised_advantages([0.1, 0.10001], 2, eps=0) == approx([-1, 1])


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_four_rollouts_of_one_task_are_one_group_and_not_four(estimate):
    advantages = estimate([1, 0, 1, 0], ["a", "a", "a", "a"])
    assert advantages[0] > 0 > advantages[1]


def test_groups_may_differ_in_size_and_lie_scattered():
    # Group "a": rows 0, 2, 4 with 0, 3, 6, mean 3; group "b": rows 1, 3 with 1, 2, mean 1.5.
    assert centred_advantages([0, 1, 3, 2, 6], ["a", "b", "a", "b", "a"]) == [-3, -0.5, 0, 0.5, 3]


reward_groups = st.lists(st.integers(-8, 8), min_size=4, max_size=12).map(lambda r: r[: len(r) // 2 * 2])


@pytest.mark.parametrize("estimate", ESTIMATORS)
@given(rewards=reward_groups, order=st.randoms(use_true_random=False))
def test_permuting_rows_permutes_advantages(estimate, rewards, order):
    ids = [i % 2 for i in range(len(rewards))]
    rows = list(range(len(rewards)))
    order.shuffle(rows)
    straight = estimate(rewards, ids)
    assert estimate([rewards[i] for i in rows], [ids[i] for i in rows]) == approx([straight[i] for i in rows], 1e-12)


@pytest.mark.parametrize("estimate", ESTIMATORS[:3])
@given(rewards=reward_groups, shift=st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(estimate, rewards, shift):
    assert estimate([r + shift for r in rewards], 2) == approx(estimate(rewards, 2), 1e-9)


@given(rewards=reward_groups, factor=st.sampled_from([0.25, 3.0, 100.0]))
def test_only_normalised_advantages_ignore_the_scale(rewards, factor):
    scaled = [factor * r for r in rewards]
    assert standardised_advantages(scaled, 2, eps=0) == approx(standardised_advantages(rewards, 2, eps=0), 1e-9)
    assert centred_advantages(scaled, 2) == approx([factor * a for a in centred_advantages(rewards, 2)], 1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_with_its_row(value):
    with pytest.raises(ValueError, match=rf"rewards must be finite .*got {value} in row 2"):
        centred_advantages([0.0, 1.0, value, 1.0], 4)


def test_a_group_size_that_does_not_divide_the_rows_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="divides the 6 rows, got 4"):
        centred_advantages([0.0] * 6, 4)


def test_group_ids_must_number_the_rows():
    with pytest.raises(ValueError, match="one entry per row of rewards, 3, got 2"):
        centred_advantages([0.0] * 3, [0, 1])


def test_leave_one_out_refuses_groups_of_one():
    with pytest.raises(ValueError, match="at least 2 for a leave-one-out baseline, got 1"):
        leave_one_out_advantages([1.0, 2.0], 1)
    with pytest.raises(ValueError, match="rloo: group_structure must be at least 2, got 1"):
        make_algorithm("rloo").compute_advantages([1.0, 2.0], 1)


def test_every_row_must_have_a_reward_per_weight():
    with pytest.raises(ValueError, match="one entry per reward weight, 2, got 1 in row 1"):
        weighted_rewards([[1, 2], [1]], [1.0, 1.0])


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Rewards 3, 1 (mean 2, std 1): standardised +-1, centred +-1 as well, leave-one-out 3 - 1 = 2, MaxRL 1 / 2.
        ("standardised", [1.0, -1.0]),
        ("centred", [1.0, -1.0]),
        ("leave_one_out", [2.0, -2.0]),
        ("maxrl", [0.5, -0.5]),
        # One group only: the standardised values have batch std 1.
        ("gdpo", [1.0, -1.0]),
    ],
)
def test_the_estimator_is_an_option_of_group_relative_algorithms(advantage, expected):
    assert make_algorithm("grpo", advantage=advantage).compute_advantages([3, 1], 2).tolist() == approx(expected, 1e-5)


@pytest.mark.parametrize("advantage", ["standardised", "gdpo"])
def test_the_sample_standard_deviation_is_an_option_of_the_algorithm(advantage):
    # Groups (2, 0) and (1, 1, 4): with ddof 1 std sqrt(2) and sqrt(3), so 0.707107 and 2 / 1.732051 = 1.154701.
    # gdpo then divides by the std of all five values, sqrt((2 * 0.5 + 2 / 3 + 4 / 3) / 5) = 0.774597.
    algorithm = make_algorithm("grpo", advantage=advantage, ddof=1, eps=0.0)
    advantages = algorithm.compute_advantages([2, 0, 1, 1, 4], ["a", "a", "b", "b", "b"]).tolist()
    scale = 0.774597 if advantage == "gdpo" else 1.0
    assert advantages == approx([a / scale for a in (0.707107, -0.707107, -0.577350, -0.577350, 1.154701)], 1e-5)


def test_drgrpo_normalises_on_request():
    # Rewards 4, 0: centred +-2, std 2.
    assert make_algorithm("dr-grpo").compute_advantages([4, 0], 2).tolist() == [2.0, -2.0]
    assert make_algorithm("dr-grpo", normalize=True).compute_advantages([4, 0], 2).tolist() == approx([1, -1], 1e-5)
