"""Reward functions by name, and their contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from mlxrl.env.builders import checked_options
from mlxrl.env.dataset import RESERVED
from mlxrl.env.names import is_reference, load_object, unknown
from mlxrl.env.rewards_answer import answer_tag, exact_match, numeric_match
from mlxrl.env.rewards_choice import choice_reward
from mlxrl.env.rewards_code import CodeTestsReward
from mlxrl.env.rewards_format import format_reward
from mlxrl.env.rewards_json import json_schema_reward
from mlxrl.env.rewards_judge import JudgeReward
from mlxrl.env.rewards_length import length_reward
from mlxrl.env.rewards_math import math_match
from mlxrl.env.rewards_math_verify import MathReward
from mlxrl.env.rewards_text import contains_reward, regex_reward

RewardFunction = Callable[..., Any]
"""function(prompts=, completions=, completion_ids=, trajectories=, **columns): scores a batch at once.

Every argument holds one value for each row: `prompts` what the model first read, text or chat messages, `completions`
the text that it answered with, `completion_ids` its token ids, `trajectories` the whole record with its `stop_reason`
(None where there is none), and each further keyword a column of the dataset. A function takes by name what it needs
and leaves the rest to **columns.

It returns a list of one reward for each row, or an awaitable of such a list: a finite number, None to abstain, or an
exception, which it does not raise, for a row that it could not score. Two attributes are read where a function has
them: `columns`, names of the columns that it needs beyond those in its signature, and `bounded`, True where it keeps
each row to a time of its own.
"""

_REWARDS: dict[str, RewardFunction] = {
    "answer-tag": answer_tag,
    "exact": exact_match,
    "exact-match": exact_match,
    "math-match": math_match,
    "numeric": numeric_match,
    "numeric-match": numeric_match,
}
_BUILDERS: dict[str, Callable[..., RewardFunction]] = {
    "choice": choice_reward,
    "code-tests": CodeTestsReward,
    "contains": contains_reward,
    "format": format_reward,
    "json-schema": json_schema_reward,
    "length": length_reward,
    "llm-judge": JudgeReward,
    "math": MathReward,
    "regex": regex_reward,
}


def reward_names() -> tuple[str, ...]:
    """The names that `reward_function` knows, sorted."""
    return tuple(sorted(_REWARDS | _BUILDERS))


def register_reward(name: str, function: RewardFunction) -> None:
    """Makes a reward function known by a name.

    Args:
        name: a new name; underscores and capitals are read as hyphens and small letters.
        function: the function.

    Raises:
        ValueError: the name is taken, or has a colon.
    """
    name = _spelled(name)
    if name in reward_names() or is_reference(name):
        raise ValueError(f"name must be new and without a colon, got {name!r}; taken: {', '.join(reward_names())}")
    _REWARDS[name] = function


def reward_function(name: str, **options: Any) -> RewardFunction:
    """The reward function that a name stands for.

    Args:
        name: one of `reward_names()`, or a user's own "path/to/file.py:function" or "package.module:function".
        options: the function's options. Those of a user's own function are its named parameters with a default,
            which it gets by keyword.

    Raises:
        ValueError: the name or an option is unknown, an option is missing or out of range, or what the name refers to
            cannot be found.
        TypeError: what it refers to is no function, or one that cannot be called by keyword.
    """
    if not is_reference(name) and _spelled(name) in _BUILDERS:
        builder = _BUILDERS[_spelled(name)]
        checked_options(f"reward {name!r}", builder, options, where="[[rewards]] options")
        try:
            return builder(**options)
        except ValueError as error:
            raise ValueError(f"reward {name!r}: {error}") from error
    if is_reference(name):
        function = load_object(name)
    elif _spelled(name) in _REWARDS:
        function = _REWARDS[_spelled(name)]
    else:
        raise unknown("reward", name, reward_names(), ", or your own path/to/file.py:function")
    if not callable(function):
        raise TypeError(f"reward {name!r} must be a function, got {type(function).__name__}")
    function = cast(RewardFunction, function)
    _check_parameters(name, inspect.signature(function).parameters, options)
    return partial(function, **options) if options else function


def _check_parameters(name: str, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    """Refuses parameters that cannot be given by keyword, and options that are none."""
    named: dict[str, inspect.Parameter] = {}
    for key, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"reward {name!r} takes {key!r} by position alone, but gets all by keyword; remove the '/'")
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and key not in RESERVED:
            named[key] = parameter
    known = [key for key, parameter in named.items() if parameter.default is not parameter.empty]
    for option in options:
        if option in RESERVED:
            raise ValueError(
                f"reward {name!r}: {option!r} is no option, but what every reward function gets; leave it out"
            )
        if option in named and option not in known:
            raise ValueError(
                f"reward {name!r}: {option!r} is no option, but a column; data.columns says which of the data's it is"
            )
        if option not in known:
            raise unknown(f"option of reward {name!r}:", option, known)


def _spelled(name: str) -> str:
    return name.lower().replace("_", "-")
