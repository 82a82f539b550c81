"""Reinforcement learning of language models: config, batch, update step, loop, run folder."""

from mlxrl.train import _platform as _platform
from mlxrl.train.batch import TrainBatch, batch_from_rollouts, batch_from_trajectories, make_batch
from mlxrl.train.config import TrainConfig
from mlxrl.train.config_file import config_schema, config_toml, load_config, make_config, parse_override
from mlxrl.train.errors import (
    ConfigError,
    DynamicSamplingError,
    RewardError,
    RunError,
    RunFolderError,
    UnplannedError,
)
from mlxrl.train.evaluation import Evaluation, evaluate
from mlxrl.train.loop import Observer, TrainResult, located_config, resume, resumed_config, train
from mlxrl.train.plan import Plan, config_field, fitted_overrides, make_plan, memory_backend
from mlxrl.train.reward_calls import NamedReward
from mlxrl.train.rewards import RewardFault, RewardLog, score_rewards
from mlxrl.train.session import Session, open_session
from mlxrl.train.step import Step, train_step
from mlxrl.train.tasks import Curriculum, make_curriculum
from mlxrl.train.update import Objective, batch_gradient, optimizer_step, optimizer_step_trajectory

__all__ = [
    "ConfigError",
    "Curriculum",
    "DynamicSamplingError",
    "Evaluation",
    "NamedReward",
    "Objective",
    "Observer",
    "Plan",
    "RewardError",
    "RewardFault",
    "RewardLog",
    "RunError",
    "RunFolderError",
    "Session",
    "Step",
    "TrainBatch",
    "TrainConfig",
    "TrainResult",
    "UnplannedError",
    "batch_from_rollouts",
    "batch_from_trajectories",
    "batch_gradient",
    "config_field",
    "config_schema",
    "config_toml",
    "evaluate",
    "fitted_overrides",
    "load_config",
    "located_config",
    "make_batch",
    "make_config",
    "make_curriculum",
    "make_plan",
    "memory_backend",
    "open_session",
    "optimizer_step",
    "optimizer_step_trajectory",
    "parse_override",
    "resume",
    "resumed_config",
    "score_rewards",
    "train",
    "train_step",
]
