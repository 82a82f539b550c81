# pyright: reportIndexIssue=false, reportArgumentType=false
# Tolist() and item() are typed as any list or scalar.

import math

import mlx.core as mx
import pytest

from mlxrl.algo import (
    cispo_surrogate,
    clipped_surrogate,
    geometric_ratio,
    geometric_token_ratio,
    gmpo_surrogate,
    is_clipped,
    kl_penalty,
    log_ratio,
    make_algorithm,
    sapo_surrogate,
    sequence_ratio,
    token_ratio,
    unclipped_surrogate,
)


def scalar(value):
    return mx.array([[value]])


def value_and_slope(surrogate, ratio):
    """Return the loss and d loss / d logp at a ratio, where logp = ln ratio and old = 0."""
    logp = scalar(math.log(ratio))
    mask = mx.ones((1, 1))
    value, slope = mx.value_and_grad(lambda x: mx.sum(surrogate(token_ratio(x, mx.zeros((1, 1)), mask))))(logp)
    return value.item(), slope.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, +1.0, -1.0, -1.0),  # on policy: the plain policy gradient
        (1.0, -1.0, +1.0, +1.0),
        (1.1, +1.0, -1.1, -1.1),  # inside the clips: the ratio weighs the gradient
        (1.5, +1.0, -1.2, 0.0),  # already likelier than 1 + 0.2: no push
        (0.5, -1.0, +0.8, 0.0),  # already unlikelier than 1 - 0.2: no push
        (1.5, -1.0, +1.5, +1.5),  # likely and bad: pushed down, not clipped
        (0.5, +1.0, -0.5, -0.5),  # unlikely and good: pulled up, not clipped
        (1.5, 0.0, 0.0, 0.0),  # no advantage: nothing
    ],
)
def test_the_clipped_surrogate_is_flat_only_past_the_bound_it_pushes_to(ratio, advantage, loss, slope):
    got = value_and_slope(lambda rho: clipped_surrogate(rho, scalar(advantage), clip_low=0.2, clip_high=0.2), ratio)
    assert got == pytest.approx((loss, slope), abs=1e-6)
    flat = is_clipped(scalar(ratio), scalar(advantage), 0.2, 0.2).item()
    assert flat == (slope == 0.0 and advantage != 0.0)


def test_a_side_without_a_bound_stays_open():
    ratios, advantages = mx.array([[1.5, 0.5]]), mx.array([[1.0, -1.0]])
    assert is_clipped(ratios, advantages, None, 0.2).tolist() == [[True, False]]
    assert is_clipped(ratios, advantages, 0.2, None).tolist() == [[False, True]]
    assert clipped_surrogate(ratios, advantages, clip_low=None, clip_high=None).tolist() == [[-1.5, 0.5]]
    assert unclipped_surrogate(ratios, advantages).tolist() == [[-1.5, 0.5]]


def test_cispo_differentiates_the_log_prob_alone():
    logp = mx.array([[-0.5]])
    slope = mx.grad(lambda x: mx.sum(cispo_surrogate(mx.exp(x + 2.5), scalar(2.0), x, cap=5.0)))(logp)
    # The ratio e^2 = 7.39 is capped at 5: -5 * 2 = -10; the ratio itself is a constant.
    assert slope.item() == pytest.approx(-10.0, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # 4 / tau * 0.5 = 2 and 4 / 1.05 * 0.5 = 1.904762; the slope at ratio 1 is -A whatever tau.
        (1.0, +1.0, -2.0, -1.0),
        (1.0, -1.0, +1.904762, +1.0),
        # sigmoid(1) = 0.731059: 4 * 0.731059 = 2.924234; slope 4 * 0.731059 * 0.268941 * 2 = 1.572896.
        (2.0, +1.0, -2.924234, -1.572896),
        # sigmoid(1.05) = 0.740775: 4 / 1.05 * 0.740775 = 2.821999; slope 4 * 0.740775 * 0.259225 * 2 = 1.536221.
        (2.0, -1.0, +2.821999, +1.536221),
    ],
)
def test_sapo_has_the_policy_gradient_at_ratio_one_and_fades_away_from_it(ratio, advantage, loss, slope):
    got = value_and_slope(lambda rho: sapo_surrogate(rho, scalar(advantage)), ratio)
    assert got == pytest.approx((loss, slope), abs=2e-6)


