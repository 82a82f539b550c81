"""What rollouts cost: counted in forward passes, in tokens that are read, and in rows that hold a cache."""

import gc
import math
import string
from itertools import pairwise

import mlx.core as mx
import pytest

from mlxrl.env import Task
from mlxrl.rollout import (
    Role,
    SamplingConfig,
    decoder,
    generate_agentic_trajectories,
    group_requests,
    single_turn_environment,
)
from mlxrl.rollout.audit import audit
from mlxrl.rollout.caches import new_cache

from .comparing import engine_of
from .environments import Chatter, chatter, converse

# Without a template a prompt of one letter is answered with the rest of the alphabet and the end token.
ALPHABET = dict(pairwise(string.ascii_lowercase))
PROMPTS = ["a", "Hello there, how are you?", "What?"]
FIVE = SamplingConfig(temperature=0.7, max_tokens=5)


def saying(num_tokens):
    """The prompt whose answer has so many tokens, the end token included."""
    return Task(string.ascii_lowercase[-num_tokens])


def spell(policy, lengths, *, max_tokens=26, width=64, group_size=1):
    """An engine that has played a row for each length, and the lengths of what they said."""
    engine = engine_of(policy, SamplingConfig(max_tokens=max_tokens), width=width, use_chat_template=False)
    tasks = [saying(length) for length in lengths]
    trajectories = engine.rollout(group_requests(tasks, single_turn_environment, group_size=group_size))
    return engine.stats, [trajectory.num_sampled for trajectory in trajectories]


@pytest.fixture
def spelling(scripted):
    return scripted(ALPHABET)


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_rows_that_end_by_themselves_cost_one_step_more_than_they_needed(spelling, num_tokens):
    stats, lengths = spell(spelling, [num_tokens], group_size=3)
    assert lengths == [num_tokens] * 3
    # the first token comes with the prompt; the host reads one step behind, so that one step follows the end token
    assert stats.decode_forwards == num_tokens


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_rows_at_their_limit_cost_what_they_need(spelling, num_tokens):
    stats, lengths = spell(spelling, [20], max_tokens=num_tokens, group_size=3)
    assert lengths == [num_tokens] * 3
    assert stats.decode_forwards == num_tokens - 1


def test_rows_that_end_early_cost_the_others_nothing(spelling):
    lengths = [3, 9, 1, 5, 12, 2]
    stats, said = spell(spelling, lengths)
    assert said == lengths
    assert stats.decode_forwards == 12
    assert stats.sampled_tokens == sum(lengths)
    assert stats.peak_rows == 6


def test_a_row_that_waits_joins_while_others_decode(spelling):
    # beside the row of 13 tokens three of 4 follow one another, each 3 steps and the one in which its end is read
    stats, said = spell(spelling, [13, 3, 3, 3], width=2)
    assert said == [13, 3, 3, 3]
    assert stats.decode_forwards == 13
    assert stats.peak_rows == 2


def test_one_place_plays_row_after_row(spelling):
    stats, _ = spell(spelling, [5, 2, 7], width=1)
    assert stats.decode_forwards == 5 + 2 + 7
    assert stats.peak_rows == 1


def test_full_rows_are_replaced_at_once(lend):
    engine = engine_of(lend("qwen3"), FIVE, width=2)
    tasks = [Task(prompt) for prompt in PROMPTS]
    trajectories = engine.rollout(group_requests(tasks, single_turn_environment, group_size=3))
    assert {trajectory.num_sampled for trajectory in trajectories} == {5}  # four steps after the first token
    assert engine.stats.decode_forwards == 4 * math.ceil(9 / 2)
    assert engine.stats.peak_rows == 2


@pytest.mark.parametrize(
    ("width", "in_turn", "forwards"),
    [(1, False, 3), (2, False, 3), (64, False, 2), (1, True, 3), (2, True, 3), (64, True, 2)],
)
def test_each_distinct_prompt_is_read_once(lend, width, in_turn, forwards):
    engine = engine_of(lend("qwen3"), FIVE, width=width)
    requests = group_requests([Task(prompt) for prompt in PROMPTS], single_turn_environment, group_size=3)
    if in_turn:  # members of a group far from one another
        requests.sort(key=lambda request: request.sample_index)
    engine.rollout(requests)
    assert engine.stats.prefill_forwards == forwards  # of those that begin together, two share a pass
    # the template is <|user|>, <|end|> and <|assistant|>, and a character is a token
    assert engine.stats.prefill_tokens == sum(len(prompt) + 3 for prompt in PROMPTS)


