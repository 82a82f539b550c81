"""Environments, tasks and rewards for reinforcement learning of language models, in plain Python."""

from mlxrl.env.arithmetic import ArithmeticSuite
from mlxrl.env.dataset import DatasetSuite
from mlxrl.env.game import GameSuite, TextGame
from mlxrl.env.guess_number import GuessNumberEnv
from mlxrl.env.key_door import KeyDoorEnv
from mlxrl.env.numbers import answer_number
from mlxrl.env.protocol import EnvFactory, Environment, RewardWeights, Split, StepResult, StopReason, Suite
from mlxrl.env.recurring_text import RecurringStateTextEnv
from mlxrl.env.registry import FactorySuite, SuiteBuilder, env_names, make_env, register_env
from mlxrl.env.rewards import RewardFunction, register_reward, reward_function, reward_names
from mlxrl.env.rewards_answer import answer_tag, exact_match, numeric_match
from mlxrl.env.rewards_format import format_reward
from mlxrl.env.rewards_math import math_answer, math_match
from mlxrl.env.single_turn import SingleTurnEnv
from mlxrl.env.step import as_step_result
from mlxrl.env.task import Message, Task, as_messages

__all__ = [
    "ArithmeticSuite",
    "DatasetSuite",
    "EnvFactory",
    "Environment",
    "FactorySuite",
    "GameSuite",
    "GuessNumberEnv",
    "KeyDoorEnv",
    "Message",
    "RecurringStateTextEnv",
    "RewardFunction",
    "RewardWeights",
    "SingleTurnEnv",
    "Split",
    "StepResult",
    "StopReason",
    "Suite",
    "SuiteBuilder",
    "Task",
    "TextGame",
    "answer_number",
    "answer_tag",
    "as_messages",
    "as_step_result",
    "env_names",
    "exact_match",
    "format_reward",
    "make_env",
    "math_answer",
    "math_match",
    "numeric_match",
    "register_env",
    "register_reward",
    "reward_function",
    "reward_names",
]
