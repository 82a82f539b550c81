"""On MLX's own CPU wheel, in float32, a row is the same to the last bit whatever is played beside it."""

import os
import sys
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.policy.testing import character_tokenizer
from mlxrl.rollout import Engine, SamplingConfig, generate_agentic_trajectories, group_requests

from .comparing import assert_same
from .environments import Chatter

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin" or "blas" in os.environ.get("LD_PRELOAD", "").lower(),
    reason="only the reference BLAS of MLX's Linux wheel sums in one order, however many rows a product has",
)

SAMPLING = SamplingConfig(temperature=0.7, max_tokens=8)
# Prompts of 1 to 40 characters, the longest far past gemma3_text's window of 16.
OPENINGS = ("x", "Hello there", "Talk to me.", "a prompt of some forty characters, aye..")
# Turns of each prompt, and the size of its group: in 32 rows a step has 64 pairs of row and expert, and mlx-lm sorts
# such pairs from there on.
PLAYS = {"one turn": ((1, 1, 1, 1), 8), "several turns": ((3, 1, 4, 2), 3)}
# The end of an action is every tenth token, so that rows leave at different times.
TOKENIZER = TokenizerWrapper(character_tokenizer(), eos_token_ids=list(range(1, 101, 10)))
ARCHITECTURES = ["qwen3", "llama", "qwen3_moe", "gemma3_text", "qwen3_5", "cohere"]
WAYS: dict[str, dict[str, Any]] = {
    "width 2": {"width": 2},
    "width 5": {"width": 5},
    "as environments answer": {"width": 5, "deterministic": False},
    "environments in this thread": {"width": 5, "env_timeout": None},
}


def factory(task, seed, member):
    return Chatter(task[1], task[0])


def tasks_of(turns):
    return list(zip(OPENINGS, PLAYS[turns][0], strict=True))


def requests_of(turns):
    return group_requests(tasks_of(turns), factory, group_size=PLAYS[turns][1])


def play(model, requests, **options):
    return Engine(model, TOKENIZER, SAMPLING, **options).rollout(requests)


def play_in(mode, model, turns):
    return generate_agentic_trajectories(
        model=model, tokenizer=TOKENIZER, env_factory=factory, tasks=tasks_of(turns),
        group_size=PLAYS[turns][1], sampling=SAMPLING, rollout_mode=mode,
    )  # fmt: skip


@pytest.fixture(scope="module")
def together(lend):
    """All rows of an architecture side by side, played once."""
    known = {}

    def rollout(architecture, turns):
        if (architecture, turns) not in known:
            known[architecture, turns] = play_in("parallel_per_turn", lend(architecture)[0], turns)
        return known[architecture, turns]

    return rollout


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(params=PLAYS)
def turns(request):
    return request.param


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_the_same_at_any_width(lend, together, architecture, turns, way):
    assert_same(play(lend(architecture)[0], requests_of(turns), **WAYS[way]), together(architecture, turns), 0)


def test_a_row_is_the_same_alone(lend, together, architecture, turns):
    requests = requests_of(turns)
    for i in range(0, len(requests), 3):  # at least one row of each prompt
        assert_same(play(lend(architecture)[0], requests[i : i + 1]), together(architecture, turns)[i : i + 1], 0)


@pytest.mark.parametrize("width", [3, 64])
def test_a_row_is_the_same_in_any_order(lend, together, architecture, turns, width):
    requests = requests_of(turns)
    order = np.random.default_rng(width).permutation(len(requests))
    shuffled = play(lend(architecture)[0], [requests[i] for i in order], width=width)
    assert_same([shuffled[i] for i in np.argsort(order)], together(architecture, turns), 0)


def test_a_row_is_the_same_in_sequence(lend, together, architecture, turns):
    assert_same(play_in("sequential", lend(architecture)[0], turns), together(architecture, turns), 0)


def test_a_prompt_of_one_token_is_the_same_read_alone_and_beside_longer_ones(lend, architecture):
    requests = group_requests(["x", "yz", "Hello", "w"], lambda opening, *_: Chatter(1, opening), group_size=2)
    together = play(lend(architecture)[0], requests, use_chat_template=False)
    assert {trajectory.turns[0].span[0] for trajectory in together} == {1, 2, 5}
    assert_same(play(lend(architecture)[0], requests, use_chat_template=False, width=1), together, 0)


def test_the_rows_differ_and_end_at_different_times(together, architecture, turns):
    trajectories = together(architecture, turns)
    assert len({tuple(trajectory.completion_ids) for trajectory in trajectories}) >= 0.8 * len(trajectories)
    assert len({trajectory.num_sampled for trajectory in trajectories}) > 3
