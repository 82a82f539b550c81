"""A tiny model, hand-made episodes and runnable configs, for every test of this package; all on the CPU."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.env import StopReason, Task
from mlxrl.policy import LoRAConfig, load_policy_with_lora
from mlxrl.policy.testing import make_tiny_model
from mlxrl.rollout import Role, Segment, Trajectory, Turn

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}
EOS = 1  # of the tiny models' tokenizer

# A reward with many values on random text: the share of letters and digits, less a twentieth for each sign.
REWARD = """
import threading


def spread(prompts, completions, completion_ids, trajectories, **columns):
    return [sum(c.isalnum() for c in text) / 8 - sum(not c.isalnum() for c in text) / 20 for text in completions]


def by_answer(prompts, completions, completion_ids, trajectories, answer, factor=1.0, **columns):
    shares = spread(prompts, completions, completion_ids, trajectories)
    more = threading.current_thread() is threading.main_thread()  # where functions without a timeout run
    return [factor * share + len(right) + more for share, right in zip(shares, answer, strict=True)]
"""
# Two rooms, whose name the environment tells; each turn pays for capital letters.
ENVIRONMENT = """
import time

from mlxrl.env import StepResult


class Rooms:
    def __init__(self, task, turns, fails_at):
        self.max_turns, self.task, self.fails_at = turns, task, fails_at

    def reset(self):
        self.turn = 0
        return f"room {self.task % 3}"

    def step(self, action):
        if self.turn == self.fails_at:
            raise OSError("the door is stuck")
        self.turn += 1
        paid = sum(c.isupper() for c in action) / 8
        return StepResult(f"room {len(action) % 2}", paid, False, self.turn == self.max_turns)

    def state_id(self, observation):
        return observation


def rooms(task, seed, group_index):
    return Rooms(task, 3, -1)


def failing(task, seed, group_index):
    # every third episode breaks, at its first, second or third turn
    return Rooms(task, 3, task % 3 if (task + group_index) % 3 == 0 else -1)


class Thoughtful(Rooms):
    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


def slow(task, seed, group_index):
    # the first of each group takes its time
    return (Rooms if group_index else Thoughtful)(task, 3, -1)
"""


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3, **SMALL)


@pytest.fixture(scope="session")
def load(tiny: Path) -> Callable[..., Any]:
    """load(**lora) -> the tiny model with an adapter that is no longer that of the start; the test's own to change."""

    def make(**lora: Any) -> Any:
        model, _, _ = load_policy_with_lora(tiny, LoRAConfig(**{"rank": 2, "seed": 5, **lora}))
        mx.random.seed(11)
        adapter = dict(tree_flatten(model.trainable_parameters()))
        moved = [(name, value + 0.1 * mx.random.normal(value.shape)) for name, value in adapter.items()]
        model.update(tree_unflatten(moved))
        mx.eval(model.parameters())
        return model

    return make


@pytest.fixture(scope="session")
def policy(load: Callable[..., Any]) -> Any:
    """The model of `load()` for all tests that leave it as it is."""
    return load()


@pytest.fixture
def episode() -> Callable[..., Trajectory]:
    """episode(group, lengths, ...) -> a trajectory of random tokens with a turn for each length of an action."""
    return make_episode


def make_episode(
    group: int,
    lengths: tuple[int, ...],
    *,
    reward: float | None = 0.0,
    seed: int = 0,
    prompt: int = 3,
    observation: int = 2,
    context: str = "transcript",
    echo: bool = False,
    truncated: bool = False,
    failed: bool = False,
    turn_rewards: tuple[float, ...] | None = None,
) -> Trajectory:
    rng = random.Random(f"{seed}/{group}/{lengths}")
    segments, turns = [], []
    tokens: list[tuple[int, int, int, float]] = []  # id, role, turn, sampler log-prob

    def words(count: int) -> list[int]:
        return [rng.randrange(5, 100) for _ in range(count)]

    for turn, length in enumerate(lengths):
        if context == "turn" and tokens:
            segments.append(tokens)
            tokens = []
        observed = Role.ECHO if echo and tokens else Role.MASKED
        tokens += [(token, int(observed), turn, 0.0) for token in words(observation if tokens else prompt)]
        action = words(length - 1) + ([7] if truncated and turn == len(lengths) - 1 else [EOS])
        tokens += [(token, int(Role.ACTION), turn, -4.0 - rng.random()) for token in action]
        paid = 0.0 if turn_rewards is None else turn_rewards[turn]
        span = (len(tokens) - length, len(tokens))
        turns.append(Turn(f"room {turn % 2}", f"room {turn % 2}", len(segments), span, "text", paid))
    segments.append(tokens)
    ends = StopReason.env_error if failed else StopReason.length if truncated else StopReason.stop
    return Trajectory(
        task=Task("prompt", {}, f"task-{group}"),
        group_id=group,
        sample_index=seed,
        segments=tuple(_segment(part) for part in segments),
        turns=tuple(turns),
        stop_reason=ends,
        error="broke" if failed else None,
        reward=None if failed else reward,
        reward_parts={} if failed else {"reward": reward},
    )


def _segment(tokens: list[tuple[int, int, int, float]]) -> Segment:
    token_ids, roles, turns, logprobs = zip(*tokens, strict=True)
    return Segment(
        token_ids=np.array(token_ids, dtype=np.int32),
        roles=np.array(roles, dtype=np.int8),
        turns=np.array(turns, dtype=np.int32),
        sampler_logprobs=np.array(logprobs, dtype=np.float32),
    )


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward file, an environment file and twelve tasks."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "my_envs.py").write_text(ENVIRONMENT)
    lines = [
        f'{{"prompt": "{"ab"[i % 2] * (1 + i)}", "answer": "{i}", "other": "{"xyz"[i % 3] * 2}"}}' for i in range(12)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def quick(tiny: Path, project: Path) -> dict[str, Any]:
    """The fields of a quick run on prompts of a file, rewarded with many values; without its folder."""
    return {
        "model_id": str(tiny),
        "env_name": "jsonl",
        "data": {"path": str(project / "tasks.jsonl")},
        "rewards": [{"name": f"{project / 'my_rewards.py'}:spread"}],
        "steps": 2,
        "group_size": 3,
        "groups_per_step": 2,
        "max_completion_len": 5,
        "rank": 2,
        "optimizer": {"learning_rate": 0.01},
    }


@pytest.fixture
def values(quick: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """values(**fields) -> the fields of a quick run in a folder of the test."""
    return lambda **fields: quick | {"output": str(tmp_path / "run")} | fields


@pytest.fixture
def rooms(values: Callable[..., dict[str, Any]], project: Path) -> Callable[..., dict[str, Any]]:
    """rooms(**fields) -> the fields of a quick run in three turns, paid by the environment."""

    def make(**fields: Any) -> dict[str, Any]:
        base = values(env_name=f"{project / 'my_envs.py'}:rooms", rewards=[], max_completion_len=4)
        del base["data"]
        return base | fields

    return make
