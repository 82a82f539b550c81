"""Every metric of a step, counted by hand."""

# pyright: reportOptionalOperand=false, reportOptionalSubscript=false

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxrl.algo import make_algorithm
from mlxrl.env import StopReason
from mlxrl.rollout import Role, RolloutStats
from mlxrl.train import NamedReward, Objective, batch_gradient, make_batch
from mlxrl.train.metrics import cost_metrics, mean_metrics, rollout_metrics
from mlxrl.train.rewards import ENVIRONMENT


def test_the_numbers_of_a_rollout_are_those_counted_by_hand(episode):
    def rewarded(trajectory, **parts):
        return replace(trajectory, reward_parts=parts)

    trajectories = [
        rewarded(episode(0, (2, 3), reward=1.0), f=1.0, g=None),
        rewarded(episode(0, (4,), reward=1.0, seed=1), f=0.5, g=2.0),
        rewarded(episode(1, (1,), reward=0.0, truncated=True), f=0.0, g=1.0),
        rewarded(episode(1, (6,), reward=0.5, seed=1), f=0.0, g=None),
        episode(2, (8, 1), failed=True),
    ]
    assert rollout_metrics(trajectories, [NamedReward("f", 1.0), NamedReward("g", 1.0)]) == pytest.approx(
        {
            "reward": 2.5 / 4,
            # squared distances from 0.625: 0.140625 twice, 0.390625, 0.015625
            "reward_std": math.sqrt(0.6875 / 4),
            "frac_reward_zero_std": 2 / 3,  # group 0 is constant, group 2 has no reward at all
            "completions/mean_length": (5 + 4 + 1 + 6 + 9) / 5,
            "completions/min_length": 1,
            "completions/max_length": 9,
            "completions/clipped_ratio": 1 / 5,
            "num_turns": (2 + 1 + 1 + 1 + 2) / 5,
            "failed": 1,
            "nonfinite_samples": 0,
            "num_tokens": 25,
            "rewards/f/mean": 1.5 / 4,
            "rewards/g/mean": 3 / 2,  # of the two that did not abstain
        }
    )


def test_success_is_an_end_by_the_environment_with_a_reward_for_the_last_turn(episode):
    def ended(reason, *paid, invalid=()):
        trajectory = episode(0, (2,) * len(paid), turn_rewards=paid)
        turns = [replace(turn, info={"invalid_action": i in invalid}) for i, turn in enumerate(trajectory.turns)]
        return replace(trajectory, stop_reason=reason, turns=tuple(turns))

    trajectories = [
        ended(StopReason.env_done, -0.6, -0.6, 1.0, invalid=(0, 1)),  # won, whatever the way there cost
        ended(StopReason.env_done, 1.0, 0.0),  # over without a reward: a loss
        ended(StopReason.max_turns, 0.0, 0.5),  # paid, and yet not at its end
        ended(StopReason.context, 0.5),
        ended(StopReason.stop, 1.0),  # the only turn there is
        ended(StopReason.length, 1.0),  # paid for an answer that a limit of tokens cut
        replace(ended(StopReason.env_done, 1.0), error="a reward function broke"),
        episode(1, (3, 1), failed=True),  # its turns have no info at all
    ]
    metrics = rollout_metrics(trajectories, [NamedReward(ENVIRONMENT, 1.0)])
    assert metrics["success_rate"] == pytest.approx(2 / 8)
    assert metrics["invalid_action_rate"] == pytest.approx(2 / (3 + 2 + 2 + 1 + 1 + 1 + 1 + 2))
    assert metrics["num_turns"] == pytest.approx(13 / 8)
    assert metrics["failed"] == 2


