"""Environments of gymnasium, shown and played as text."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

from mlxrl.env.adapters.libraries import cannot_be_had, load_library
from mlxrl.env.adapters.seeded import NumberedSuite, number_of
from mlxrl.env.game import ACTION_TAG, read_action
from mlxrl.env.options import check_real, check_texts, check_whole
from mlxrl.env.protocol import StepResult
from mlxrl.env.task import Message

ACTIONS: Mapping[str, tuple[str, ...]] = {
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""The names of the actions 0, 1, ... of an environment, whatever its version."""

_COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[([\d;]*?)(\d)m(.*?)\x1b\[0m", re.DOTALL)
_CODE = re.compile(r"\x1b\[[\d;]*m")


def gymnasium_suite(
    env_id: str,
    *,
    seed: int = 0,
    size: int = 200,
    eval_size: int = 50,
    max_turns: int = 20,
    invalid_penalty: float = 0.0,
    actions: Sequence[str] | str = (),
    **parameters: Any,
) -> NumberedSuite:
    """Play an environment of gymnasium that can be told and acted in by text.

    Args:
        env_id: a registered id, "FrozenLake-v1".
        seed: draws the seeds that episodes start from.
        size: number of training tasks.
        eval_size: number of evaluation tasks.
        max_turns: the most actions of an episode; the environment's own limit holds besides.
        invalid_penalty: taken off the reward of a turn whose action is invalid.
        actions: names of the actions, in order; by default those of `ACTIONS`, or else numbers.
        parameters: of the environment, `is_slippery = false`.

    Raises:
        ValueError: there is no such environment, it cannot be acted in by text, an option is out of range, or the
            package is not installed.
    """
    name = f"gymnasium:{env_id}"
    library = load_library("gymnasium", "gymnasium")
    check_whole("max_turns", max_turns, 1)
    check_real("invalid_penalty", invalid_penalty, 0.0)
    try:
        modes = library.make(env_id, disable_env_checker=True, **parameters).metadata.get("render_modes", ())
    except Exception as error:  # of its own errors, of what the environment raises, of modules it lacks
        raise cannot_be_had(name, error) from error
    drawn = {"render_mode": "ansi"} if "ansi" in modes else {}
    names = check_texts("actions", actions) or ACTIONS.get(_family(env_id), ())

    def make(number: int, chance: int) -> GymnasiumEnv:
        environment = library.make(env_id, disable_env_checker=True, **parameters, **drawn)
        return GymnasiumEnv(environment, number, chance, max_turns, invalid_penalty, names)

    make(0, 0)  # refuses what cannot be acted in by text
    return NumberedSuite(name, make, size, eval_size, seed)


def gymnasium_names() -> Sequence[str]:
    """The ids of the environments whose actions have names in `ACTIONS`; others may be playable too."""
    known: Mapping[str, Any] = load_library("gymnasium", "gymnasium").envs.registry
    return [env_id for env_id in known if _family(env_id) in ACTIONS]


class GymnasiumEnv:
    """An episode of an environment with discrete actions, or with texts for actions.

    An observation is what the environment draws as text (characters in colour as [red S]), or else its values. Its
    last line says how to act: <action>left</action>. A discrete action goes by its name or its number, and may stand
    anywhere in a text without tags; an action that cannot be read changes nothing.

    Args:
        environment: of gymnasium; it draws with `render` where its render_mode is "ansi".
        number: the seed of the start.
        chance: with the number, draws what is left to chance later.
        max_turns: the most actions of an episode.
        invalid_penalty: taken off the reward of a turn whose action is invalid.
        names: of discrete actions, one for each, or none.

    Raises:
        ValueError: actions are neither discrete nor texts, or the names do not fit.
    """

    def __init__(
        self, environment: Any, number: int, chance: int, max_turns: int, invalid_penalty: float, names: Sequence[str]
    ) -> None:
        self.max_turns = max_turns
        self._environment = environment
        self._number = number
        self._chance = chance
        self._penalty = invalid_penalty
        self._names, self._first = _action_names(environment.action_space, names)
        self._state: Hashable = None
        self._shown = ""

    def reset(self) -> str:
        """Starts from the number."""
        observation = self._environment.reset(seed=self._number)[0]
        seeding = load_library("gymnasium.utils.seeding", "gymnasium")
        self._environment.unwrapped.np_random = seeding.np_random(number_of(self._number, self._chance))[0]
        return self._show(observation)

    def step(self, action: str) -> StepResult:
        """Acts, where the action can be read."""
        choice = self._choice(action)
        if choice is None:
            return StepResult(self._shown, 0.0 - self._penalty, terminated=False, info={"invalid_action": True})
        observation, reward, terminated, truncated, _ = self._environment.step(choice)
        shown = self._show(observation)
        return StepResult(shown, float(reward), bool(terminated), bool(truncated), {"invalid_action": False})

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The environment's own observation."""
        return self._state

    def close(self) -> None:
        """Lets go of what the environment holds, such as a window."""
        self._environment.close()

    def _show(self, observation: object) -> str:
        self._state = _plain(observation)
        drawn = self._environment.render() if self._environment.render_mode == "ansi" else None
        text = _uncoloured(drawn) if isinstance(drawn, str) else _told(self._state)
        hint = f"<action>NAME</action>: {', '.join(self._names)}" if self._names else "<action>TEXT</action>"
        self._shown = f"{text}\n{hint}"
        return self._shown

    def _choice(self, text: str) -> Any:
        said = (ACTION_TAG.search(text) and read_action(text)) or text.strip()
        if not self._names:
            return said or None
        place = read_choice(said, self._names, self._first)
        return None if place is None else self._first + place


def read_choice(text: str, names: Sequence[str], first: int = 0) -> int | None:
    """The place of the action that a text names: by the last name in it, or else by the last number.

    Args:
        text: what was said.
        names: of the actions, in any case.
        first: the number of the first action.

    Returns:
        A place within names, or None where the text names no action.
    """
    numbers = [str(first + place) for place in range(len(names))]
    for spelled in ([name.lower() for name in names], numbers):
        longest_first = "|".join(re.escape(word) for word in sorted(spelled, key=len, reverse=True))
        found = re.findall(rf"(?<![\w.-])(?:{longest_first})(?![\w-]|\.\d)", text.lower())
        if found:
            return spelled.index(found[-1])
    return None


def _family(env_id: str) -> str:
    """An id without its version and what stands before its last slash."""
    return re.sub(r"-v\d+$", "", env_id.rpartition("/")[2])


def _action_names(space: Any, names: Sequence[str]) -> tuple[Sequence[str], int]:
    """Names of a space's discrete actions and the number of the first; no names where actions are texts."""
    kind = type(space).__name__
    if kind == "Text":
        return (), 0
    if kind != "Discrete":
        raise ValueError(f"actions must be discrete or texts to be given as text, but the action space is {space}")
    count, first = int(space.n), int(space.start)
    if names and len(names) != count:
        raise ValueError(f"actions must name all {count} actions, got {len(names)}: {', '.join(names)}")
    return names or [str(first + place) for place in range(count)], first


def _plain(value: Any) -> Hashable:
    """An observation as nested tuples of Python's own values."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return tuple((key, _plain(part)) for key, part in cast(Mapping[str, Any], value).items())
    if isinstance(value, list | tuple):
        return tuple(_plain(part) for part in cast(Sequence[Any], value))
    return value


def _told(state: Hashable) -> str:
    if isinstance(state, tuple):
        return f"({', '.join(_told(part) for part in cast(tuple[Hashable, ...], state))})"
    return f"{state:.4g}" if isinstance(state, float) else str(state)


def _uncoloured(text: str) -> str:
    """A text drawn for a terminal, with what is in colour between brackets."""
    named = _COLOURED.sub(lambda match: f"[{_COLOURS[int(match[2]) % 8]} {match[3]}]", text)
    return _CODE.sub("", named).strip("\n")
