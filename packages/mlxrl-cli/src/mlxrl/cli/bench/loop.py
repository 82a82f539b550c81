"""The loops that a user of mlx-lm would write."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlxrl.cli.bench.models import BenchPolicy
from mlxrl.cli.bench.race import InProcess
from mlxrl.cli.bench.work import MultiturnWork, RolloutWork

NAME = "loop"


def loop_rollout(policy: BenchPolicy, work: RolloutWork) -> InProcess:
    """All rows in one batch, each with its own copy of the prompt, until the last has ended; a look at each token."""
    model, sampler = policy.model, make_sampler(temp=work.temperature)
    ends = policy.tokenizer.eos_token_ids

    def play() -> tuple[int, int | None]:
        cache = make_prompt_cache(model)
        rows: list[list[int]] = [[] for _ in work.row_limits]
        logprobs: list[list[float]] = [[] for _ in rows]
        playing = [True] * len(rows)
        inputs_B_L = mx.array([ids for ids in work.prompt_ids for _ in range(work.samples)])
        forwards = 0
        while any(playing):
            tokens_B, logprobs_B = _draw(model(inputs_B_L, cache=cache)[:, -1], sampler)
            forwards += 1
            for row, (token, logprob) in enumerate(zip(tokens_B.tolist(), logprobs_B.tolist(), strict=True)):
                if playing[row]:
                    rows[row].append(token)
                    logprobs[row].append(logprob)
                    playing[row] = token not in ends and len(rows[row]) < work.row_limits[row]
            inputs_B_L = tokens_B[:, None]
        return sum(map(len, rows)), forwards

    return InProcess(NAME, play)


def loop_multiturn(policy: BenchPolicy, work: MultiturnWork) -> InProcess:
    """One episode after the other, its cache kept over the turns."""
    model, tokenizer, sampler = policy.model, policy.tokenizer, make_sampler(temp=work.temperature)

    def play() -> tuple[int, int | None]:
        num_tokens = forwards = 0
        answer = tokenizer.encode(work.answer)
        for task in work.tasks:
            for _ in range(work.samples):
                cache = make_prompt_cache(model)
                inputs = tokenizer.encode(work.opening(task))
                for _ in range(work.turns):
                    action: list[int] = []
                    logprobs: list[float] = []
                    while len(action) < work.max_tokens:
                        token_1, logprob_1 = _draw(model(mx.array([inputs]), cache=cache)[:, -1], sampler)
                        action.append(token_1.item())
                        logprobs.append(logprob_1.item())
                        forwards += 1
                        inputs = action[-1:]
                    tokenizer.decode(action)  # the environment is given text
                    num_tokens += len(action)
                    inputs = [action[-1], *answer]
        return num_tokens, forwards

    return InProcess(NAME, play)


def _draw(logits_B_V: mx.array, sampler: Any) -> tuple[Any, Any]:
    """A token per row and its log-probability, on the host's side of a wait."""
    logits_B_V = logits_B_V.astype(mx.float32)
    logprobs_B_V = logits_B_V - mx.logsumexp(logits_B_V, axis=-1, keepdims=True)
    tokens_B = sampler(logprobs_B_V)
    chosen_B = mx.take_along_axis(logprobs_B_V, tokens_B[:, None], axis=-1)[:, 0]
    mx.eval(tokens_B, chosen_B)  # the host decides which rows go on
    return tokens_B, chosen_B
