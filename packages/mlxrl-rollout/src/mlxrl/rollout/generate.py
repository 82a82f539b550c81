"""Two doors to the engine: completions of plain prompts, and episodes of an environment."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import EnvFactory, Message, SingleTurnEnv, Task
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.episode import RolloutRequest
from mlxrl.rollout.keys import derive_key, derive_seed
from mlxrl.rollout.sampling import SamplingConfig, is_whole
from mlxrl.rollout.trajectory import Trajectory

RolloutMode = Literal["parallel_per_turn", "sequential"]


def group_requests(
    tasks: Sequence[Any],
    env_factory: EnvFactory,
    *,
    group_size: int,
    seed: int = 0,
    step: int = 0,
    group_ids: Sequence[int] | None = None,
    sampling: SamplingConfig | None = None,
) -> list[RolloutRequest]:
    """`group_size` requests for each task: one environment seed a group, one random key a sample.

    Args:
        tasks: what `env_factory` takes, one a group.
        env_factory: `factory(task, seed, group_index) -> Environment`, called positionally.
        group_size: samples a task, at least 1.
        seed: seed of the run.
        step: optimizer step; another step draws other samples of the same task.
        group_ids: one a task; by default 0, 1, 2, ...
        sampling: how their tokens are drawn; None: as the engine draws.

    Raises:
        ValueError: group_size is below 1 or not whole, a seed, step or group id is not a whole number of 64 bits,
            group_ids are not one a task, or env_factory is no function.
    """
    if not is_whole(group_size) or group_size < 1:
        raise ValueError(f"group_size must be a whole number of at least 1, got {group_size!r}.")
    if not callable(env_factory):
        raise ValueError(f"env_factory must be a function of task, seed and group_index, got {env_factory!r}.")
    tasks = list(tasks)
    group_ids = range(len(tasks)) if group_ids is None else list(group_ids)
    if len(group_ids) != len(tasks):
        raise ValueError(f"group_ids must be one a task, got {len(group_ids)} for {len(tasks)} tasks.")
    return [
        RolloutRequest(
            task=task,
            make=partial(env_factory, task, derive_seed(seed, step, group_id), sample),
            group_id=group_id,
            sample_index=sample,
            key=derive_key(seed, step, group_id, sample),
            sampling=sampling,
        )
        for group_id, task in zip(group_ids, tasks, strict=True)
        for sample in range(group_size)
    ]


def generate_agentic_trajectories(
    *,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    env_factory: EnvFactory,
    tasks: Sequence[Any],
    group_size: int,
    sampling: SamplingConfig | None = None,
    rollout_mode: RolloutMode = "parallel_per_turn",
    seed: int = 0,
    step: int = 0,
    **engine_options: Any,
) -> list[Trajectory]:
    """Play `group_size` episodes of each task.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        env_factory: `factory(task, seed, group_index) -> Environment`, called positionally.
        tasks: what the factory takes, one a group.
        group_size: episodes a task.
        sampling: how tokens are drawn.
        rollout_mode: "parallel_per_turn" decodes many rows at once; "sequential" one at a time, for the least memory.
        seed: seed of the run.
        step: optimizer step.
        **engine_options: further arguments of `Engine`.

    Returns:
        Trajectories, the groups one after the other.

    Raises:
        ValueError: group_size is below 1, rollout_mode is unknown, or a width is given to the sequential mode.
    """
    if rollout_mode not in ("parallel_per_turn", "sequential"):
        raise ValueError(f"rollout_mode must be 'parallel_per_turn' or 'sequential', got {rollout_mode!r}.")
    if rollout_mode == "sequential":
        if engine_options.get("width", 1) != 1:
            raise ValueError(f"width must be 1 where rollout_mode is 'sequential', got {engine_options['width']!r}.")
        engine_options = {**engine_options, "width": 1}
    engine = Engine(model, tokenizer, SamplingConfig() if sampling is None else sampling, **engine_options)
    return engine.rollout(group_requests(tasks, env_factory, group_size=group_size, seed=seed, step=step))


def generate_groups(
    *,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: Iterable[str | Sequence[Message]],
    group_size: int,
    sampling: SamplingConfig | None = None,
    seed: int = 0,
    step: int = 0,
    **engine_options: Any,
) -> list[Trajectory]:
    """Complete each prompt `group_size` times; every completion is a trajectory of one turn.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        prompts: text, or chat messages.
        group_size: completions a prompt.
        sampling: how tokens are drawn.
        seed: seed of the run.
        step: optimizer step.
        **engine_options: further arguments of `Engine`.

    Returns:
        Trajectories, the groups one after the other.

    Raises:
        ValueError: prompts is one text or one conversation, or group_size is below 1.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list of prompts, got the text {prompts[:80]!r}; put it in a list.")
    prompts = list(prompts)
    for prompt in prompts:
        if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
            raise ValueError(
                f"prompts must be texts or lists of chat messages, got {prompt!r}; a conversation is "
                "a list in the list."
            )
    tasks = [Task(prompt if isinstance(prompt, str) else tuple(prompt)) for prompt in prompts]
    return generate_agentic_trajectories(
        model=model,
        tokenizer=tokenizer,
        env_factory=single_turn_environment,
        tasks=tasks,
        group_size=group_size,
        sampling=sampling,
        seed=seed,
        step=step,
        **engine_options,
    )


def single_turn_environment(task: Task, seed: int, group_index: int) -> SingleTurnEnv:
    """The environment of a plain prompt, as an `EnvFactory`; seed and group_index change nothing."""
    return SingleTurnEnv(task)
