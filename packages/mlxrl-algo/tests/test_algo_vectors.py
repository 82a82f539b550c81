"""Named algorithms on two small trajectories whose every number can be worked out by hand.

Trajectory 1 has three action tokens with old probabilities 0.5, 0.4, 0.2 and ratios 1.1, 0.7, 1.3, advantage +1;
trajectory 2 has one with 0.25 and ratio 1.5, advantage -1. The other two positions are padding.
"""

import math

import mlx.core as mx
import pytest

from mlxrl.algo import (
    AlgorithmBatch,
    GiGPOAlgorithm,
    GMPOAlgorithm,
    RLOOAlgorithm,
    SAPOAlgorithm,
    make_algorithm,
    reduction_weights,
)

OLD = [[math.log(0.5), math.log(0.4), math.log(0.2)], [math.log(0.25), 0.0, 0.0]]
RATIO = [[1.1, 0.7, 1.3], [1.5, 1.0, 1.0]]
MASK = mx.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


def f64(values):
    return mx.array(values, dtype=mx.float64)


def logprobs():
    old = f64(OLD)
    return old + mx.log(f64(RATIO)), old


def loss_and_gradient(algorithm, advantages=(1.0, -1.0), **kwargs):
    """Return the loss output on the two trajectories and d loss / d logp."""
    logp, old = logprobs()
    kwargs.setdefault("weights", reduction_weights(algorithm.reduction, MASK, dtype=mx.float64))

    def loss(x):
        return algorithm.compute_loss(
            policy_logprobs=x, old_policy_logprobs=old, advantages=f64(advantages), completion_mask=MASK, **kwargs
        )

    return loss(logp), mx.grad(lambda x: loss(x).loss)(logp).tolist()


def flat(rows):
    return [value for row in rows for value in row]


def approx(values, tolerance=1e-6):
    return pytest.approx(values, abs=tolerance)


def test_grpo_of_the_paper_averages_each_trajectory_first():
    algorithm = make_algorithm("grpo", reduction="sequence_mean", clip_low=0.2, clip_high=0.2)
    output, _ = loss_and_gradient(algorithm)
    # Trajectory 1: (1.1 + 0.7 + min(1.3, 1.2)) / 3 = 1; trajectory 2: min(-1.5, -1.2) = -1.5; -(1 - 1.5) / 2 = 0.25.
    assert output.loss.item() == approx(0.25)
    # One of the four tokens is flat: ratio 1.3 at advantage +1. Ratio 1.5 at -1 is not.
    assert output.clip_fraction.item() == approx(0.25)
    # (1.1 + 0.7 + 1.3 + 1.5) / 4 = 1.15: the padding's ratio of 1 does not count.
    assert output.mean_ratio.item() == approx(1.15)


def test_grpo_with_token_mean_averages_over_all_four_tokens():
    output, _ = loss_and_gradient(make_algorithm("grpo", clip_low=0.2, clip_high=0.2))
    # -(1.1 + 0.7 + 1.2 - 1.5) / 4 = -0.375.
    assert output.loss.item() == approx(-0.375)


def test_grpo_without_clips_has_the_ratio_times_the_advantage_as_gradient():
    output, gradient = loss_and_gradient(make_algorithm("grpo"))
    # -(1.1 + 0.7 + 1.3 - 1.5) / 4 = -0.4; d loss / d logp = -rho A / 4.
    assert output.loss.item() == approx(-0.4)
    assert flat(gradient) == approx([-0.275, -0.175, -0.325, 0.375, 0.0, 0.0])


def test_grpo_adds_beta_times_the_k3_of_each_token():
    logp, _ = logprobs()
    # log ref - log pi = ln 2, 0, -ln 2 and 0: k3 = 2 - ln 2 - 1 = 0.306853, 0, 0.5 + ln 2 - 1 = 0.193147 and 0.
    reference = logp + f64([[math.log(2), 0.0, -math.log(2)], [0.0, 0.0, 0.0]])
    output, gradient = loss_and_gradient(make_algorithm("grpo"), beta=0.04, reference_logprobs=reference)
    # Mean k3 = 0.5 / 4 = 0.125; -0.4 + 0.04 * 0.125 = -0.395.
    assert output.kl.item() == approx(0.125)
    assert output.loss.item() == approx(-0.395)
    assert output.policy_gradient_loss.item() == approx(-0.4)
    # d k3 / d logp = 1 - exp(log ref - log pi) = -1, 0, 0.5, times 0.04 / 4, beside the policy gradient.
    assert flat(gradient) == approx([-0.275 - 0.01, -0.175, -0.325 + 0.005, 0.375, 0.0, 0.0])


