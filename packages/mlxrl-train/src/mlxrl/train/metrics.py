"""What a step is worth knowing for, under the names the field uses."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np

from mlxrl.algo import is_constant
from mlxrl.env import StopReason
from mlxrl.rollout import RolloutStats, Trajectory
from mlxrl.train.reward_calls import NamedReward
from mlxrl.train.rewards import ENVIRONMENT, RewardLog

Metrics = dict[str, float]
# Of the optimizer steps on a batch: what is measured on the rows they score, and what is counted.
MEASURED = ("ratio", "clip_ratio", "entropy", "sampling_logp_difference/mean", "sampling_logp_difference/max")
COUNTS = ("skipped", "nonfinite", "scored_rows", "forwards/score")


def rollout_metrics(trajectories: Sequence[Trajectory], rewards: Sequence[NamedReward]) -> Metrics:
    """Rewards, lengths and ends of the trajectories of a step.

    Returns:
        reward and reward_std over all trajectories with a reward, rewards/NAME/mean, frac_reward_zero_std (share of
        groups whose rewards are all equal), completions/mean_length and /min_length and /max_length (sampled tokens of
        a trajectory), completions/clipped_ratio (share that a token limit ended), num_turns, failed, nonfinite_samples
        (trajectories with a log-prob that is no number: the policy is broken), num_tokens. Where the environment
        rewards by itself also success_rate (share of trajectories that `succeeded`), invalid_action_rate (share of
        turns whose info has "invalid_action", as True or a number that is not 0) and observation_cut_rate (share of
        turns whose observation was cut to max_observation_len). What there is nothing of has a mean of NaN.
    """
    scored = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    groups: dict[int, list[float]] = {}
    for trajectory in trajectories:
        members = groups.setdefault(trajectory.group_id, [])
        if trajectory.reward is not None:
            members.append(trajectory.reward)
    metrics = {
        "reward": mean(scored),
        "reward_std": standard_deviation(scored),
        "frac_reward_zero_std": mean([float(is_constant(members)) for members in groups.values()]),
        "completions/mean_length": mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": mean([float(trajectory.truncated) for trajectory in trajectories]),
        "num_turns": mean([len(trajectory.turns) for trajectory in trajectories]),
        "failed": float(sum(trajectory.failed for trajectory in trajectories)),
        "nonfinite_samples": float(sum(not _has_finite_logprobs(trajectory) for trajectory in trajectories)),
        "num_tokens": float(sum(lengths)),
    }
    if any(reward.name == ENVIRONMENT for reward in rewards):
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        metrics["success_rate"] = mean([float(succeeded(trajectory)) for trajectory in trajectories])
        metrics["invalid_action_rate"] = mean([float(_says_invalid(turn.info)) for turn in turns])
        metrics["observation_cut_rate"] = mean([float(turn.observation_cut) for turn in turns])
    for reward in rewards:
        values = [value for t in trajectories if (value := t.reward_parts.get(reward.name)) is not None]
        metrics[f"rewards/{reward.name}/mean"] = mean(values)
    return metrics


def failure_metrics(log: RewardLog, rewards: Sequence[NamedReward]) -> Metrics:
    """rewards/NAME/failed: the trajectories of a step that each reward function failed on."""
    return {f"rewards/{reward.name}/failed": float(log.failed(reward.name)) for reward in rewards}


def cost_metrics(costs: Sequence[RolloutStats]) -> Metrics:
    """What the rollouts of a step took: forward passes that decode, tokens that were read, GB of the largest caches."""
    return {
        "rollout/decode_forwards": float(sum(cost.decode_forwards for cost in costs)),
        "rollout/prefill_tokens": float(sum(cost.prefill_tokens for cost in costs)),
        "rollout/peak_cache_gb": max(cost.peak_cache_bytes for cost in costs) / 2**30,
    }


def mean_metrics(steps: Sequence[Metrics]) -> Metrics:
    """Each metric over several optimizer steps on one batch: the mean, of a `/max` the largest, of a count the sum.

    What is measured on scored rows is that of the steps that had some.
    """
    combined: Metrics = {}
    scoring = [step for step in steps if step["scored_rows"]] or steps
    for name in steps[0]:
        values = [step[name] for step in (scoring if name in MEASURED else steps)]
        if name.endswith("/max"):
            combined[name] = float(np.max(values))  # NaN if one is, which max may pass over
        elif name in COUNTS:
            combined[name] = math.fsum(values)
        else:
            combined[name] = sum(values) / len(values)  # not by fsum, which refuses inf - inf
    return combined


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """The population standard deviation; NaN of nothing."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))


def succeeded(trajectory: Trajectory) -> bool:
    """Whether the environment itself, and no limit of turns or tokens, ended it with a positive last reward."""
    ended = not trajectory.failed and trajectory.stop_reason in (StopReason.stop, StopReason.env_done)
    return ended and trajectory.turns[-1].reward > 0


def _has_finite_logprobs(trajectory: Trajectory) -> bool:
    return all(np.isfinite(segment.sampler_logprobs).all() for segment in trajectory.segments)


def _says_invalid(info: Mapping[str, object]) -> bool:
    """Whether a turn's info calls its action invalid, by True or a number that is not 0; anything else does not."""
    value = info.get("invalid_action")
    return isinstance(value, Real | np.bool_) and bool(value)
