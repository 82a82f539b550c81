"""Environments of verifiers: the library runs its rollout, and asks the player in place of a model's server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlxrl.env.adapters.libraries import cannot_be_had, load_library
from mlxrl.env.options import check_whole
from mlxrl.env.protocol import RewardWeights, Split, StepResult, check_split
from mlxrl.env.task import Message, Task


def verifiers_suite(
    env_id: str,
    *,
    seed: int | None = None,
    size: int | None = None,
    eval_size: int | None = None,
    max_turns: int = 20,
    **parameters: Any,
) -> VerifiersSuite:
    """Play an environment of verifiers, rewarded by its rubric.

    Args:
        env_id: an installed package or module with a `load_environment`, "my-env".
        seed: shuffles the rows of its datasets; None leaves them in their order.
        size: number of training tasks; None: all rows.
        eval_size: number of evaluation tasks; None: all rows of its dataset for evaluation, which may be none.
        max_turns: the most actions of an episode where the environment has no limit of its own.
        parameters: of its `load_environment`.

    Raises:
        ValueError: there is no such environment, it takes no such parameter, an option is out of range, or the
            package is not installed.
    """
    name = f"verifiers:{env_id}"
    library = load_library("verifiers", "verifiers")
    if not hasattr(library, "load_environment"):
        raise ValueError(
            f"environment {name!r} needs verifiers with environments that run within a process, "
            'got a version without load_environment; pip install "mlxrl-env[verifiers]"'
        )
    try:
        with _kept_signals():
            environment = library.load_environment(env_id, **parameters)
        _limit_turns(environment, check_whole("max_turns", max_turns, 1))
        tables: dict[Split, Iterable[Mapping[str, Any]]] = {
            "train": environment.get_dataset(-1 if size is None else check_whole("size", size, 1), seed),
            "eval": _held_out(environment, eval_size, seed),
        }
    except Exception as error:  # an environment may raise anything while it loads
        raise cannot_be_had(name, error) from error
    return VerifiersSuite(name, library, environment, tables)


class VerifiersSuite:
    """The rows of an environment's datasets; all episodes are played in the one environment, which scores them.

    Args:
        name: what the suite goes by.
        library: the module verifiers.
        environment: what `load_environment` gave.
        tables: the rows of each split.
    """

    rewards: RewardWeights = ()

    def __init__(
        self, name: str, library: Any, environment: Any, tables: Mapping[Split, Iterable[Mapping[str, Any]]]
    ) -> None:
        self.name = name
        self._library = library
        self._environment = environment
        self._tasks = {
            split: tuple(
                Task(tuple(_messages(row["prompt"])), {"answer": row.get("answer"), "row": row}, f"{split}-{index}")
                for index, row in enumerate(table)
            )
            for split, table in tables.items()
        }

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split, each with its "answer" and the whole of its "row" as columns."""
        check_split(split)
        return self._tasks[split]

    def make(self, task: Task, seed: int, group_index: int) -> VerifiersEnv:
        """A rollout of the row."""
        return VerifiersEnv(self._library, self._environment, task)


class VerifiersEnv:
    """A rollout of verifiers, played turn by turn; the reward is its rubric's, at the end.

    Text goes in and out: a tool call that a server would have parsed out of the text is not one here. A state is all
    that was said so far.

    Args:
        library: the module verifiers.
        environment: what plays and scores.
        task: its column "row" is the rollout's input.
    """

    def __init__(self, library: Any, environment: Any, task: Task) -> None:
        self.max_turns = int(environment.max_turns)
        self._library = library
        self._environment = environment
        self._row = task.columns["row"]
        self._said: tuple[Message, ...] = ()

    async def reset(self) -> Sequence[Message]:
        """Starts the rollout and returns what it asks first.

        Raises:
            RuntimeError: it ended without asking.
        """
        self._asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._said = ()
        client = _asking_client(self._library, self._ask)
        self._rollout = asyncio.ensure_future(self._environment.run_rollout(self._row, client, "mlxrl", {}))
        messages = await self._next()
        if messages is None:
            raise RuntimeError(f"the rollout ended before it asked anything: {self._outcome().get('error')}")
        return messages

    async def step(self, action: str) -> StepResult:
        """Answers, and returns what is asked next, or the reward.

        Raises:
            RuntimeError: the rollout failed.
        """
        self._said += ({"role": "assistant", "content": action},)
        self._answers.put_nowait(action)
        messages = await self._next()
        if messages is not None:
            return StepResult(messages, 0.0, terminated=False)
        outcome = self._outcome()
        if outcome.get("error"):
            raise RuntimeError(f"the rollout failed: {outcome['error']}")
        last = _messages(outcome["completion"] or ())[len(self._said) - self._prompt_length :]
        return StepResult(last or "", float(outcome["reward"]), terminated=True, info=dict(outcome["metrics"] or {}))

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """All that was said so far."""
        return tuple((message["role"], message["content"]) for message in self._said)

    async def _next(self) -> list[Message] | None:
        """What is new in the next question; None where the rollout ended."""
        asking = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            return None
        conversation = asking.result()
        news = conversation[len(self._said) :]
        if not self._said:
            self._prompt_length = len(news)
        if not news or tuple(conversation[: len(self._said)]) != self._said:
            raise RuntimeError("the environment rewrote what was said before, which a played transcript cannot follow")
        self._said += tuple(news)
        return news

    async def _ask(self, conversation: list[Message]) -> str:
        self._asked.put_nowait(conversation)
        return await self._answers.get()

    def _outcome(self) -> Mapping[str, Any]:
        return self._rollout.result()


def _asking_client(library: Any, ask: Any) -> Any:
    """A client of verifiers whose model is `ask`."""
    types = load_library("verifiers.types", "verifiers")

    async def get_response(self: Any, prompt: Any, *rest: Any, **options: Any) -> Any:
        said = types.ResponseMessage(content=await ask(_messages(prompt)), finish_reason="stop", is_truncated=False)
        return types.Response(id="0", created=0, model="mlxrl", message=said)

    unused = dict.fromkeys(library.Client.__abstractmethods__)  # its get_response alone calls them
    return type("AskingClient", (library.Client,), {**unused, "get_response": get_response})(None)


def _messages(value: Any) -> list[Message]:
    """Messages of verifiers, its own objects or dicts, as ours; parts that are no text are left out."""
    items: list[Any] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    plain: list[dict[str, Any]] = [dict(item) for item in items]
    return [{"role": str(message["role"]), "content": _text(message.get("content"))} for message in plain]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = [dict(part) for part in content]
    return "".join(part["text"] for part in parts if part.get("type") == "text")


def _limit_turns(environment: Any, most: int) -> None:
    """Gives an environment without a turn limit one, so that it ends and scores the episode itself."""
    if getattr(environment, "max_turns", 0) < 1:
        environment.max_turns = most


def _held_out(environment: Any, size: int | None, seed: int | None) -> Iterable[Mapping[str, Any]]:
    """Rows for evaluation; none where the environment would give rows to train on instead."""
    if size == 0 or environment.build_eval_dataset() is None:
        return ()
    return environment.get_eval_dataset(-1 if size is None else check_whole("eval_size", size, 0), seed)


@contextmanager
def _kept_signals() -> Generator[None]:
    """A context after which Ctrl-C does what it did before: an environment of verifiers takes it over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where signals cannot be set, and verifiers refuses
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
