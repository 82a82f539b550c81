"""Environments by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mlxrl.env.adapters import LIBRARIES, library_builder
from mlxrl.env.alphabet_sort import alphabet_sort_suite
from mlxrl.env.arithmetic import ArithmeticSuite
from mlxrl.env.builders import checked_options
from mlxrl.env.dataset import DatasetSuite
from mlxrl.env.frozen_lake import frozen_lake_suite
from mlxrl.env.guess_number import guess_number_suite
from mlxrl.env.key_door import key_door_suite
from mlxrl.env.names import is_reference, load_object, unknown
from mlxrl.env.options import check_whole
from mlxrl.env.protocol import EnvFactory, Environment, RewardWeights, Split, Suite, check_split
from mlxrl.env.recurring_text import recurring_text_suite
from mlxrl.env.sokoban import sokoban_suite
from mlxrl.env.task import Task
from mlxrl.env.tool_math import tool_math_suite
from mlxrl.env.wordle import wordle_suite

SuiteBuilder = Callable[..., Suite]
"""builder(**options) -> Suite."""

_BUILDERS: dict[str, SuiteBuilder | EnvFactory] = {
    "alphabet-sort": alphabet_sort_suite,
    "arithmetic": ArithmeticSuite,
    "dataset": DatasetSuite,
    "frozen-lake": frozen_lake_suite,
    "guess-number": guess_number_suite,
    "jsonl": DatasetSuite,  # the same suite by another name
    "key-door": key_door_suite,
    "recurring-text": recurring_text_suite,
    "sokoban": sokoban_suite,
    "tool-math": tool_math_suite,
    "wordle": wordle_suite,
}

_FACTORY = "an environment factory takes (task, seed, group_index) by position"


class FactorySuite:
    """The suite of a bare EnvFactory: its tasks are whole numbers, which the factory makes of what it likes.

    Args:
        name: what the suite goes by.
        factory: factory(number, seed, group_index), called positionally.
        tasks: number of training tasks: 0, 1, ..., tasks - 1.
        eval_tasks: number of evaluation tasks, which count on from there.

    Raises:
        ValueError: a count is out of range.
    """

    rewards: RewardWeights = ()

    def __init__(self, name: str, factory: EnvFactory, tasks: int = 100, eval_tasks: int = 20) -> None:
        self.name = name
        self._factory = factory
        first = check_whole("tasks", tasks, 1)
        last = first + check_whole("eval_tasks", eval_tasks, 0)
        self._numbers = {"train": range(first), "eval": range(first, last)}

    def tasks(self, split: Split) -> Sequence[Task]:
        """The numbers of a split, each in its task's column "number"."""
        check_split(split)
        return tuple(Task(str(number), {"number": number}, str(number)) for number in self._numbers[split])

    def make(self, task: Task, seed: int, group_index: int) -> Environment:
        """What the factory makes of the task's number."""
        return self._factory(task.columns["number"], seed, group_index)


def env_names() -> tuple[str, ...]:
    """The names that `make_env` knows, sorted."""
    return tuple(sorted(_BUILDERS))


def register_env(name: str, builder: SuiteBuilder | EnvFactory) -> None:
    """Makes a suite known by a name.

    Args:
        name: a new name; underscores and capitals are read as hyphens and small letters.
        builder: builder(**options) -> Suite, or an EnvFactory, told by taking (task, seed, group_index).

    Raises:
        ValueError: the name is taken, or has a colon.
    """
    name = _spelled(name)
    if name in _BUILDERS or is_reference(name):
        raise ValueError(f"name must be new and without a colon, got {name!r}; taken: {', '.join(env_names())}")
    _BUILDERS[name] = builder