def test_drgrpo_divides_by_its_constant_and_not_by_lengths():
    # -(3.1 - 1.5) / (2 * 8) = -0.1; with clips of 0.2 -(3.0 - 1.5) / 16 = -0.09375.
    assert loss_and_gradient(make_algorithm("dr-grpo", max_tokens=8))[0].loss.item() == approx(-0.1)
    clipped = make_algorithm("dr-grpo", max_tokens=8, clip_low=0.2, clip_high=0.2)
    assert loss_and_gradient(clipped)[0].loss.item() == approx(-0.09375)


def test_dapo_clips_higher_above_than_below():
    output, gradient = loss_and_gradient(make_algorithm("dapo"))
    # -(1.1 + 0.7 + 1.28 - 1.5) / 4 = -0.395. The third token is past 1.28 and flat; 0.7 at +1 and 1.5 at -1 stay live.
    assert output.loss.item() == approx(-0.395)
    assert flat(gradient) == approx([-0.275, -0.175, 0.0, 0.375, 0.0, 0.0])


def gspo_gradient(log_ratios, **options):
    algorithm = make_algorithm("gspo", **options)
    old = f64(OLD)
    logp = old + f64(log_ratios)
    weights = reduction_weights(algorithm.reduction, MASK, dtype=mx.float64)

    def loss(x):
        return algorithm.compute_loss(
            policy_logprobs=x,
            old_policy_logprobs=old,
            advantages=f64([1.0, -1.0]),
            completion_mask=MASK,
            weights=weights,
        ).loss

    return algorithm.ratio(logp, old, MASK), loss(logp).item(), flat(mx.grad(loss)(logp).tolist())


@pytest.mark.parametrize("importance", ["sequence", "token"])
def test_gspo_clips_whole_trajectories(importance):
    ratios, loss, gradient = gspo_gradient([[0.003, -0.001, 0.0001], [-0.001, 0.0, 0.0]], importance=importance)
    # s_1 = exp(0.0021 / 3) = 1.000700, above 1.0004 with A > 0; s_2 = exp(-0.001) = 0.999000, below 0.9997 with A < 0.
    assert ratios[:, 0].tolist() == approx([1.000700245, 0.9990005], 1e-9)
    # -(1.0004 - 0.9997) / 2 = -0.00035, and both trajectories are flat.
    assert loss == approx(-0.00035, 2e-9)
    assert gradient == [0.0] * 6


@pytest.mark.parametrize("importance", ["sequence", "token"])
def test_gspo_spreads_a_live_trajectory_evenly_over_its_tokens(importance):
    ratios, loss, gradient = gspo_gradient([[0.0006, -0.0003, 0.0003], [0.001, 0.0, 0.0]], importance=importance)
    # s_1 = exp(0.0006 / 3) = 1.00020002 is inside [0.9997, 1.0004]; s_2 = exp(0.001) = 1.0010005 is above, but A < 0.
    assert ratios[:, 0].tolist() == approx([1.00020002, 1.0010005], 1e-9)
    assert loss == approx(-(1.00020002 - 1.0010005) / 2, 1e-9)
    # d loss / d logp = -s_i A_i / (2 n_i): -1.00020002 / 6 = -0.16670000 three times, then 1.0010005 / 2 = 0.50050025.
    assert gradient == approx([-0.16670000, -0.16670000, -0.16670000, 0.50050025, 0.0, 0.0], 1e-8)


def test_rloo_pays_for_the_kl_in_the_reward():
    # Sums of log pi - log ref: 2 and 1; at beta 0.1 the rewards 1 and 0 become 0.8 and -0.1, and each is the other's
    # baseline: 0.9 and -0.9.
    batch = AlgorithmBatch.single_turn(
        rewards=[1, 0],
        group_structure=2,
        action_mask=mx.array([[1, 1, 0], [0, 1, 1]]),
        old_logprobs=mx.array([[-1.0, -1.0, math.nan], [math.nan, -1.0, -1.0]]),
        reference_logprobs=mx.array([[-2.5, -1.5, math.nan], [math.inf, -1.25, -1.75]]),
    )
    algorithm = RLOOAlgorithm(reward_beta=0.1)
    assert algorithm.needs_logprobs == {"old", "reference"}
    assert flat(algorithm.advantages(batch).tolist()) == approx([0.9, 0.9, 0.0, 0.0, -0.9, -0.9])


