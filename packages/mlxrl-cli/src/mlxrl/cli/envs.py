"""`envs`: the environments by name, and an episode of one, played from the keyboard or at random."""

import json
import random
import re
import sys
import traceback
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, suppress
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxrl.cli.configs import parse_settings
from mlxrl.env import (
    Environment,
    Message,
    SingleTurnEnv,
    StepResult,
    Suite,
    SyncEnv,
    Task,
    as_messages,
    describe_env,
    env_names,
    make_env,
    reward_function,
)
from mlxrl.env.adapters import LIBRARIES, is_installed, library_names
from mlxrl.env.wordle import WORDS
from mlxrl.train import ConfigError, RunError

Player = Callable[[str], str | None]
"""player(what the environment said) -> the action; None ends the episode."""


def run_list() -> None:
    """Print every environment: what is asked, in how many turns, who rewards, and its options."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("name", "turns", "reward", "what is asked, and options with their defaults"):
        table.add_column(header)
    for name in env_names():
        described = describe_env(name)
        options = [f"{option} (required)" for option in described.required]
        options += [_shown(option, default) for option, default in described.defaults.items()]
        told = Text.assemble(described.summary, "\n", (", ".join(options), "dim"))
        table.add_row(name, *_turns_and_reward(name), told)
    console = Console(emoji=False)
    console.print(table)
    console.print()
    libraries = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("of another library", "environments"):
        libraries.add_column(header)
    for library in LIBRARIES:
        libraries.add_row(f"{library}:NAME", Text(_installed(library)))
    console.print(libraries)
    console.print(
        "\nmlxrl-cli envs NAME plays an episode; NAME may be your own path/to/file.py:factory. "
        "mlxrl-cli envs LIBRARY lists all names of a library.",
        highlight=False,
    )


def run_library(library: str) -> None:
    """Print the names of a library's environments, one a line.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        names = library_names(library)
    except Exception as error:  # what a library's import raises
        raise ConfigError(str(error)) from error
    if not names:
        raise ConfigError(f"nothing lists the environments of {library}; name one as {library}:NAME.")
    Console(emoji=False).print(
        "\n".join(f"{library}:{name}" for name in names), highlight=False, markup=False, soft_wrap=True
    )


def run_episode(name: str, settings: Sequence[str], *, task: str | None, seed: int, at_random: bool) -> None:
    """Play one episode and print it turn by turn.

    Raises:
        ConfigError: there is no such environment, option or task.
        RunError: the environment raised, or returned what it must not.
    """
    suite = _suite(name, settings)
    chosen = _task(name, suite, task)
    environment = _call("make", lambda: suite.make(chosen, seed, 0))
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"environment {name!r} made a {type(environment).__name__}; "
            "an environment has max_turns, reset, step and state_id."
        )
    player = random_player(random.Random(seed)) if at_random else _ask
    by_hand = not at_random and sys.stdin.isatty()
    console = Console(emoji=False)
    _say(console, f"{suite.name}, task {chosen.id}, seed {seed}, at most {_turns(environment.max_turns)}", "bold")
    if by_hand:
        _say(console, "Type what a model would say, \\n for a new line; Ctrl-D ends.", "dim")
    with closing(SyncEnv(environment)) as played:
        action = _play(console, played, player, echo=not by_hand)
    if action is not None:
        for reward, weight in suite.rewards:
            _say(console, f"reward function {reward} (weight {weight:g}): {_scored(reward, chosen, action)}", "bold")


def random_player(rng: random.Random) -> Callable[[str], str]:
    """Draws actions: names that stand after an action's form, as in "<action>NAME</action>: a, b", or else words.

    Where nothing is listed, an action is a form that the text shows, such as <tool>12 * 3</tool>, or that form with a
    word in it; where no form is shown, it is a word, bare or as <action>word</action>. Every other word is one of the
    text, the others are common ones.
    """

    def draw(said: str) -> str:
        if listed := re.findall(r"</action>: *([^\n]+)", said):
            return f"<action>{rng.choice(listed[-1].split(', '))}</action>"
        forms = re.findall(r"<(\w+)>([^<>]+)</\1>", said)
        words = re.findall(r"\w+", re.sub(r"<[^<>]*>", " ", said)) or WORDS
        word = rng.choice(rng.choice([words, WORDS]))
        if forms:
            tag, example = rng.choice(forms)
            return f"<{tag}>{rng.choice([example, word])}</{tag}>"
        return rng.choice([word, f"<action>{word}</action>"])

    return draw


