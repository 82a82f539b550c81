"""From what an environment's reset or step returned to an observation or a StepResult."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, cast

from mlxrl.env.protocol import StepResult
from mlxrl.env.task import Message, as_messages, plain

FORMS = "a StepResult, (observation, reward, done, info) or (observation, reward, terminated, truncated, info)"


def as_observation(value: object) -> str | Sequence[Message]:
    """Normalises what a reset returned.

    Args:
        value: text, chat messages, or either of them with an info, as gymnasium's (observation, info).

    Returns:
        The text, or one or more chat messages; the info is left out.

    Raises:
        TypeError: value is neither text nor chat messages.
        ValueError: value is an empty sequence.
    """
    return _observation("reset", _without_info(value))


def as_step_result(value: object, *, last: bool = False) -> StepResult:
    """Normalises what a step returned.

    Args:
        value: a StepResult, a 4-tuple (observation, reward, done, info), or a 5-tuple as gymnasium's
            (observation, reward, terminated, truncated, info); an info of None is empty.
        last: whether no further action is allowed, so that the episode is over whatever the step says.

    Returns:
        The checked StepResult, its reward a finite Python float. An observation of None, which nobody reads after the
        last action, is the empty text there.

    Raises:
        TypeError: value, or a part of it, has the wrong type.
        ValueError: the tuple has the wrong length, the reward is not finite, or the observation is an empty list.
    """
    observation, reward, terminated, truncated, info = _parts(value)
    terminated, truncated = _flag("terminated", terminated), _flag("truncated", truncated)
    if observation is None and (terminated or truncated or last):
        observation = ""
    return StepResult(
        observation=_observation("step", observation),
        reward=_reward(reward),
        terminated=terminated,
        truncated=truncated,
        info=_info(info),
    )


def _without_info(value: object) -> object:
    items = cast(Sequence[object], value if isinstance(value, tuple) else ())
    kinds = [isinstance(item, Mapping) for item in items]
    return items[0] if kinds == [False, True] else cast(object, value)  # two mappings are two messages


def _parts(value: object) -> Sequence[object]:
    """Observation, reward, terminated, truncated and info, unchecked."""
    if isinstance(value, StepResult):
        return value.observation, value.reward, value.terminated, value.truncated, value.info
    if not isinstance(value, tuple | list):
        raise TypeError(f"step must return {FORMS}, got {type(value).__name__} {value!r}")
    items = cast(Sequence[object], value)
    if len(items) not in (4, 5):
        raise ValueError(f"step must return {FORMS}, got {len(items)} values")
    return items if len(items) == 5 else (*items[:3], False, items[3])


def _observation(where: str, value: object) -> str | Sequence[Message]:
    if isinstance(value, str):
        return plain(value)
    try:
        return as_messages(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"observation of {where}: {error}") from None


def _reward(value: object) -> float:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise TypeError(f"reward of step must be a number, got {type(value).__name__} {value!r}")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"reward of step must be finite, got {reward}")
    return reward


def _flag(name: str, value: Any) -> bool:
    flag = value.item() if hasattr(value, "item") else value
    if not isinstance(flag, int) or flag not in (0, 1):
        raise TypeError(f"{name} of step must be True or False, got {type(value).__name__} {value!r}")
    return bool(flag)


def _info(value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"info of step must be a mapping or None, got {type(value).__name__} {value!r}")
    return cast(Mapping[str, object], value)