def make_env(name: str, **options: Any) -> Suite:
    """The suite that a name stands for.

    Args:
        name: one of `env_names()`, an environment of another library, "gymnasium:FrozenLake-v1", or a user's own
            "path/to/file.py:object" or "package.module:object", where the object is a suite builder or an EnvFactory.
            An EnvFactory gets whole numbers as tasks (options `tasks` and `eval_tasks`).
        options: the suite's own options.

    Raises:
        ValueError: the name or an option is unknown, an option is missing or out of range, or what the name refers
            to cannot be found.
        TypeError: what the name refers to is no environment.
    """
    builder = _builder(name)
    if _is_factory(builder, options):
        _check_factory(name, builder)
        return FactorySuite(name, builder, **_checked(name, FactorySuite, options, "name", "factory"))
    suite = builder(**_checked(name, builder, options))
    if not isinstance(suite, Suite):
        raise TypeError(
            f"environment {name!r} must build a suite (name, rewards, tasks, make), got {type(suite).__name__}; "
            f"{_FACTORY}, got {inspect.signature(builder)}"
        )
    return suite


@dataclass(frozen=True)
class EnvDescription:
    """What can be told of an environment without making it.

    Args:
        name: what it goes by.
        summary: the first line of its documentation; empty where there is none.
        required: the options that must be given.
        defaults: the other options, each with its default.
    """

    name: str
    summary: str
    required: tuple[str, ...]
    defaults: Mapping[str, object]


def describe_env(name: str) -> EnvDescription:
    """What an environment asks and takes.

    Args:
        name: as `make_env` takes it.

    Raises:
        ValueError: the name is unknown, or what it refers to cannot be found.
        TypeError: what the name refers to is no environment.
    """
    builder = _builder(name)
    taker, given = (FactorySuite, ("name", "factory")) if _is_factory(builder) else (builder, ())
    options = {
        key: p.default
        for key, p in inspect.signature(taker).parameters.items()
        if key not in given and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    required = tuple(key for key, default in options.items() if default is inspect.Parameter.empty)
    return EnvDescription(
        name=name,
        summary=(inspect.getdoc(builder) or "").partition("\n")[0],
        required=required,
        defaults={key: default for key, default in options.items() if key not in required},
    )


def _builder(name: str) -> Callable[..., Any]:
    if (adapted := library_builder(name)) is not None:
        return adapted
    if is_reference(name):
        builder = load_object(name)
    elif _spelled(name) in _BUILDERS:
        builder = _BUILDERS[_spelled(name)]
    else:
        libraries = ", ".join(f"{library}:NAME" for library in LIBRARIES)
        raise unknown("environment", name, _BUILDERS, f", {libraries}, or your own path/to/file.py:factory")
    if not callable(builder):
        raise TypeError(f"environment {name!r} must be a function or a class, got {type(builder).__name__}")
    return cast(Callable[..., Any], builder)


def _spelled(name: str) -> str:
    return name.lower().replace("_", "-")


def _is_factory(builder: Callable[..., Any], options: Mapping[str, Any] | None = None) -> bool:
    """Whether a callable is to take (task, seed, group_index): the first is named task, or three are required.

    The three required arguments of a suite, or those that options name, are options.
    """
    parameters = [
        p
        for p in inspect.signature(builder).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [p for p in parameters if p.default is p.empty]
    if parameters and parameters[0].name == "task":
        return True
    is_suite = hasattr(builder, "tasks") and hasattr(builder, "make")
    return len(required) == 3 and not is_suite and not any(p.name in (options or {}) for p in required)


def _check_factory(name: str, factory: Callable[..., Any]) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(0, 0, 0)
    except TypeError:
        raise TypeError(
            f"environment {name!r}: {_FACTORY}, got {signature}; take those three, and give a default to anything else"
        ) from None


def _checked(name: str, builder: Callable[..., Any], options: dict[str, Any], *given: str) -> dict[str, Any]:
    own = is_reference(name) and library_builder(name) is None
    hint = f"; or, if it is to make environments: {_FACTORY}, got {inspect.signature(builder)}"
    what = f"environment {name!r}"
    return checked_options(what, builder, options, where="[environment]", given=given, hint=hint if own else "")
