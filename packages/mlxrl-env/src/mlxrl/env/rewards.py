"""Reward functions by name, and their contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from mlxrl.env.names import is_reference, load_object, unknown
from mlxrl.env.rewards_answer import answer_tag, exact_match, numeric_match
from mlxrl.env.rewards_format import format_reward
from mlxrl.env.rewards_math import math_match

RewardFunction = Callable[..., list[float | None]]
"""function(prompts=, completions=, completion_ids=, trajectories=, **columns): scores a batch at once.

Every argument holds one value for each row: `prompts` text or chat messages, `completions` the text that the model
answered with, `completion_ids` its token ids, `trajectories` the whole record with its `stop_reason` (None where
there is none), and each further keyword a column of the dataset. The result is one reward for each row; None abstains.
A function takes by name what it needs and leaves the rest to **columns.
"""

_REWARDS: dict[str, RewardFunction] = {
    "answer_tag": answer_tag,
    "exact_match": exact_match,
    "format": format_reward(),
    "math_match": math_match,
    "numeric_match": numeric_match,
}


def reward_names() -> tuple[str, ...]:
    """The names that `reward_function` knows, sorted."""
    return tuple(sorted(_REWARDS))


def register_reward(name: str, function: RewardFunction) -> None:
    """Makes a reward function known by a name.

    Raises:
        ValueError: the name is taken, or has a colon.
    """
    if name in _REWARDS or is_reference(name):
        raise ValueError(f"name must be new and without a colon, got {name!r}; taken: {', '.join(reward_names())}")
    _REWARDS[name] = function


def reward_function(name: str) -> RewardFunction:
    """The reward function that a name stands for.

    Args:
        name: one of `reward_names()`, or a user's own "path/to/file.py:function" or "package.module:function".

    Raises:
        ValueError: the name is unknown, or what it refers to cannot be found.
        TypeError: what it refers to is no function.
    """
    if is_reference(name):
        function = load_object(name)
    elif name in _REWARDS:
        function = _REWARDS[name]
    else:
        raise unknown("reward", name, _REWARDS, ", or your own path/to/file.py:function")
    if not callable(function):
        raise TypeError(f"reward {name!r} must be a function, got {type(function).__name__}")
    return cast(RewardFunction, function)