def test_gmpo_clips_each_token_on_the_side_of_its_advantage():
    d = mx.array([[0.6, -0.6], [0.6, -0.6], [0.2, 0.4]])
    advantages = mx.array([[2.0, 2.0], [-1.0, -1.0], [1.0, 1.0]])
    losses = gmpo_surrogate(d, advantages, mx.array([[1, 1], [1, 1], [1, 0]]))
    # A > 0: (0.4 - 0.6) / 2 = -0.1, -2 exp(-0.1) = -1.809675. A < 0: (0.6 - 0.4) / 2 = 0.1, exp(0.1) = 1.105171.
    # The last row has one token: -exp(0.2) = -1.221403.
    assert losses[:, 0].tolist() == pytest.approx([-1.809675, 1.105171, -1.221403], abs=1e-6)
    assert losses[:, 1].tolist() == losses[:, 0].tolist()


def test_gmpo_counts_a_token_as_clipped_by_the_log_of_its_ratio():
    # exp(-0.4) = 0.670 and exp(0.4) = 1.492: 0.65 and 1.5 are outside, 0.68 and 1.48 inside.
    ratios, up = mx.array([[0.65, 0.68, 1.48, 1.5]]), mx.ones((1, 4))
    gmpo = make_algorithm("gmpo")
    assert gmpo.clipped(ratios, up).tolist() == [[False, False, False, True]]
    assert gmpo.clipped(ratios, -up).tolist() == [[True, False, False, False]]


def test_ratios_of_a_trajectory_are_products_and_geometric_means_of_its_tokens():
    logp = mx.log(mx.array([[2.0, 0.5, 8.0, 99.0]]))
    old, mask = mx.zeros((1, 4)), mx.array([[1, 1, 1, 0]])
    assert token_ratio(logp, old, mask).tolist()[0] == pytest.approx([2.0, 0.5, 8.0, 1.0], rel=1e-6)
    # 2 * 0.5 * 8 = 8; its cube root 2. The fourth position is masked and takes the row's value.
    assert sequence_ratio(logp, old, mask).tolist()[0] == pytest.approx([8.0] * 4, rel=1e-6)
    assert geometric_ratio(logp, old, mask).tolist()[0] == pytest.approx([2.0] * 4, rel=1e-6)
    assert geometric_token_ratio(logp, old, mask).tolist()[0] == pytest.approx([2.0] * 4, rel=1e-6)


def test_a_token_of_gspo_token_moves_its_own_term_only():
    logp, old, mask = mx.array([[0.2, 0.4]]), mx.zeros((1, 2)), mx.ones((1, 2))
    s = math.exp(0.3)

    def first_term(ratio):
        return mx.grad(lambda x: ratio(x, old, mask)[0, 0])(logp).tolist()[0]

    # The sequence ratio spreads d s / d logp = s / n over both tokens; the token form gives the first one all of s.
    assert first_term(geometric_ratio) == pytest.approx([s / 2, s / 2], abs=1e-6)
    assert first_term(geometric_token_ratio) == pytest.approx([s, 0.0], abs=1e-6)


def test_the_exponent_is_clamped_to_twenty_nats():
    logp, mask = mx.array([[30.0, -30.0]]), mx.ones((1, 2))
    e20 = math.exp(20)
    assert token_ratio(logp, mx.zeros((1, 2)), mask).tolist()[0] == pytest.approx([e20, 1 / e20], rel=1e-5)
    # A sum of 15 + 15 is clamped as a sum, a mean of 15 not at all.
    pair = mx.array([[15.0, 15.0]])
    assert sequence_ratio(pair, mx.zeros((1, 2)), mask)[0, 0].item() == pytest.approx(e20, rel=1e-5)
    assert geometric_ratio(pair, mx.zeros((1, 2)), mask)[0, 0].item() == pytest.approx(math.exp(15), rel=1e-5)