def test_actions_are_invalid_where_a_plain_truth_value_says_so_and_cut_observations_are_counted(episode):
    values = [True, np.True_, 1, False, 0, None, "no", np.zeros(3), mx.ones((2,)), [1]]
    trajectory = episode(0, (1,) * len(values))
    turns = [
        replace(turn, info={"invalid_action": value}, observation_cut=place in (1, 4))
        for place, (turn, value) in enumerate(zip(trajectory.turns, values, strict=True))
    ]
    metrics = rollout_metrics([replace(trajectory, turns=tuple(turns))], [NamedReward(ENVIRONMENT, 1.0)])
    assert metrics["invalid_action_rate"] == pytest.approx(3 / 10)
    assert metrics["observation_cut_rate"] == pytest.approx(2 / 10)


def test_rewards_that_are_equal_up_to_rounding_count_as_equal(episode):
    # 0.1 + 0.2 is 0.30000000000000004
    trajectories = [episode(0, (2,), reward=reward, seed=i) for i, reward in enumerate((0.3, 0.1 + 0.2))]
    assert rollout_metrics(trajectories, [])["frac_reward_zero_std"] == 1.0


def test_the_cost_of_a_step_is_that_of_all_its_draws():
    first = RolloutStats(decode_forwards=7, prefill_tokens=30, peak_cache_bytes=2**29)
    second = RolloutStats(decode_forwards=2, prefill_tokens=12, peak_cache_bytes=2**28)
    assert cost_metrics([first, second]) == {
        "rollout/decode_forwards": 9.0,
        "rollout/prefill_tokens": 42.0,
        "rollout/peak_cache_gb": 0.5,  # they follow one another: the larger counts
    }


def test_steps_on_one_batch_are_averaged_their_maxima_taken_and_their_counts_summed():
    steps = [
        {"loss": 1.0, "sampling_logp_difference/max": 0.5, "skipped": 1.0, "scored_rows": 4.0, "scored_share": 1.0},
        {"loss": 2.0, "sampling_logp_difference/max": 0.1, "skipped": 0.0, "scored_rows": 2.0, "scored_share": 0.5},
    ]
    assert mean_metrics(steps) == {
        "loss": 1.5,
        "sampling_logp_difference/max": 0.5,
        "skipped": 1.0,
        "scored_rows": 6.0,
        "scored_share": 0.75,
    }
    for largest in ([math.nan, 0.1], [0.5, math.nan]):
        broken = [step | {"sampling_logp_difference/max": value} for step, value in zip(steps, largest, strict=True)]
        assert math.isnan(mean_metrics(broken)["sampling_logp_difference/max"])
    # two updates that blew up in opposite directions have no mean
    blown = [{"loss": loss, "scored_rows": 1.0} for loss in (math.inf, -math.inf)]
    assert math.isnan(mean_metrics(blown)["loss"])


@pytest.mark.parametrize("broken", [0, 1])
def test_a_largest_difference_that_is_no_number_is_seen_in_any_micro_batch(policy, episode, broken):
    episodes = [episode(0, (4,), reward=1.0), episode(0, (2,), reward=0.0)]
    (segment,) = episodes[broken].segments
    unknown = np.full_like(segment.sampler_logprobs, np.nan)
    episodes[broken] = replace(episodes[broken], segments=(replace(segment, sampler_logprobs=unknown),))
    algorithm = make_algorithm("grpo")
    batch = make_batch(policy, episodes, algorithm, rewards=[[1.0], [0.0]], reward_weights=[1.0])
    _, metrics = batch_gradient(policy, batch, Objective(algorithm), max_rows=1)
    assert metrics["forwards/score"] == 2
    assert math.isnan(metrics["sampling_logp_difference/max"])


def test_what_is_measured_is_the_mean_of_the_updates_that_scored_rows():
    nothing = {"entropy": math.nan, "sampling_logp_difference/max": math.nan, "scored_rows": 0.0}
    something = [{"entropy": e, "sampling_logp_difference/max": e, "scored_rows": 2.0} for e in (1.0, 2.0)]
    combined = mean_metrics([nothing, something[0], nothing, something[1]])
    assert combined == {"entropy": 1.5, "sampling_logp_difference/max": 2.0, "scored_rows": 4.0}
    assert math.isnan(mean_metrics([nothing, nothing])["entropy"])