@pytest.mark.parametrize(("most", "forwards"), [(43, 1), (42, 2), (9, 5)])
def test_a_long_prompt_costs_a_pass_for_each_piece(lend, monkeypatch, most, forwards):
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", most)
    engine = engine_of(lend("qwen3"), SamplingConfig(max_tokens=1))
    engine.rollout(group_requests([Task("x" * 40)], single_turn_environment, group_size=2))
    assert (engine.stats.prefill_forwards, engine.stats.prefill_tokens) == (forwards, 43)


def test_the_time_that_reading_takes_is_told(lend, monkeypatch):
    policy, clock = lend("qwen3"), decoder.DeviceClock()
    engine = engine_of(policy, SamplingConfig(max_tokens=1))
    engine.rollout(group_requests([Task("x" * 40)], single_turn_environment, group_size=2))
    assert engine.stats.decode_forwards == 0
    assert 0 < engine.stats.launch_seconds < engine.stats.seconds - engine.stats.device_seconds
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 9)
    decoder.Reader(policy[0], clock)(new_cache(policy[0], 1), [[1] * 43])
    assert clock.launch_seconds > 0
    assert clock.wait_seconds > 0


def test_a_turn_reads_its_new_tokens_only(scripted):
    policy = scripted({"<|assistant|>": "g", "g": "o"})
    engine = engine_of(policy, SamplingConfig(max_tokens=8))
    engine.rollout(group_requests([("hi", "no", "so")], converse, group_size=4))
    # <|user|>hi<|end|><|assistant|> for all; then each of the four rows twice <|user|>no<|end|><|assistant|>, while the
    # answer "go" and its end token have gone through the steps
    assert engine.stats.prefill_tokens == 5 + 4 * 2 * 5
    assert engine.stats.prefill_forwards == 3
    assert engine.stats.decode_forwards == 3 * 3


def test_a_turn_reads_the_last_token_of_an_action_that_was_cut(lend):
    engine = engine_of(lend("qwen3"), SamplingConfig(temperature=0.7, max_tokens=4))
    trajectories = engine.rollout(group_requests([3, 2], chatter, group_size=2))
    # no step has read the last token where the limit cut the action, unless others went on
    prompt = trajectories[0].turns[0].span[0]
    later = sum(int((t.segments[0].roles != Role.ACTION).sum()) - prompt for t in trajectories)
    cut = sum(turn.action_cut for t in trajectories for turn in t.turns[:-1])
    assert cut > 0
    assert prompt + later <= engine.stats.prefill_tokens <= prompt + later + cut
    assert engine.stats.decode_forwards <= max(t.num_sampled for t in trajectories)  # no row waits where all fit


def test_rows_of_other_turns_are_read_together(lend):
    engine = engine_of(lend("qwen3"), SamplingConfig(temperature=0.7, max_tokens=4))
    requests = group_requests([3], lambda task, seed, member: Chatter(task, "Talk " * (member + 1)), group_size=6)
    trajectories = engine.rollout(requests)
    assert all(len(t.turns) == 3 for t in trajectories)
    # six prompts of 8 to 33 tokens need two passes at most, the observations of a turn about one
    assert engine.stats.prefill_forwards <= 2 + 2 * 2


def test_one_row_at_a_time_keeps_one_cache_at_a_time(lend):
    model, tokenizer = lend("qwen3")
    audit(model)  # plays three rows at once

    def growth(mode):
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        generate_agentic_trajectories(
            model=model, tokenizer=tokenizer, env_factory=chatter, tasks=[2, 3], group_size=8,
            sampling=FIVE, rollout_mode=mode,
        )  # fmt: skip
        return mx.get_peak_memory() - before, mx.get_active_memory() - before

    sequential, kept = growth("sequential")
    parallel, kept_in_parallel = growth("parallel_per_turn")
    assert kept == kept_in_parallel == 0
    # a row's cache has room for 256 tokens of 2 layers with keys and values of 2 heads of 16 floats
    row = 256 * 2 * 2 * 2 * 16 * 4
    assert parallel > 16 * row
    assert sequential < parallel / 8  # 4.6 and 48.7 such rows: caches are copied as they grow and change places


@pytest.mark.parametrize("num_turns", [1, 3])
def test_in_sequence_one_row_holds_a_cache(lend, num_turns):
    engine = engine_of(lend("qwen3"), FIVE, width=1)
    engine.rollout(group_requests([num_turns] * 2, chatter, group_size=3))
    assert engine.stats.peak_rows == 1