def test_rloo_sums_the_tokens_of_a_trajectory():
    output, gradient = loss_and_gradient(RLOOAlgorithm())
    # -((1.1 + 0.7 + 1.3) - 1.5) / 2 = -0.8; d loss / d logp = -rho A / 2.
    assert output.loss.item() == approx(-0.8)
    assert flat(gradient) == approx([-0.55, -0.35, -0.65, 0.75, 0.0, 0.0])


def test_cispo_caps_the_weight_but_keeps_the_gradient():
    output, gradient = loss_and_gradient(make_algorithm("cispo", cap=1.2))
    # Weights 1.1, 0.7, min(1.3, 1.2) and min(1.5, 1.2); log pi = ln 0.55, ln 0.28, ln 0.26 and ln 0.375:
    # -(1.1 * -0.597837 + 0.7 * -1.272966 + 1.2 * -1.347074 - 1.2 * -0.980829) / 4
    # = (0.657621 + 0.891076 + 1.616488 - 1.176995) / 4 = 0.497048.
    assert output.loss.item() == approx(0.497048)
    # d loss / d logp = -min(rho, 1.2) A / 4: nothing is dropped.
    assert flat(gradient) == approx([-0.275, -0.175, -0.3, 0.3, 0.0, 0.0])
    assert output.clip_fraction.item() == approx(0.5)


def test_sapo_gates_each_token_smoothly():
    output, gradient = loss_and_gradient(SAPOAlgorithm())
    # A > 0, tau 1: 4 sigmoid(0.1) = 2.099917, 4 sigmoid(-0.3) = 1.702230, 4 sigmoid(0.3) = 2.297770; mean 2.033306.
    # A < 0, tau 1.05: 4 / 1.05 sigmoid(1.05 * 0.5) = 3.809524 * 0.628316 = 2.393586. -(2.033306 - 2.393586) / 2.
    assert output.loss.item() == approx(0.180140)
    # d loss / d logp = -4 p (1 - p) rho A w, p the sigmoid, w = 1/6, 1/6, 1/6, 1/2:
    # 4 * 0.524979 * 0.475021 * 1.1 / 6 = 0.182876; 4 * 0.425557 * 0.574443 * 0.7 / 6 = 0.114080;
    # 4 * 0.574443 * 0.425557 * 1.3 / 6 = 0.211863; 4 * 0.628316 * 0.371684 * 1.5 / 2 = 0.700605.
    assert flat(gradient) == approx([-0.182876, -0.114080, -0.211863, 0.700605, 0.0, 0.0])


def test_gmpo_averages_clipped_log_ratios():
    output, gradient = loss_and_gradient(GMPOAlgorithm(clip_low=0.2, clip_high=0.2))
    # ln 1.1 = 0.095310, ln 0.7 = -0.356675 (A > 0: no lower clip), ln 1.3 = 0.262364 clipped to 0.2: mean -0.020455,
    # exp 0.979753. Trajectory 2: ln 1.5 = 0.405465 (A < 0: no upper clip), exp 1.5. -(0.979753 - 1.5) / 2 = 0.260124.
    assert output.loss.item() == approx(0.260124)
    # d loss / d logp = -A exp(mean) / (2 n_i), 0 where clipped: 0.979753 / 6 = 0.163292; 1.5 / 2 = 0.75.
    assert flat(gradient) == approx([-0.163292, -0.163292, 0.0, 0.75, 0.0, 0.0])
    assert output.clip_fraction.item() == approx(0.25)


def test_gigpo_weighs_tokens_by_the_advantage_of_their_turn():
    # Trajectory 1: turn 0 = tokens 0 and 1 with A 1.5, turn 1 = token 2 with A 0.5; trajectory 2: one turn, A -1.
    advantages = [[1.5, 1.5, 0.5], [-1.0, 0.0, 0.0]]
    turns = mx.array([[0, 0, 1], [0, 0, 0]])
    clipped = GiGPOAlgorithm(clip_low=0.2, clip_high=0.2)
    # 1.65, 1.05, min(0.65, 0.6) = 0.6, -1.5: -1.8 / 4 = -0.45; unclipped -1.85 / 4 = -0.4625.
    assert loss_and_gradient(clipped, advantages)[0].loss.item() == approx(-0.45)
    assert loss_and_gradient(GiGPOAlgorithm(), advantages)[0].loss.item() == approx(-0.4625)
    # By turns: -((1.65 + 1.05) / 2 + 0.6 - 1.5) / 3 = -0.15.
    weights = reduction_weights("step_mean", MASK, turns, dtype=mx.float64)
    assert loss_and_gradient(clipped, advantages, weights=weights)[0].loss.item() == approx(-0.15)
