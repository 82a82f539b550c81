"""Rollouts: prompts and environments in, token-exact trajectories out."""

from mlxrl.rollout import _platform as _platform
from mlxrl.rollout.chat import ChatEncoder
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.episode import EpisodeLimits, RolloutRequest
from mlxrl.rollout.generate import (
    generate_agentic_trajectories,
    generate_groups,
    group_requests,
    single_turn_environment,
)
from mlxrl.rollout.keys import derive_key, derive_seed
from mlxrl.rollout.naive import naive_rollout
from mlxrl.rollout.pieces import EncodedObservation
from mlxrl.rollout.play import RolloutStats
from mlxrl.rollout.sampling import SamplingConfig, draw
from mlxrl.rollout.trajectory import Role, Segment, Trajectory, Turn

__all__ = [
    "ChatEncoder",
    "EncodedObservation",
    "Engine",
    "EpisodeLimits",
    "Role",
    "RolloutRequest",
    "RolloutStats",
    "SamplingConfig",
    "Segment",
    "Trajectory",
    "Turn",
    "derive_key",
    "derive_seed",
    "draw",
    "generate_agentic_trajectories",
    "generate_groups",
    "group_requests",
    "naive_rollout",
    "single_turn_environment",
]
