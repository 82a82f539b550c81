"""Environments of GEM, which speak text."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from mlxrl.env.adapters.libraries import cannot_be_had, load_library
from mlxrl.env.adapters.seeded import NumberedSuite, OwnChance
from mlxrl.env.names import unknown
from mlxrl.env.options import check_whole
from mlxrl.env.protocol import StepResult
from mlxrl.env.step import as_step_result
from mlxrl.env.task import Message

_TURN = re.compile(r"\bturn \d+", re.IGNORECASE)


def gem_suite(
    env_id: str,
    *,
    seed: int = 0,
    size: int = 200,
    eval_size: int = 50,
    max_turns: int | None = None,
    **parameters: Any,
) -> NumberedSuite:
    """Play an environment of GEM.

    Args:
        env_id: a registered id, "game:GuessTheNumber-v0-easy".
        seed: draws the seeds that episodes start from.
        size: number of training tasks.
        eval_size: number of evaluation tasks.
        max_turns: the most actions of an episode; by default the environment's own limit, or 20 where it has none.
        parameters: of the environment, `min_number = 1`.

    Raises:
        ValueError: there is no such environment, an option is out of range, or the package is not installed.
    """
    name = f"gem:{env_id}"
    library = _quietly_loaded()
    if max_turns is not None:
        parameters = {**parameters, "max_turns": check_whole("max_turns", max_turns, 1)}
    known = gem_names()
    if env_id not in known:
        raise unknown("environment of GEM", env_id, known)

    def make(number: int, chance: int) -> GemEnv:
        return GemEnv(lambda: library.make(env_id, **parameters), number, chance)

    try:
        make(0, 0)
    except Exception as error:  # an environment's data or parameters may be wrong in any way
        raise cannot_be_had(name, error) from error
    return NumberedSuite(name, make, size, eval_size, seed)


def gem_names() -> Sequence[str]:
    """The ids of GEM's environments."""
    _quietly_loaded()
    known: Mapping[str, Any] = load_library("gem.envs.registration", "gem").ENV_REGISTRY
    return list(known)


class GemEnv:
    """An episode of an environment of GEM, with chance of its own.

    Args:
        make: makes the environment.
        number: the seed of the start.
        chance: with the number, draws what is left to chance later.
    """

    def __init__(self, make: Any, number: int, chance: int) -> None:
        self._number = number
        self._seed = chance
        self._chance = OwnChance(number)
        with self._chance.drawing():
            self._environment = make()
        self.reset()  # some draw their turn limit
        limit = getattr(self._environment, "max_turns", None)
        self.max_turns = limit if isinstance(limit, int) and limit > 0 else 20

    def reset(self) -> str:
        """Starts from the number."""
        with self._chance.drawing():
            observation, info = self._environment.reset(seed=self._number)
        self._chance = OwnChance(self._number, self._seed)
        return _with_suffix(observation, info)

    def step(self, action: str) -> StepResult:
        """Hands the whole text on; the environment knows how its actions are marked."""
        with self._chance.drawing():
            observation, reward, terminated, truncated, info = self._environment.step(action)
        return as_step_result((_with_suffix(observation, info), reward, terminated, truncated, info))

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The observation, whichever turn it says it is."""
        return _TURN.sub("turn", str(observation))


def _with_suffix(observation: str, info: Mapping[str, Any]) -> str:
    suffix = info.get("suffix")
    return f"{observation}\n{suffix}" if suffix else observation


def _quietly_loaded() -> Any:
    """The library, without the logging of all the process that its import sets up."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    library = load_library("gem", "gem")
    root.handlers[:] = handlers
    root.setLevel(level)
    return library
