"""mlxrl itself, by its public API."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from mlxrl.cli.bench.models import BenchPolicy
from mlxrl.cli.bench.race import InProcess
from mlxrl.cli.bench.work import MultiturnWork, RolloutWork
from mlxrl.env import StepResult, Task
from mlxrl.rollout import Engine, RolloutRequest, SamplingConfig, group_requests, single_turn_environment

NAME = "mlxrl"


def make_engine(policy: BenchPolicy, work: RolloutWork | MultiturnWork, options: dict[str, Any]) -> Engine:
    """The engine that does the work; prompts are read as they are."""
    sampling = SamplingConfig(temperature=work.temperature, max_tokens=work.max_tokens)
    return Engine(policy.model, policy.tokenizer, sampling, use_chat_template=False, **options)


def our_rollout(engine: Engine, work: RolloutWork, seed: int) -> InProcess:
    """Completions of plain prompts; each round draws others."""
    rounds = count()

    def play() -> tuple[int, int | None]:
        tasks = [Task(prompt) for prompt in work.prompts]
        requests = group_requests(tasks, single_turn_environment, group_size=work.samples, seed=seed, step=next(rounds))
        if work.limits is not None:
            requests = [
                replace(request, sampling=replace(engine.sampling, max_tokens=limit))
                for request, limit in zip(requests, work.limits, strict=True)
            ]
        return _roll_out(engine, requests)

    return InProcess(NAME, play)


def our_multiturn(engine: Engine, work: MultiturnWork, seed: int) -> InProcess:
    """Episodes; each round draws others."""
    rounds = count()

    def play() -> tuple[int, int | None]:
        def make(task: str, seed: int, group_index: int) -> AnsweringEnv:
            return AnsweringEnv(work, task)

        return _roll_out(
            engine, group_requests(work.tasks, make, group_size=work.samples, seed=seed, step=next(rounds))
        )

    return InProcess(NAME, play)


def _roll_out(engine: Engine, requests: Sequence[RolloutRequest]) -> tuple[int, int]:
    trajectories = engine.rollout(requests)
    stats = engine.stats
    return sum(trajectory.num_sampled for trajectory in trajectories), stats.decode_forwards + stats.prefill_forwards


@dataclass
class AnsweringEnv:
    """Answers every action with the same text."""

    work: MultiturnWork
    task: str
    max_turns: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_turns = self.work.turns

    def reset(self) -> str:
        """The task."""
        return self.work.opening(self.task)

    def step(self, action: str) -> StepResult:
        """The next thing to read, whatever the action."""
        return StepResult(self.work.answer, reward=0.0, terminated=False)

    def state_id(self, observation: object) -> str:
        """There is one state."""
        return self.task
