"""A policy of three tokens whose policy gradient is known exactly.

pi = softmax(theta) over tokens with rewards r; J = sum_a pi_a r_a, so dJ / dtheta_a = pi_a (r_a - J). Most tests sum
the loss gradient over every possible group of samples, weighted by its probability: the estimator's expectation is
compared, not one draw of it.
"""

import itertools
import math
import random

import mlx.core as mx
import pytest

from mlxrl.algo import kl_penalty, make_algorithm

THETA = [0.3, -0.5, 0.9]
REFERENCE = [0.1, 0.4, -0.2]


def softmax(theta):
    total = sum(math.exp(x) for x in theta)
    return [math.exp(x) / total for x in theta]


PI = softmax(THETA)


def log_softmax(theta):
    return theta - mx.log(mx.sum(mx.expm1(theta) + 1))


def policy_gradient(rewards):
    value = sum(p * r for p, r in zip(PI, rewards, strict=True))
    return [p * (r - value) for p, r in zip(PI, rewards, strict=True)]


def loss_gradient(algorithm, tokens, rewards, groups):
    """Return d loss / d theta for rows of one sampled token each."""
    advantages = algorithm.compute_advantages([rewards[token] for token in tokens], groups)
    index = mx.array(tokens)

    def loss(theta):
        return algorithm.compute_loss(
            policy_logprobs=log_softmax(theta)[index][:, None],
            old_policy_logprobs=None,
            advantages=advantages,
            completion_mask=mx.ones((len(tokens), 1)),
        ).loss

    return mx.grad(loss)(mx.array(THETA, dtype=mx.float64)).tolist()


def expected_gradient(algorithm, rewards, group_size):
    total = [0.0] * 3
    for tokens in itertools.product(range(3), repeat=group_size):
        probability = math.prod(PI[token] for token in tokens)
        gradient = loss_gradient(algorithm, list(tokens), rewards, group_size)
        total = [t + probability * g for t, g in zip(total, gradient, strict=True)]
    return total


REWARDS = [1.0, 0.25, -0.5]


@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_out_is_unbiased(group_size):
    expected = [-g for g in policy_gradient(REWARDS)]
    assert expected_gradient(make_algorithm("rloo"), REWARDS, group_size) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("group_size", [2, 3])
def test_centring_shrinks_the_gradient_by_one_sample_in_the_group(group_size):
    # r_i - mean = (1 - 1/G) (r_i - mean of the others).
    expected = [-g * (1 - 1 / group_size) for g in policy_gradient(REWARDS)]
    algorithm = make_algorithm("dr-grpo", max_tokens=1)
    assert expected_gradient(algorithm, REWARDS, group_size) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("group_size", [2, 3])
def test_maxrl_climbs_a_truncated_log_likelihood_of_success(group_size):
    # For a success rate p, the expectation over a group of G is dp/dtheta (1 + (1-p) + ... + (1-p)^(G-2)): the partial
    # sums of dp/dtheta / p, the gradient of log p.
    rewards = [1.0, 0.0, 0.0]
    failure = 1 - PI[0]
    factor = sum(failure**k for k in range(group_size - 1))
    expected = [-g * factor for g in policy_gradient(rewards)]
    algorithm = make_algorithm("grpo", advantage="maxrl")
    assert expected_gradient(algorithm, rewards, group_size) == pytest.approx(expected, abs=1e-6)


def test_sampled_groups_converge_to_the_exact_gradient():
    rng = random.Random(7)
    rows = 40_000
    tokens = rng.choices(range(3), weights=PI, k=rows)
    estimate = loss_gradient(make_algorithm("rloo"), tokens, REWARDS, 4)
    # One row's contribution is at most about 1.5 * 1 in size; over 40,000 rows the standard error is below 0.004.
    assert estimate == pytest.approx([-g for g in policy_gradient(REWARDS)], abs=0.012)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # On average over pi: k1 has no gradient at all, k2 that of KL(pi || ref), k3 that of KL(ref || pi).
        ("k1", [0.0, 0.0, 0.0]),
        ("k2", "kl(pi, ref)"),
        ("k3", "kl(ref, pi)"),
    ],
)
def test_kl_estimators_in_the_loss_have_the_gradients_they_are_known_for(estimator, expected):
    ref = softmax(REFERENCE)
    if expected == "kl(pi, ref)":
        # d/dtheta_a sum_b pi_b log(pi_b / ref_b) = pi_a (log(pi_a / ref_a) - KL).
        kl = sum(p * math.log(p / q) for p, q in zip(PI, ref, strict=True))
        expected = [p * (math.log(p / q) - kl) for p, q in zip(PI, ref, strict=True)]
    elif expected == "kl(ref, pi)":
        # d/dtheta_a sum_b ref_b log(ref_b / pi_b) = pi_a - ref_a.
        expected = [p - q for p, q in zip(PI, ref, strict=True)]
    reference = mx.array([[math.log(q) for q in ref]], dtype=mx.float64)

    def loss(theta):
        weights = mx.array([PI], dtype=mx.float64)
        return mx.sum(weights * kl_penalty(log_softmax(theta)[None], reference, estimator))

    assert mx.grad(loss)(mx.array(THETA, dtype=mx.float64)).tolist() == pytest.approx(expected, abs=1e-12)
