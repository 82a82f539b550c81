"""Bytes: the bound of the rows' caches, and that rollouts leave nothing behind."""

import gc
import io
import string
import threading
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.policy.testing import character_tokenizer
from mlxrl.rollout import SamplingConfig, group_requests
from mlxrl.rollout.caches import all_arrays
from mlxrl.rollout.decoder import DecodeBatch, Row
from mlxrl.rollout.play import Play, Room

from .architectures import build
from .comparing import assert_same, engine_of
from .environments import Chatter

SAMPLING = SamplingConfig(temperature=0.7, max_tokens=5)
# Keys and values of a layer of the tiny models: 2 heads of 16 floats each.
LAYER_TOKEN_BYTES = 2 * 2 * 16 * 4
STEP = 256  # tokens by which mlx-lm's caches grow


def requests_of(num_turns, num_characters, num_rows=8):
    """Groups of two, each with a prompt of its own of so many characters and three tokens of the template."""

    def factory(task, seed, member):
        return Chatter(num_turns, task * num_characters)

    return group_requests("abcdefgh"[: num_rows // 2], factory, group_size=2)


def test_a_row_costs_what_its_layers_keep(lend):
    # two layers of keys and values; of gemma3_text's, one sees 16 tokens; qwen3_5 has three layers of a fixed state
    assert engine_of(lend("qwen3"), SAMPLING).room.row_bytes(100) == 100 * 2 * LAYER_TOKEN_BYTES
    assert engine_of(lend("gemma3_text"), SAMPLING).room.row_bytes(100) == (100 + 16) * LAYER_TOKEN_BYTES
    assert engine_of(lend("gemma3_text"), SAMPLING).room.row_bytes(9) == (9 + 9) * LAYER_TOKEN_BYTES
    # 4 heads with states of 16 x 16, and 3 inputs of a convolution over 2 x 16 + 2 x 16 + 4 x 16 channels, in float32
    states = 3 * 4 * (4 * 16 * 16 + 3 * 128)
    assert engine_of(lend("qwen3_5"), SAMPLING).room.row_bytes(100) == states + 100 * LAYER_TOKEN_BYTES


@pytest.mark.parametrize(
    ("num_rows", "peak"), [(20, 8), (8, 8), (7.9, 6), (4, 4), (3.95, 3), (3.9, 2), (2, 2), (1, 1), (0.01, 1)]
)
def test_as_many_rows_are_played_at_once_as_fit(lend, num_rows, peak):
    policy = lend("qwen3")
    row = (92 + 3 + 5) * 2 * LAYER_TOKEN_BYTES  # the prompt, which is kept for the group's other, and all it may say
    budget = max(1, int(num_rows * row))
    engine = engine_of(policy, SAMPLING, cache_bytes=budget)
    trajectories = engine.rollout(requests_of(1, 92))
    assert engine.stats.peak_rows == peak
    # beyond what the tokens fill a row has room for a step, and prompts are kept while members of their group wait
    beyond = peak * STEP * 2 * LAYER_TOKEN_BYTES + peak * 2 * STEP * 2 * LAYER_TOKEN_BYTES
    assert engine.stats.peak_cache_bytes <= max(budget, row) + beyond
    assert_same(trajectories, engine_of(policy, SAMPLING).rollout(requests_of(1, 92)), 1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
def test_the_bound_holds_over_turns_and_changes_no_word(lend, architecture, deterministic):
    policy = lend(architecture)
    free = engine_of(policy, SAMPLING)
    expected = free.rollout(requests_of(3, 100))
    row = free.room.row_bytes(max(len(t.segments[0].token_ids) for t in expected))
    peaks: list[int] = []
    for num_rows in (8, 4, 2, 0.5):
        engine = engine_of(policy, SAMPLING, cache_bytes=int(num_rows * row), deterministic=deterministic)
        assert_same(engine.rollout(requests_of(3, 100)), expected, 1e-5)
        peaks.append(engine.stats.peak_cache_bytes)
        # the rows of the first turns are shorter, so that one more fits now and then
        assert max(1, int(num_rows)) <= engine.stats.peak_rows <= 1.5 * max(1, num_rows)
    # rows that go on as environments answer meet others each time
    assert all(later <= (1 if deterministic else 1.2) * earlier for earlier, later in pairwise(peaks))
    assert peaks[-1] < 0.4 * free.stats.peak_cache_bytes


def held(*most_tokens):
    """Rows that are as long as that when their action is as long as it may be."""
    episodes: list[Any] = [SimpleNamespace(most_tokens=most, num_drawn=0) for most in most_tokens]
    return [Row(episode) for episode in episodes]


@pytest.mark.parametrize(
    ("staying", "joining", "fitting"),
    # 100 bytes, a byte a token; every row is padded to the longest
    [
        ((), (50, 50), 2),
        ((), (50, 51), 1),
        ((), (101,), 0),
        ((30, 10), (30,), 1),
        ((30, 10), (34,), 0),
        ((10, 10), (20, 20, 20, 20), 3),
        ((20,), (10,) * 9, 4),
        ((40, 40, 40), (1,), 0),
        ((), (), 0),
    ],
)
def test_every_row_counts_with_the_length_of_the_longest(staying, joining, fitting):
    room = Room(width=64, ragged=True, row_bytes=lambda num_tokens: num_tokens, cache_bytes=100)
    assert room.how_many_fit(held(*staying), held(*joining), [0] * len(joining)) == fitting


@pytest.mark.parametrize(("prompt_bytes", "fitting"), [((40, 0), 2), ((41, 0), 0), ((40, 1), 2), ((40, 41), 1)])
def test_prompts_that_are_kept_for_others_count(prompt_bytes, fitting):
    room = Room(width=64, ragged=True, row_bytes=lambda num_tokens: num_tokens, cache_bytes=100)
    assert room.how_many_fit(held(10), held(30, 20), prompt_bytes) == fitting


def test_what_rows_have_grown_to_is_counted(lend):
    sampling = SamplingConfig(temperature=0.7, max_tokens=300)
    engine = engine_of(lend("qwen3"), sampling)
    trajectories = engine.rollout(requests_of(1, 0, num_rows=4))
    assert engine.stats.prefill_forwards == 1  # they join at once, and nobody takes a place that gets free
    # the last token of a row is not read; what is shorter has left
    lengths = sorted((len(t.segments[0].token_ids) - 1 for t in trajectories), reverse=True)
    filled = max(num_rows * length for num_rows, length in enumerate(lengths, 1))
    assert filled <= engine.stats.peak_cache_bytes / (2 * LAYER_TOKEN_BYTES) <= filled + 4 * STEP


@pytest.mark.parametrize("deterministic", [True, False])
def test_few_prompts_are_kept_in_whatever_order_rows_come(lend, deterministic):
    policy = lend("qwen3")
    factory = lambda task, seed, member: Chatter(1, task * 500)  # noqa: E731
    requests = sorted(
        group_requests(string.ascii_lowercase[:16], factory, group_size=4), key=lambda request: request.sample_index
    )
    row = engine_of(policy, SAMPLING).room.row_bytes(503 + 5)
    engine = engine_of(policy, SAMPLING, cache_bytes=4 * row, deterministic=deterministic, env_timeout=None)
    trajectories = engine.rollout(requests)
    assert [t.stop_reason for t in trajectories] == [
        t.stop_reason for t in engine_of(policy, SAMPLING).rollout(requests)
    ]
    assert engine.stats.prefill_tokens == 16 * 503
    assert engine.stats.peak_rows == 4
    assert engine.stats.peak_cache_bytes <= 6 * row  # those of the bound, buffers half filled, and no more prompts


def after_steps(work, measure):
    """What measures of the batch after each decode step of some work."""
    step, measured = DecodeBatch.step, []

    def and_measure(batch):
        draws = step(batch)
        measured.append(measure(batch))
        return draws

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeBatch, "step", and_measure)
        work()
    return measured


def active_after_steps(work):
    """Bytes that are held after each decode step of some work, beyond what was held before."""

    def active(_=None):
        mx.synchronize()
        return mx.get_active_memory()

    before = active()
    return [held - before for held in after_steps(work, active)]


def put_off(batch):
    """Operations that what a batch keeps depends on, and that nobody has computed yet."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *all_arrays(batch.cache))
    return graph.getvalue().count("->")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5", "nemotron_h"])
def test_nothing_is_put_off_for_longer_than_a_step(architecture, deterministic):
    tokenizer = TokenizerWrapper(character_tokenizer(), eos_token_ids=list(range(1, 101, 10)))
    sampling = SamplingConfig(temperature=1, max_tokens=40)
    engine = engine_of((build(architecture), tokenizer), sampling, width=3, deterministic=deterministic)
    requests = group_requests(range(1, 13), lambda task, *_: Chatter(1 + task // 10, "x" * task), group_size=2)
    pending = after_steps(lambda: engine.rollout(requests), put_off)
    assert len(pending) > 60
    assert max(pending) == 0


class Together(Chatter):
    """Answers once every episode has asked."""

    def __init__(self, barrier):
        super().__init__(2, "p" * 600)
        self.barrier = barrier

    def step(self, action):
        if not self.turn:
            self.barrier.wait(30)
        return super().step(action)


def test_rows_that_wait_hold_nothing_of_the_batch_that_they_left(lend):
    policy, num_rows = lend("qwen3"), 16
    barrier = threading.Barrier(num_rows)
    requests = [  # each leaves at a step of its own
        replace(request, sampling=SamplingConfig(temperature=0, max_tokens=3 * i + 2))
        for i, request in enumerate(group_requests(range(num_rows), lambda *_: Together(barrier), group_size=1))
    ]
    engine = engine_of(policy, SAMPLING, deterministic=False)
    active = active_after_steps(lambda: engine.rollout(requests))
    whole = num_rows * engine.room.row_bytes(1024)  # buffers of all rows
    assert max(active) < 2 * whole  # one that is left for each would be eight times as much


class Late(Chatter):
    """Of several, each waits at a turn of its own until the last one has come to its end, which waits at none."""

    def __init__(self, place, num_rows, over):
        super().__init__(num_rows, "p" * 30)
        self.place, self.over = place, over

    def step(self, action):
        if self.place == self.max_turns - 1 == self.turn:
            self.over.set()
        elif self.place == self.turn:
            assert self.over.wait(30)
        return super().step(action)


def test_a_row_that_waits_for_long_does_not_hold_those_that_waited_with_it(lend, monkeypatch):
    num_rows, held = 6, []
    count_bytes = Play._count_bytes

    def count(play):
        count_bytes(play)
        caches = {id(one.seat.cache): one.seat.cache for one in play._parked if one.seat is not None}
        held.append(sum(cache[0].keys.shape[0] for cache in [play._batch.cache, *caches.values()] if cache))

    monkeypatch.setattr(Play, "_count_bytes", count)
    over = threading.Event()
    sampling = SamplingConfig(temperature=0, max_tokens=2)
    engine = engine_of(lend("qwen3"), sampling, deterministic=False)
    trajectories = engine.rollout(group_requests(range(num_rows), lambda i, *_: Late(i, num_rows, over), group_size=1))
    assert [len(t.turns) for t in trajectories] == [6] * num_rows
    assert (
        max(held) <= 2 * num_rows
    )  # a row that asks has a seat already, and its place in the batch until that regroups


def test_a_prompt_that_is_kept_holds_none_that_were_read_with_it(lend):
    policy, num_prompts = lend("qwen3"), 24
    factory = lambda task, seed, member: Chatter(1, chr(60 + task) * 20)  # noqa: E731
    few = [group_requests([task], factory, group_size=1)[0] for task in range(num_prompts - 1)]
    many = group_requests([num_prompts - 1], factory, group_size=2 * num_prompts)
    engine = engine_of(policy, SamplingConfig(temperature=0.7, max_tokens=30), width=num_prompts)
    active = active_after_steps(lambda: engine.rollout([*few, *many]))
    row = engine.room.row_bytes(STEP)
    assert max(active) < 1.3 * num_prompts * row  # the rows' buffers, and one prompt


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
def test_a_first_rollout_leaves_nothing_behind(lend, architecture):
    policy = lend(architecture)
    mx.eval(policy[0].parameters())
    mx.synchronize()
    before = mx.get_active_memory()
    engine_of(policy, SAMPLING).rollout(requests_of(2, 20))  # audits the model
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_5"])
def test_memory_is_flat_over_many_rollouts(lend, architecture):
    engine = engine_of(lend(architecture), SamplingConfig(temperature=0.7, max_tokens=3), width=2)
    active, cached = [], []
    mx.clear_cache()
    for i in range(200):  # twenty times the same ten rollouts, of prompts of 1 to 64 characters
        opening = "x" * (1 + 7 * (i % 10))
        engine.rollout(group_requests([1 + i % 2], lambda turns, *_, o=opening: Chatter(turns, o), group_size=3))
        active.append(mx.get_active_memory())
        cached.append(mx.get_cache_memory())
    assert active[19] == active[199]
    assert cached[199] <= 1.05 * cached[19]


@pytest.mark.parametrize("width", [1, 3])
def test_requests_in_any_order_hold_few_prompts(lend, width):
    policy = lend("qwen3")
    requests = requests_of(1, 92)
    engine = engine_of(policy, SAMPLING, width=width)
    together = engine.rollout(requests)
    held = engine.stats.peak_cache_bytes
    apart = engine.rollout(sorted(requests, key=lambda request: request.sample_index))
    assert engine.stats.peak_cache_bytes <= held
    assert_same(sorted(apart, key=lambda one: (one.group_id, one.sample_index)), together, 0)
