"""What is learned: the environment of a config, its tasks and its rewards."""

import operator
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlxrl.env import Environment, SingleTurnEnv, Suite, SyncEnv, Task, make_env, reward_function
from mlxrl.rollout import derive_seed
from mlxrl.train.config import RewardConfig, TrainConfig
from mlxrl.train.errors import ConfigError
from mlxrl.train.reward_calls import NamedReward, needed_columns
from mlxrl.train.rewards import ENVIRONMENT

# Tasks, besides the first, whose environments are asked for their turns.
NUM_MEASURED = 31


@dataclass(frozen=True)
class Curriculum:
    """The tasks of a run and how they are rewarded.

    Args:
        suite: makes the environments.
        train: the tasks to train on.
        held_out: the tasks to evaluate on, as many as the config asks for.
        rewards: the reward functions, weighted.
        max_turns: most turns of an episode; where that depends on the task, of some tasks spread over all.
        single_turn: whether the environment is a plain prompt, which has nothing to do but to ask.
    """

    suite: Suite
    train: Sequence[Any]
    held_out: Sequence[Any]
    rewards: tuple[NamedReward, ...]
    max_turns: int
    single_turn: bool


def make_curriculum(config: TrainConfig) -> Curriculum:
    """Build the environment, its tasks and the reward functions; no model is needed.

    Raises:
        ConfigError: the environment, one of its options, its data, or a reward cannot be had; or nothing rewards.
    """
    options = dict(config.environment)
    if config.data is not None:
        data = config.data.model_dump(exclude_none=True, exclude={"overlong"})
        if twice := sorted(options.keys() & data.keys()):
            raise ConfigError(f"environment.{twice[0]} = {options[twice[0]]!r} is set by [data]; leave it out there.")
        options |= data
    try:
        suite = make_env(config.env_name, **options)
        train, held_out = list(suite.tasks("train")), list(suite.tasks("eval"))
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported or built
        raise ConfigError(f"env_name = {config.env_name!r}: {_described(error)}") from error
    if not train:
        raise ConfigError(f"env_name = {config.env_name!r} has no tasks to train on.")
    if config.eval.tasks and not held_out:
        raise ConfigError(
            f"eval.tasks = {config.eval.tasks}, but env_name = {config.env_name!r} holds out no tasks; "
            "set eval.tasks = 0, or data.eval_path, data.eval_split or data.eval_fraction for data."
        )
    most, single_turn = _measured(config, suite, train[0])
    if not single_turn and (config.max_turns is None or most < config.max_turns):
        most = max(most, *_turns_of_others(config, suite, train[1:]))
    max_turns = min(most, config.max_turns or most)
    longest, buffer = max_turns * config.max_completion_len, config.algorithm.overlong_buffer
    if buffer is not None and buffer > longest:
        raise ConfigError(
            f"algorithm.overlong_buffer = {buffer} exceeds the {longest} tokens that a trajectory may sample "
            "(turns x max_completion_len); lower it."
        )
    return Curriculum(
        suite=suite,
        train=train,
        held_out=held_out[: config.eval.tasks],
        rewards=_rewards(config, suite, single_turn=single_turn),
        max_turns=max_turns,
        single_turn=single_turn,
    )


def _measured(config: TrainConfig, suite: Suite, task: Any) -> tuple[int, bool]:
    """The most turns that a task's environment takes, and whether it is a plain prompt; it is closed again."""
    try:
        environment = suite.make(task, derive_seed(config.seed), 0)
        fits = isinstance(environment, Environment)  # which asks for max_turns too
        turns: Any = environment.max_turns if fits else None
    except (Exception, SystemExit) as error:  # a user's factory may raise anything; it must not look like ours
        raise ConfigError(f"env_name = {config.env_name!r} cannot be made: {_described(error)}") from error
    if not fits:
        raise ConfigError(
            f"env_name = {config.env_name!r} made a {type(environment).__name__}; "
            "an environment has max_turns, reset, step and state_id."
        )
    if isinstance(turns, bool) or not hasattr(turns, "__index__") or turns < 1:
        raise ConfigError(
            f"env_name = {config.env_name!r} made an environment with max_turns = {turns!r}; "
            "it must be a whole number of at least 1."
        )
    with suppress(Exception):  # which costs an episode nothing either
        SyncEnv(environment).close()
    return operator.index(turns), isinstance(environment, SingleTurnEnv)


def _turns_of_others(config: TrainConfig, suite: Suite, tasks: Sequence[Any]) -> list[int]:
    """The most turns of some of the tasks; one whose environment cannot be made fails its episodes, not the run."""
    found = [0]
    for task in tasks[:: -(-len(tasks) // NUM_MEASURED) or 1]:
        with suppress(ConfigError):
            found.append(_measured(config, suite, task)[0])
    return found


def _rewards(config: TrainConfig, suite: Suite, *, single_turn: bool) -> tuple[NamedReward, ...]:
    wanted = config.rewards or [RewardConfig(name=name, weight=weight) for name, weight in suite.rewards or ()]
    rewards = [] if single_turn else [NamedReward(ENVIRONMENT, 1.0)]
    for place, reward in enumerate(wanted):
        before = [other for other in wanted[:place] if other.name == reward.name]
        if any(other.options == reward.options for other in before):
            raise ConfigError(f"rewards: {reward.name!r} is named twice; name it once, with the sum of the weights.")
        try:
            function = reward_function(reward.name, **reward.options)
            needed = needed_columns(function)
        except Exception as error:  # likewise
            raise ConfigError(f"rewards: {_described(error)}") from error
        _check_columns(config, reward.name, needed, suite)
        timeout = reward.timeout
        if timeout is None:
            timeout = 0.0 if getattr(function, "bounded", False) else NamedReward.timeout
        name = f"{reward.name}#{len(before) + 1}" if before else reward.name
        rewards.append(NamedReward(name, reward.weight, function, timeout))
    if not rewards:
        raise ConfigError(f"env_name = {config.env_name!r} rewards nothing by itself; add [[rewards]] with a name.")
    return tuple(rewards)


def _check_columns(config: TrainConfig, reward: str, needed: Sequence[str], suite: Suite) -> None:
    """See that the tasks to train on, and those to evaluate on, have the columns that a reward needs."""
    data = config.data
    source = f"env_name = {config.env_name!r}" if data is None else f"data.path = {data.path!r}"
    sources = [(source, suite.tasks("train"))]
    if config.eval.tasks:
        second = data is not None and data.eval_path
        sources.append((f"data.eval_path = {second!r}" if second else source, suite.tasks("eval")))
    for source, tasks in sources:
        columns = {column for task in tasks if isinstance(task, Task) for column in task.columns}
        if lacking := [column for column in needed if column not in columns]:
            raise ConfigError(
                f"rewards: {reward!r} needs the column {lacking[0]!r}, which no task of {source} has "
                f"(columns: {', '.join(sorted(columns)) or 'none'}); name it in [data], or choose another reward."
            )


def _described(error: BaseException) -> str:
    """An error as one line; one that is not ours by its class and where it was raised."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | TypeError) and not isinstance(error, UnicodeError):
        return text
    places = traceback.extract_tb(error.__traceback__)
    where = f" in {places[-1].filename}, line {places[-1].lineno}" if places else ""
    return f"{type(error).__name__}{where}: {text}"
