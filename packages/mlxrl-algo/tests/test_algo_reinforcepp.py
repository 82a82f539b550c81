import math

import mlx.core as mx
import pytest

from mlxrl.algo import AlgorithmBatch, make_algorithm, paint_tokens, reinforcepp_returns, whitened


def approx(values, tolerance=1e-6):
    return pytest.approx(values, abs=tolerance)


def test_returns_charge_the_kl_of_this_token_and_all_later_ones():
    # Reward 1, k1 = 1, 2, 3, beta 0.1: 1 - 0.6, 1 - 0.5, 1 - 0.3.
    returns = reinforcepp_returns([1.0, None, 2.0], [[1, 2, 3], [9], []], 0.1)
    assert returns == [approx([0.4, 0.5, 0.7]), [], []]


def test_whitening_is_over_tokens_and_not_over_trajectories():
    # Tokens 1, 1, 1, 0: mean 0.75, std sqrt(3 / 16) = 0.433013; 0.25 and -0.75 over it.
    assert whitened([[1, 1, 1], [0]], eps=0) == [approx([0.577350] * 3), approx([-1.732051])]
    assert whitened([[2, 2], [2]]) == [[0.0, 0.0], [0.0]]


def test_values_are_painted_in_order_on_action_tokens_only():
    mask = mx.array([[0, 1, 0, 1], [1, 1, 0, 0]])
    assert paint_tokens([[1.0, 2.0], []], mask).tolist() == [[0.0, 1.0, 0.0, 2.0], [0.0] * 4]


def batch(**changes):
    fields = {
        "rewards": [1, 0],
        "group_structure": 2,
        # The second row's environment token in the middle carries the return along and is charged nothing.
        "action_mask": mx.array([[1, 1, 1, 0], [1, 0, 1, 0]]),
        "old_logprobs": mx.array([[-1.0, -1.0, -1.0, math.nan], [-1.0, math.inf, -1.0, 0.0]]),
        "reference_logprobs": mx.array([[-1.0, -2.0, -1.0, math.inf], [-3.0, 0.0, -1.0, math.nan]]),
    }
    return AlgorithmBatch.single_turn(**{**fields, **changes})


def test_advantages_are_whitened_returns_to_go():
    # k1: 0, 1, 0 and 2, 0. At beta 0.5 the returns are 0.5, 0.5, 1 and -1, 0: mean 0.2,
    # std sqrt((0.09 + 0.09 + 0.64 + 1.44 + 0.04) / 5) = 0.678233.
    algorithm = make_algorithm("reinforce++", reward_beta=0.5, eps=0.0)
    assert algorithm.needs_logprobs == {"old", "reference"}
    advantages = algorithm.advantages(batch())
    assert advantages.dtype == mx.float32
    assert advantages.tolist() == [
        approx([0.442326, 0.442326, 1.179536, 0.0]),
        approx([-1.769303, 0.0, -0.294884, 0.0]),
    ]


def test_without_kl_every_token_has_the_whitened_reward_of_its_trajectory():
    # Tokens 1, 1, 1, 0, 0: mean 0.6, std sqrt(0.24) = 0.489898.
    advantages = make_algorithm("reinforce++", eps=0.0).advantages(batch()).tolist()
    assert advantages == [approx([0.816497] * 3 + [0.0]), approx([-1.224745, 0.0, -1.224745, 0.0])]


def test_the_baseline_takes_the_mean_of_the_group_off_first():
    # Groups (5, 3) and (1, 1) of one token each: centred 1, -1, 0, 0; std sqrt(2 / 4) = 0.707107.
    rewards, mask = [5, 3, 1, 1], mx.ones((4, 1))
    plain = AlgorithmBatch.single_turn(rewards=rewards, group_structure=2, action_mask=mask)
    algorithm = make_algorithm("reinforce++", baseline=True, eps=0.0)
    assert algorithm.advantages(plain)[:, 0].tolist() == approx([1.414214, -1.414214, 0.0, 0.0])
    assert algorithm.compute_advantages(rewards, 2).tolist() == approx([1.414214, -1.414214, 0.0, 0.0])
    assert algorithm.kl_estimator == "k2"


def test_failed_and_abstaining_rows_take_no_part():
    mask = mx.ones((4, 1))
    four = AlgorithmBatch.single_turn(
        rewards=[1, 0, None, 9], group_structure=4, action_mask=mask, valid=[True, True, True, False]
    )
    advantages = make_algorithm("reinforce++", eps=0.0).advantages(four)
    assert advantages[:, 0].tolist() == approx([1.0, -1.0, 0.0, 0.0])


def test_the_baseline_variant_refuses_a_kl_in_the_reward():
    with pytest.raises(ValueError, match=r"reinforce\+\+: reward_beta must be 0 with baseline, .*got 0.1; its options"):
        make_algorithm("reinforce++", baseline=True, reward_beta=0.1)


def test_a_kl_in_the_reward_needs_its_log_probs():
    with pytest.raises(ValueError, match="reference_logprobs must be given for a KL inside the reward, got None"):
        make_algorithm("grpo", reward_beta=0.1).advantages(batch(reference_logprobs=None))