def test_kl_estimators_and_their_gradients():
    # log ref - log pi = ln 2, 0, -ln 2, so D = -ln 2, 0, ln 2.
    d = math.log(2)
    reference = mx.array([[-1.0 + d, -1.0, -1.0 - d]])
    logp = mx.full((1, 3), -1.0)

    def both(estimator):
        total = mx.value_and_grad(lambda x: mx.sum(kl_penalty(x, reference, estimator)))
        return kl_penalty(logp, reference, estimator).tolist()[0], total(logp)[1].tolist()[0]

    # k1 = D with gradient 1; k2 = D^2 / 2 = 0.240227 with gradient D;
    # k3 = 2 - ln 2 - 1 = 0.306853, 0, 0.5 + ln 2 - 1 = 0.193147 with gradient 1 - exp(-D) = -1, 0, 0.5.
    for estimator, values, slopes in [
        ("k1", [-d, 0, d], [1, 1, 1]),
        ("k2", [0.240227, 0, 0.240227], [-d, 0, d]),
        ("k3", [0.306852819, 0, 0.193147181], [-1, 0, 0.5]),
    ]:
        got_values, got_slopes = both(estimator)
        assert got_values == pytest.approx(values, abs=1e-6)
        assert got_slopes == pytest.approx(slopes, abs=1e-6)


def test_no_gradient_flows_into_the_reference():
    slope = mx.grad(lambda r: mx.sum(kl_penalty(mx.array([[-1.0]]), r)))(mx.array([[-2.0]]))
    assert slope.item() == 0.0


def test_advantages_are_constants_for_the_loss():
    algorithm = make_algorithm("grpo")
    ones = mx.ones((1, 1))
    slope = mx.grad(lambda a: mx.sum(algorithm.token_loss(-ones, None, None, a, ones)))(ones)
    assert slope.item() == 0.0


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="estimator must be one of k1, k2, k3, got 'k4'"):
        kl_penalty(mx.zeros((1, 1)), mx.zeros((1, 1)), "k4")


def test_shapes_are_checked_at_the_door_with_both_values():
    with pytest.raises(ValueError, match=r"logp must have rank 2, got rank 1 with shape \(3,\)"):
        log_ratio(mx.zeros(3), None, mx.ones(3))
    with pytest.raises(ValueError, match=r"old must have the shape of logp, \(2, 3\), got \(3, 2\)"):
        log_ratio(mx.zeros((2, 3)), mx.zeros((3, 2)), mx.ones((2, 3)))
    grpo = make_algorithm("grpo")
    door = {"policy_logprobs": mx.zeros((2, 3)), "old_policy_logprobs": None, "advantages": mx.ones(2)}
    with pytest.raises(ValueError, match="exactly one of completion_mask and action_mask must be given, got 0"):
        grpo.compute_loss(**door)
    with pytest.raises(ValueError, match=r"must be given when beta is not 0, got None with beta 0\.1"):
        grpo.compute_loss(**door, action_mask=mx.ones((2, 3)), beta=0.1)
    with pytest.raises(ValueError, match=r"advantages must have the shape of the rows of policy_logprobs, \(2,\), got"):
        grpo.compute_loss(**{**door, "advantages": mx.ones(3)}, action_mask=mx.ones((2, 3)))


def test_a_square_batch_does_not_confuse_rows_with_tokens():
    # B = T = 2: the advantage belongs to the row. Trajectory 1 gets -1 and -1, trajectory 2 +2 and +2.
    grpo = make_algorithm("grpo")

    def loss(x):
        return grpo.compute_loss(
            policy_logprobs=x,
            old_policy_logprobs=None,
            advantages=mx.array([1.0, -2.0]),
            action_mask=mx.ones((2, 2)),
        ).loss

    assert mx.grad(loss)(mx.zeros((2, 2))).tolist() == [[-0.25, -0.25], [0.5, 0.5]]
