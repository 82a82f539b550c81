"""What is learned: the environment of a config, its tasks and its rewards."""

import operator
import traceback
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mlxrl.env import Environment, SingleTurnEnv, Suite, SyncEnv, Task, make_env, reward_function
from mlxrl.rollout import derive_seed
from mlxrl.rollout.stage import OverrunError, Stage, Ticket
from mlxrl.train.config import RewardConfig, TrainConfig
from mlxrl.train.errors import ConfigError
from mlxrl.train.inputs import in_folder
from mlxrl.train.reward_calls import NamedReward, needed_columns
from mlxrl.train.rewards import ENVIRONMENT

# Of so many tasks from the start, and as many spread over the others, the environments are asked for their turns.
NUM_MEASURED = 4


@dataclass(frozen=True)
class Curriculum:
    """The tasks of a run and how they are rewarded.

    Args:
        suite: makes the environments.
        train: the tasks to train on.
        held_out: the tasks to evaluate on, as many as the config asks for.
        rewards: the reward functions, weighted.
        max_turns: most turns of an episode: the config's, or else what the environments of some of the tasks have.
        measured_turns: most turns of the environments of these tasks.
        single_turn: whether the environment is a plain prompt, which has nothing to do but to ask.
    """

    suite: Suite
    train: Sequence[Any]
    held_out: Sequence[Any]
    rewards: tuple[NamedReward, ...]
    max_turns: int
    measured_turns: int
    single_turn: bool


def make_curriculum(config: TrainConfig) -> Curriculum:
    """Build the environment, its tasks and the reward functions; no model is needed.

    The environments of some tasks are made, asked for their turns, and closed again: of the first four, and of four
    that are spread over the others, the last among them. Each has `rollout.env_timeout` to be made. One that is not, or
    breaks, will fail its episodes and not the run, unless it is the first. The working directory is afterwards what it
    was, wherever the user's code went.

    Raises:
        ConfigError: the environment, one of its options, its data, or a reward cannot be had; or nothing rewards.
    """
    with chdir("."):
        return _curriculum(config)


def _curriculum(config: TrainConfig) -> Curriculum:
    options = dict(config.environment)
    if config.data is not None:
        data = config.data.model_dump(exclude_none=True, exclude={"overlong"})
        if twice := sorted(options.keys() & data.keys()):
            raise ConfigError(f"environment.{twice[0]} = {options[twice[0]]!r} is set by [data]; leave it out there.")
        options |= data
    try:
        suite = make_env(in_folder(config.code_folder, config.env_name), **options)
        train, held_out = list(suite.tasks("train")), list(suite.tasks("eval"))
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported or built
        raise ConfigError(f"env_name = {config.env_name!r}: {_described(error)}") from error
    if not train:
        raise ConfigError(f"env_name = {config.env_name!r} has no tasks to train on.")
    if config.eval.tasks and not held_out:
        raise ConfigError(
            f"eval.tasks = {config.eval.tasks}, but env_name = {config.env_name!r} holds out no tasks; "
            "set data.eval_path, data.eval_split or data.eval_fraction for data, environment.eval_tasks for your own "
            "factory, or eval.tasks = 0."
        )
    first, *others = _measured(config, suite, _some(train))
    if isinstance(first, ConfigError):
        raise first
    most = max([first.max_turns, *(other.max_turns for other in others if isinstance(other, _Measured))])
    max_turns = 1 if first.single_turn else config.max_turns or most  # other tasks may have more than those measured
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
        rewards=_rewards(config, suite, single_turn=first.single_turn),
        max_turns=max_turns,
        measured_turns=most,
        single_turn=first.single_turn,
    )


def _some(tasks: Sequence[Any]) -> list[Any]:
    """Tasks from the start, among which turns may take turns, and some up to the last, where they may have grown."""
    others = tasks[NUM_MEASURED:][::-1]
    return [*tasks[:NUM_MEASURED], *others[:: -(-len(others) // NUM_MEASURED) or 1]]


class _Measured(NamedTuple):
    max_turns: int
    single_turn: bool


def _measured(config: TrainConfig, suite: Suite, tasks: Sequence[Any]) -> list[_Measured | ConfigError]:
    """For each task the turns of its environment, and whether it is a plain prompt; or why it cannot be told.

    They are made where rollouts make them, each in a thread of its own and against the clock. Nothing waits long for
    one to be closed.
    """
    stage = Stage(config.rollout.env_timeout or None, len(tasks))
    made: dict[int, Any] = {}

    def measure(place: int) -> _Measured:
        made[place] = suite.make(tasks[place], derive_seed(config.seed), 0)
        return _measure(config, made[place])

    def close(place: int) -> None:
        if place in made:
            SyncEnv(made[place]).close()

    places = range(len(tasks))
    try:
        tickets = [stage.submit(place, partial(measure, place), too_late=partial(close, place)) for place in places]
        return [_heard(config, stage, ticket) for ticket in tickets]
    finally:
        stage.break_off([partial(close, place) for place in places])
        stage.close()


def _heard(config: TrainConfig, stage: Stage, ticket: Ticket) -> _Measured | ConfigError:
    stage.await_answer(ticket)
    try:
        return ticket.result()
    except ConfigError as error:
        return error
    except OverrunError:
        return ConfigError(
            f"env_name = {config.env_name!r} cannot be made: a task's environment took longer than "
            f"rollout.env_timeout = {config.rollout.env_timeout:g} s; mend it, or raise the timeout."
        )
    except (Exception, SystemExit) as error:  # a user's factory may raise anything; it must not look like ours
        return ConfigError(f"env_name = {config.env_name!r} cannot be made: {_described(error)}")


def _measure(config: TrainConfig, environment: Any) -> _Measured:
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"env_name = {config.env_name!r} made a {type(environment).__name__}; "
            "an environment has max_turns, reset, step and state_id."
        )
    turns: Any = environment.max_turns
    if isinstance(turns, bool) or not hasattr(turns, "__index__") or turns < 1:
        raise ConfigError(
            f"env_name = {config.env_name!r} made an environment with max_turns = {turns!r}; "
            "it must be a whole number of at least 1."
        )
    return _Measured(operator.index(turns), isinstance(environment, SingleTurnEnv))


def _rewards(config: TrainConfig, suite: Suite, *, single_turn: bool) -> tuple[NamedReward, ...]:
    wanted = config.rewards or [RewardConfig(name=name, weight=weight) for name, weight in suite.rewards or ()]
    rewards = [] if single_turn else [NamedReward(ENVIRONMENT, 1.0)]
    for place, reward in enumerate(wanted):
        before = [other for other in wanted[:place] if other.name == reward.name]
        if any(other.options == reward.options for other in before):
            raise ConfigError(f"rewards: {reward.name!r} is named twice; name it once, with the sum of the weights.")
        try:
            function = reward_function(in_folder(config.code_folder, reward.name), **reward.options)
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
