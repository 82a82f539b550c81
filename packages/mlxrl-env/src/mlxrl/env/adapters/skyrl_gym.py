"""Environments of SkyRL-Gym, played on the rows of a dataset."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from mlxrl.env.adapters.libraries import cannot_be_had, load_library
from mlxrl.env.builders import checked_options
from mlxrl.env.dataset import DatasetSuite
from mlxrl.env.names import unknown
from mlxrl.env.protocol import RewardWeights, Split, StepResult
from mlxrl.env.task import Message, Task, as_messages


def skyrl_gym_suite(
    env_id: str, path: str, *, env_config: Mapping[str, Any] | None = None, **table: Any
) -> SkyRLGymSuite:
    """Play an environment of SkyRL-Gym on the rows of a dataset written for it.

    Args:
        env_id: a registered id, "gsm8k".
        path: the rows, as `DatasetSuite` reads them: a column prompt, and what the environment needs besides, such
            as reward_spec; it may be a JSON object in a text.
        env_config: the environment's own configuration.
        table: further options of `DatasetSuite`, `eval_fraction = 0.1`.

    Raises:
        ValueError: there is no such environment, the rows cannot be read or do not fit, or the package is not
            installed.
    """
    name = f"skyrl-gym:{env_id}"
    library = load_library("skyrl_gym", "skyrl-gym")
    if env_id not in (known := skyrl_gym_names()):
        raise unknown("environment of SkyRL-Gym", env_id, known)
    config = load_library("omegaconf", "skyrl-gym").OmegaConf.create(dict(env_config or {}))
    given = checked_options(f"environment {name!r}", DatasetSuite, table, where="[environment]", given=("path",))
    suite = SkyRLGymSuite(name, library, env_id, config, DatasetSuite(path, **given))
    try:
        for task in suite.tasks("train")[:1]:
            suite.make(task, 0, 0)
    except Exception as error:  # an environment asserts what it needs of a row
        raise cannot_be_had(name, error) from error
    return suite


def skyrl_gym_names() -> Sequence[str]:
    """The ids of SkyRL-Gym's environments."""
    return list(load_library("skyrl_gym", "skyrl-gym").registry)


class SkyRLGymSuite:
    """Rows of a dataset, each an episode of an environment that rewards by itself.

    Args:
        name: what the suite goes by.
        library: the module skyrl_gym.
        env_id: the environment.
        config: its configuration, as it takes it.
        rows: the tasks; their columns are what the environment knows of them.
    """

    rewards: RewardWeights = ()

    def __init__(self, name: str, library: Any, env_id: str, config: Any, rows: DatasetSuite) -> None:
        self.name = name
        self._library = library
        self._env_id = env_id
        self._config = config
        self._rows = rows

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split."""
        return self._rows.tasks(split)

    def make(self, task: Task, seed: int, group_index: int) -> SkyRLGymEnv:
        """The environment for a row."""
        extras = {key: value for key, value in task.columns.items() if value is not None}
        return SkyRLGymEnv(task, self._library.make(self._env_id, env_config=self._config, extras=extras))


class SkyRLGymEnv:
    """An episode of an environment of SkyRL-Gym; a state is all that was said so far.

    Args:
        task: its prompt is asked.
        environment: what skyrl_gym made for the task.
    """

    def __init__(self, task: Task, environment: Any) -> None:
        self.max_turns = int(environment.max_turns)
        self._task = task
        self._environment = environment
        self._said: tuple[str, ...] = ()

    def reset(self) -> Sequence[Message]:
        """The prompt, as the environment words it."""
        messages = self._environment.init([dict(message) for message in as_messages(self._task.prompt)])[0]
        self._said = tuple(message["content"] for message in messages)
        return messages

    def step(self, action: str) -> StepResult:
        """Plays a turn."""
        result = self._environment.step(action)
        messages: list[Message] = list(result["observations"])
        self._said += (action, *(message["content"] for message in messages))
        info = dict(result.get("metadata") or {})
        return StepResult(messages or "", float(result["reward"]), bool(result["done"]), info=info)

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """All that was said so far."""
        return self._said
