"""Run by `peer.PeerProcess` with inductive-mlxrl on its path: here `mlxrl` is that package, not ours.

The first line on standard input is the setup; each later one names a path to take, and each is answered with a line.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
import json
import os
import sys
import time
from functools import partial
from importlib.metadata import version

import mlx.core as mx
import mlx.optimizers as optim

from mlxrl.algo import GRPOAlgorithm
from mlxrl.policy import LoRAConfig, load_policy_with_lora
from mlxrl.rollout import (
    Completion,
    SamplingConfig,
    generate_agentic_trajectories,
    generate_group_rollouts,
    generate_prefix_cached_group_rollouts,
)
from mlxrl.train import batch_from_rollouts, optimizer_step


def rollout_paths(work, common):
    """What its `train` uses, its batched path plain and compiled, and the compiled one that does row after row."""
    common = {
        **common,
        "prompts": work["prompts"],
        "group_size": work["samples"],
        "config": sampling_config(work),
        "use_chat_template": False,
    }
    cached = partial(generate_prefix_cached_group_rollouts, **common)
    paths = {
        "train": partial(generate_group_rollouts, **common),
        "batched": partial(cached, batch_groups=True),
        "compiled": partial(cached, batch_groups=True, compile_decode_step=True),
        "serial": partial(cached, compile_decode_step=True),
    }
    return paths, lambda completions: sum(len(completion.completion_tokens) for completion in completions)


def multiturn_paths(work, common):
    """What its `train` uses; there is no other."""
    play = partial(
        generate_agentic_trajectories,
        **common,
        env_factory=lambda task, seed, group_index: Answering(work["observation"], work["turns"]),
        tasks=work["tasks"],
        group_size=work["samples"],
        sampling=sampling_config(work),
    )
    return {"train": play}, lambda episodes: sum(len(step.action_tokens) for e in episodes for step in e.steps)


def sampling_config(work):
    return SamplingConfig(max_tokens=work["max_tokens"], temperature=work["temperature"], top_p=1.0)


def update_paths(work, common):
    """What its `train` does with completions: the old policy's forward pass, and a step; no reference, no KL."""
    model, algorithm, optimizer = common["model"], GRPOAlgorithm(), optim.Adam(learning_rate=0.0)
    samples, completions = work["samples"], work["completion_ids"]
    rows = [
        Completion(
            i // samples, i % samples, tuple(work["prompt_ids"][i // samples]), tuple(ids), (0.0,) * len(ids), ""
        )
        for i, ids in enumerate(completions)
    ]
    row_tokens = len(rows[0].prompt_tokens) + len(rows[0].completion_tokens)
    budget = work["micro_batch_tokens"]
    common = {"model": model, "algorithm": algorithm, "pad_token_id": 0}

    def step():
        batch = batch_from_rollouts(
            **common, completions=rows, rewards=work["rewards"], group_size=samples, compute_reference=False
        )
        optimizer_step(
            **common,
            optimizer=optimizer,
            batch=batch,
            beta=0.0,
            micro_batch_size=0 if budget is None else max(1, budget // row_tokens),
        )
        return batch.completion_token_ids

    return {"train": step}, lambda completions: sum(map(len, completions))


class Answering:
    """Answers every action with the same text."""

    def __init__(self, observation, turns):
        self.observation, self.max_turns = observation, turns

    def reset(self):
        return self.observation

    def step(self, action):
        return self.observation, 0.0, False, {}

    def state_id(self, observation):
        return 0


def main():
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the package prints is no answer

    def answer(message):
        print(json.dumps(message), file=answers, flush=True)

    setup = json.loads(sys.stdin.readline())
    model, tokenizer, _ = load_policy_with_lora(setup["model"], LoRAConfig(rank=setup["rank"], scale=setup["scale"]))
    tokenizer.eos_token = None
    tokenizer.eos_token_ids = setup["ends"]
    mx.random.seed(setup["seed"])
    work, common = setup["work"], {"model": model, "tokenizer": tokenizer}
    make = {"rollout": rollout_paths, "multiturn": multiturn_paths, "update": update_paths}[setup["command"]]
    paths, count = make(work, common)
    answer({"version": version("inductive-mlxrl")})
    for line in sys.stdin:
        play = paths[json.loads(line)["path"]]
        mx.reset_peak_memory()
        started = time.perf_counter()
        try:
            played = play()
        except Exception as error:  # one path that breaks leaves the others
            answer({"error": f"{type(error).__name__}: {error}"})
            continue
        mx.synchronize()
        seconds = time.perf_counter() - started
        answer({"tokens": count(played), "seconds": seconds, "peak_bytes": mx.get_peak_memory()})


main()