@pytest.mark.parametrize(("limits", "passes"), [({}, 1), ({"max_rows": 1}, 3), ({"max_tokens": 19}, 2)])
def test_the_numbers_of_an_update_are_those_of_a_plain_loop_over_tokens(policy, episode, limits, passes):
    model, algorithm = policy, make_algorithm("grpo", clip_low=0.1, clip_high=0.1)
    episodes = [
        episode(0, (4, 2), reward=1.0, echo=True),
        episode(0, (1,), reward=0.0, seed=1),
        episode(1, (3,), reward=0.5, seed=2),  # alone in its group: run for the KL and the world model's sake only
    ]
    # the world model foresees one of its two tokens
    (first, _) = np.flatnonzero(episodes[0].segments[0].roles == Role.ECHO)
    token_ids = episodes[0].segments[0].token_ids.copy()
    token_ids[first] = np.array(model(mx.array(token_ids[None, :first]))).argmax(axis=-1)[0, -1]
    episodes[0] = replace(episodes[0], segments=(replace(episodes[0].segments[0], token_ids=token_ids),))
    given = {"rewards": [[1.0], [0.0], [0.5]], "reward_weights": [1.0], "temperature": 0.8, "reference": True}
    batch = make_batch(model, episodes, algorithm, old=True, **given)
    shift = mx.array(np.random.default_rng(0).uniform(-0.3, 0.3, batch.weights.shape).astype(np.float32))
    batch = replace(batch, view=replace(batch.view, old_logprobs=batch.view.old_logprobs + shift))
    objective = Objective(algorithm, beta=0.2, echo_alpha=0.3)
    _, metrics = batch_gradient(model, batch, objective, **limits)

    policy = kl = echo = foreseen = ratios = clipped = entropy = difference = largest = 0.0
    advantages = {0: 0.5 / (0.5 + 1e-6), 1: -0.5 / (0.5 + 1e-6), 2: 0.0}  # mean and deviation of (1, 0) are 0.5
    count, echo_count = 6 + 1 + 3, 2
    for row, trajectory in enumerate(episodes):
        segment = trajectory.segments[0]
        logits = np.array(model(mx.array(segment.token_ids[None, :])))[0].astype(np.float64)
        trained = 0
        for place, role in enumerate(segment.roles):
            if role == Role.MASKED:
                continue
            scaled = logits[place - 1] / (1.0 if role == Role.ECHO else 0.8)
            logs = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
            logp = logs[segment.token_ids[place]]
            column, trained = trained, trained + 1
            if role == Role.ECHO:
                echo -= logp / echo_count
                foreseen += (scaled.argmax() == segment.token_ids[place]) / echo_count
                continue
            rho = math.exp(logp - batch.view.old_logprobs[row, column].item())
            d = logp - batch.view.reference_logprobs[row, column].item()
            bounded = min(rho * advantages[row], np.clip(rho, 0.9, 1.1) * advantages[row])
            policy -= bounded / count
            kl += (math.exp(-d) + d - 1) / count
            ratios += rho / count
            clipped += ((advantages[row] > 0 and rho > 1.1) or (advantages[row] < 0 and rho < 0.9)) / count
            entropy -= (np.exp(logs) * logs).sum() / count
            gap = abs(logp - segment.sampler_logprobs[place])
            difference, largest = difference + gap / count, max(largest, gap)
    assert 0 < clipped < 1
    assert foreseen == 0.5
    assert metrics == pytest.approx(
        {
            "loss": policy + 0.2 * kl + 0.3 * echo,
            "policy_loss": policy,
            "kl": kl,
            "loss_echo": echo,
            "echo_accuracy": foreseen,
            "ratio": ratios,
            "clip_ratio": clipped,
            "entropy": entropy,
            "sampling_logp_difference/mean": difference,
            "sampling_logp_difference/max": largest,
            "scored_rows": 3,
            "scored_share": 1,
            "forwards/score": passes,
        },
        rel=1e-4,
        abs=1e-6,
    )
