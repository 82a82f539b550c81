"""A training step on given completions: the trainer's own, and the one that a user would write."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from mlxrl.algo import make_algorithm
from mlxrl.cli.bench.models import BenchPolicy
from mlxrl.cli.bench.ours import NAME
from mlxrl.cli.bench.work import UpdateWork
from mlxrl.env import StopReason
from mlxrl.policy import checkpoint_blocks, whole_rows
from mlxrl.rollout import Role, Segment, Trajectory, Turn
from mlxrl.train import TrainBatch, batch_from_rollouts, optimizer_step

PLAIN, FUSED, CHECKPOINTED = "plain", "fused", "checkpointed"


def update_steps(policy: BenchPolicy, work: UpdateWork) -> dict[str, Callable[[], float]]:
    """Per contestant a training step, which returns the norm of the gradient.

    The learning rate is 0: a step is all of its work, and the next one finds the same policy.
    """
    model, algorithm, optimizer = policy.model, make_algorithm("grpo"), optim.Adam(learning_rate=0.0)
    trajectories = make_trajectories(work)

    def batch() -> TrainBatch:
        return batch_from_rollouts(
            model=model,
            completions=trajectories,
            rewards=work.rewards,
            group_size=work.samples,
            pad_token_id=0,
            algorithm=algorithm,
        )

    def ours(use_checkpoint: bool) -> float:
        metrics = optimizer_step(
            model=model,
            optimizer=optimizer,
            batch=batch(),
            algorithm=algorithm,
            use_checkpoint=use_checkpoint,
            max_tokens=work.micro_batch_tokens,
        )
        return metrics["grad_norm"]

    def plain() -> float:
        """Every row is read whole, and all logits of a pass are there at once."""
        checkpoint_blocks(model, enabled=False)
        whole = batch()
        gradient: Any = None
        for rows in work.whole_rows():

            def loss(rows=rows) -> mx.array:
                logprobs = plain_logprobs(model, work, rows)
                token_loss = algorithm.token_loss(logprobs, None, None, whole.advantages[rows], mx.ones_like(logprobs))
                return (whole.weights[rows] * token_loss).sum()

            _, part = nn.value_and_grad(model, loss)()
            gradient = part if gradient is None else tree_map(mx.add, gradient, part)
            mx.eval(gradient)  # one pass's activations at a time
        gradient, norm = optim.clip_grad_norm(gradient, math.inf)
        optimizer.update(model, gradient)
        mx.eval(model.trainable_parameters(), optimizer.state)  # the step is taken
        return float(norm)

    def fused() -> float:
        """Every row is read whole, and the head runs in chunks with its gradient beside."""
        with whole_rows(model):
            return ours(False)

    return {NAME: lambda: ours(False), PLAIN: plain, FUSED: fused, CHECKPOINTED: lambda: ours(True)}


def plain_logprobs(model: nn.Module, work: UpdateWork, rows: slice) -> mx.array:
    """Log-probabilities of the completions of some rows, float32 `[B, T]`, from all of their logits."""
    tokens_B_L = mx.array(np.concatenate([work.prompts_of_rows, work.completion_ids], axis=1)[rows])
    start = len(work.prompt_ids[0])
    logits_B_T_V = model(tokens_B_L[:, :-1])[:, start - 1 :].astype(mx.float32)
    logprobs_B_T_V = logits_B_T_V - mx.logsumexp(logits_B_T_V, axis=-1, keepdims=True)
    return mx.take_along_axis(logprobs_B_T_V, tokens_B_L[:, start:, None], axis=-1)[..., 0]


def make_trajectories(work: UpdateWork) -> list[Trajectory]:
    """The completions as the engine would have recorded them."""
    return [
        _trajectory(prompt, completion, *divmod(row, work.samples))
        for row, (prompt, completion) in enumerate(zip(work.prompts_of_rows, work.completion_ids, strict=True))
    ]


def _trajectory(prompt: Sequence[int], completion: Sequence[int], group_id: int, sample_index: int) -> Trajectory:
    start, end = len(prompt), len(prompt) + len(completion)
    roles_T = np.full(end, Role.MASKED, dtype=np.int8)
    roles_T[start:] = Role.ACTION
    segment = Segment(
        token_ids=np.array([*prompt, *completion], dtype=np.int32),
        roles=roles_T,
        turns=np.zeros(end, dtype=np.int32),
        sampler_logprobs=np.zeros(end, dtype=np.float32),
    )
    turn = Turn(observation="", state_id=group_id, segment=0, span=(start, end), action="")
    return Trajectory(None, group_id, sample_index, (segment,), (turn,), StopReason.stop)
