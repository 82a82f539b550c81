"""Trajectories as lines of rollouts.jsonl, and a batch as an .npz file."""

from pathlib import Path
from typing import Any

import numpy as np

from mlxrl.rollout import Trajectory
from mlxrl.train.batch import TrainBatch


def trajectory_record(step: int, trajectory: Trajectory) -> dict[str, Any]:
    """Everything about a trajectory, in plain JSON types."""
    return {
        "step": step,
        "group": trajectory.group_id,
        "sample": trajectory.sample_index,
        "task": str(getattr(trajectory.task, "id", trajectory.task)),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.reward_parts),
        "stop_reason": str(trajectory.stop_reason),
        "error": trajectory.error,
        "policy_version": trajectory.policy_version,
        "turns": [
            {
                "observation": turn.observation if isinstance(turn.observation, str) else list(turn.observation),
                "action": turn.action,
                "reward": turn.reward,
                "state": str(turn.state_id),
            }
            for turn in trajectory.turns
        ],
        "segments": [
            {
                "token_ids": segment.token_ids.tolist(),
                "roles": segment.roles.tolist(),
                "sampler_logprobs": [round(float(value), 6) for value in segment.sampler_logprobs],
            }
            for segment in trajectory.segments
        ],
    }


def save_batch(path: Path, batch: TrainBatch) -> None:
    """The arrays of a batch, `[B, T]` each, as numpy's .npz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "roles": batch.view.roles,
        "turns": batch.view.turns,
        "advantages": batch.advantages,
        "weights": batch.weights,
        "sampler_logprobs": batch.view.sampler_logprobs,
        "old_logprobs": batch.view.old_logprobs,
        "reference_logprobs": batch.view.reference_logprobs,
    }
    rewards = [np.nan if total is None else total for total in batch.view.total_rewards]
    given: dict[str, Any] = {name: np.array(values) for name, values in arrays.items() if values is not None}
    with path.open("wb") as file:
        np.savez(file, rewards=np.array(rewards), group_ids=np.array(batch.view.group_ids), **given)
