"""Environments of OpenEnv, each a server that is running already."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from mlxrl.env.adapters.libraries import load_library
from mlxrl.env.adapters.seeded import NumberedSuite
from mlxrl.env.options import check_text, check_whole
from mlxrl.env.protocol import StepResult
from mlxrl.env.task import Message


def openenv_suite(
    url: str,
    *,
    seed: int = 0,
    size: int = 200,
    eval_size: int = 50,
    max_turns: int = 20,
    action_field: str = "message",
    observation_field: str | None = None,
    action: Mapping[str, Any] | None = None,
) -> NumberedSuite:
    """Play an environment that a server of OpenEnv holds, one session an episode.

    Args:
        url: where the server listens, "http://localhost:8000"; it must serve as many sessions at once as
            `rollout.width` has episodes.
        seed: draws the seeds that episodes start from.
        size: number of training tasks.
        eval_size: number of evaluation tasks.
        max_turns: the most actions of an episode.
        action_field: the field of its action that takes the model's text.
        observation_field: the field of its observation that is shown; None: all of it, as JSON.
        action: the other fields of its action, the same in each turn.

    Raises:
        ValueError: an option is out of range, or the package is not installed.
    """
    client = load_library("openenv", "openenv").GenericEnvClient
    check_whole("max_turns", max_turns, 1)
    check_text("action_field", action_field)

    def make(number: int, chance: int) -> OpenEnvEnv:
        return OpenEnvEnv(client(base_url=url), number, max_turns, action_field, observation_field, action or {})

    return NumberedSuite(f"openenv:{url}", make, size, eval_size, seed)


class OpenEnvEnv:
    """An episode on a server; an action that the server refuses ends it with an error.

    Args:
        client: connects to the server; its calls are awaited.
        number: the seed that the environment is reset with, where it takes one.
        max_turns: the most actions of an episode.
        action_field: the field of an action that takes the model's text.
        observation_field: the field of an observation that is shown; None: all of it, as JSON.
        action: the other fields of an action.
    """

    def __init__(
        self,
        client: Any,
        number: int,
        max_turns: int,
        action_field: str,
        observation_field: str | None,
        action: Mapping[str, Any],
    ) -> None:
        self.max_turns = max_turns
        self._client = client
        self._number = number
        self._action_field = action_field
        self._observation_field = observation_field
        self._action = action

    async def reset(self) -> str:
        """Opens a session and starts the episode in it."""
        await self._client.connect()
        return self._shown((await self._client.reset(seed=self._number)).observation)

    async def step(self, action: str) -> StepResult:
        """Plays a turn."""
        result = await self._client.step({**self._action, self._action_field: action})
        return StepResult(self._shown(result.observation), float(result.reward or 0.0), bool(result.done))

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The observation."""
        return str(observation)

    async def close(self) -> None:
        """Gives the session back."""
        await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation_field not in observation:
            raise ValueError(
                f"observation_field {self._observation_field!r} is no field of the observation "
                f"(fields: {', '.join(observation)}); name another"
            )
        return str(observation[self._observation_field])