def _play(console: Console, environment: SyncEnv, player: Player, *, echo: bool) -> str | None:
    """Play to the end; returns the last action, None if the player left before."""
    states: dict[Hashable, int] = {}
    observation = _call("reset", environment.reset)
    total, turn = 0.0, 0
    while True:
        said = _show(console, observation)
        state = _call("state_id", lambda shown=observation: environment.state_id(shown))
        seen = " again" if state in states else ""
        turn += 1
        _say(console, f"turn {turn}, state {states.setdefault(state, len(states) + 1)}{seen}", "dim")
        action = player(said)
        if action is None:
            _say(console, f"left in turn {turn}; return {total:g}", "bold")
            return None
        if echo:
            _say(console, f"> {action}", "cyan")
        result: StepResult = _call("step", lambda text=action: environment.step(text))
        invalid = ", invalid action" if result.info.get("invalid_action") else ""
        _say(console, f"reward {result.reward:g}{invalid}", "dim")
        total += result.reward
        observation = result.observation
        if result.terminated or result.truncated or turn == environment.max_turns:
            break
    _show(console, observation)
    why = "the environment is done" if result.terminated else "no turns are left"
    _say(console, f"over after {_turns(turn)}, {why}; return {total:g}", "bold")
    return action


def _ask(said: str) -> str | None:
    """A line from the keyboard, or of what is piped in; a backslash and n in it start a new line."""
    with suppress(ImportError):  # where there is one, it makes the arrow keys work
        import readline  # noqa: F401
    by_hand = sys.stdin.isatty()
    try:
        line = input("> " if by_hand else "")
    except EOFError:
        if by_hand:
            print()
        return None
    return line.replace("\\n", "\n")


def _show(console: Console, observation: str | Sequence[Message]) -> str:
    """Print an observation; returns it as text."""
    lines = [
        message["content"] if message["role"] == "user" else f"[{message['role']}] {message['content']}"
        for message in as_messages(observation)
    ]
    text = "\n".join(lines)
    if text:
        _say(console, f"\n{text}")
    return text


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _installed(library: str) -> str:
    """How many environments a library has, and some of them; or how to get it."""
    if not is_installed(library):
        return f'not installed: pip install "mlxrl-env[{library}]"'
    try:
        names = library_names(library)
    except Exception as error:  # what a library's import raises
        return f"installed, and broken: {type(error).__name__}: {error}"
    some = ", ".join(names[:: max(1, len(names) // 4)][:4])
    return f"{len(names)}, such as {some}" if names else "installed; nothing lists them"


def _turns(count: int) -> str:
    return f"{count} turn{'s' if count != 1 else ''}"


def _turns_and_reward(name: str) -> tuple[str, str]:
    """What only the made environment tells; dashes where it needs an option."""
    if describe_env(name).required:
        return "-", "-"
    suite = make_env(name)
    environment = suite.make(suite.tasks("train")[0], 0, 0)
    named = ", ".join(reward for reward, _ in suite.rewards)
    return str(environment.max_turns), named or ("yours" if isinstance(environment, SingleTurnEnv) else "its own")


def _shown(option: str, default: object) -> str:
    """As --set takes it; the name alone where the default is to leave it out."""
    return option if default is None else f"{option}={json.dumps(default, default=str)}"


def _suite(name: str, settings: Sequence[str]) -> Suite:
    options = parse_settings(settings)
    try:
        for option in describe_env(name).required:
            if option not in options:
                raise ValueError(f"environment {name!r} needs the option {option!r}; give --set {option}=VALUE")
        return make_env(name, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # a user's file may raise anything when it is loaded
        raise ConfigError(f"environment {name!r} {_described(error)}") from error


def _task(name: str, suite: Suite, wanted: str | None) -> Task:
    train, held_out = _call("tasks", lambda: (list(suite.tasks("train")), list(suite.tasks("eval"))))
    tasks = [*train, *held_out]
    if not tasks:
        raise ConfigError(f"environment {name!r} has no tasks.")
    if wanted is None:
        return tasks[0]
    if wanted.isdecimal() and int(wanted) < len(train):
        wanted = train[int(wanted)].id
    named = {task.id: task for task in tasks}
    if wanted not in named:
        raise ConfigError(
            f"--task {wanted!r} is no task of {name!r}; give a number below {len(train)}, the training tasks, "
            f"or an id, {tasks[0].id} to {tasks[-1].id}."
        )
    return named[wanted]


def _scored(reward: str, task: Task, action: str) -> str:
    columns = {key: [value] for key, value in task.columns.items()}
    (score,) = _call(
        f"reward {reward}", lambda: reward_function(reward)([task.prompt], [action], [[]], None, **columns)
    )
    return "none" if score is None else f"{score:g}"


def _call(where: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # user code may raise anything
        raise RunError(f"{where} of the environment {_described(error)}") from error


def _described(error: Exception) -> str:
    """What was raised, and where: the message is for whoever writes the environment."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
