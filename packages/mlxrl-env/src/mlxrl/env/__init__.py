"""Environments, tasks and rewards for reinforcement learning of language models, in plain Python."""

from mlxrl.env.alphabet_sort import AlphabetSortEnv
from mlxrl.env.arithmetic import ArithmeticSuite
from mlxrl.env.dataset import DatasetSuite
from mlxrl.env.frozen_lake import FrozenLakeEnv
from mlxrl.env.game import GameSuite, TextGame
from mlxrl.env.guess_number import GuessNumberEnv
from mlxrl.env.key_door import KeyDoorEnv
from mlxrl.env.levels import LevelGame
from mlxrl.env.numbers import answer_number
from mlxrl.env.protocol import EnvFactory, Environment, RewardWeights, Split, StepResult, StopReason, Suite
from mlxrl.env.recurring_text import RecurringStateTextEnv
from mlxrl.env.registry import (
    EnvDescription,
    FactorySuite,
    SuiteBuilder,
    describe_env,
    env_names,
    make_env,
    register_env,
)
from mlxrl.env.rewards import RewardFunction, register_reward, reward_function, reward_names
from mlxrl.env.rewards_answer import answer_tag, exact_match, numeric_match
from mlxrl.env.rewards_choice import choice_reward
from mlxrl.env.rewards_code import CodeTestsReward
from mlxrl.env.rewards_format import format_reward
from mlxrl.env.rewards_json import json_schema_reward
from mlxrl.env.rewards_judge import JudgeReward
from mlxrl.env.rewards_length import length_reward
from mlxrl.env.rewards_math import math_answer, math_match
from mlxrl.env.rewards_math_verify import MathReward
from mlxrl.env.rewards_text import contains_reward, regex_reward
from mlxrl.env.single_turn import SingleTurnEnv
from mlxrl.env.sokoban import SokobanEnv
from mlxrl.env.step import as_observation, as_step_result
from mlxrl.env.sync import SyncEnv
from mlxrl.env.task import Message, Task, as_messages
from mlxrl.env.tool_math import ToolMathEnv
from mlxrl.env.wordle import WordleEnv

__all__ = [
    "AlphabetSortEnv",
    "ArithmeticSuite",
    "CodeTestsReward",
    "DatasetSuite",
    "EnvDescription",
    "EnvFactory",
    "Environment",
    "FactorySuite",
    "FrozenLakeEnv",
    "GameSuite",
    "GuessNumberEnv",
    "JudgeReward",
    "KeyDoorEnv",
    "LevelGame",
    "MathReward",
    "Message",
    "RecurringStateTextEnv",
    "RewardFunction",
    "RewardWeights",
    "SingleTurnEnv",
    "SokobanEnv",
    "Split",
    "StepResult",
    "StopReason",
    "Suite",
    "SuiteBuilder",
    "SyncEnv",
    "Task",
    "TextGame",
    "ToolMathEnv",
    "WordleEnv",
    "answer_number",
    "answer_tag",
    "as_messages",
    "as_observation",
    "as_step_result",
    "choice_reward",
    "contains_reward",
    "describe_env",
    "env_names",
    "exact_match",
    "format_reward",
    "json_schema_reward",
    "length_reward",
    "make_env",
    "math_answer",
    "math_match",
    "numeric_match",
    "regex_reward",
    "register_env",
    "register_reward",
    "reward_function",
    "reward_names",
]
