from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from mlxrl.env import StopReason, Task
from mlxrl.policy import score
from mlxrl.rollout import (
    Engine,
    Role,
    SamplingConfig,
    generate_agentic_trajectories,
    generate_groups,
    group_requests,
    naive_rollout,
    single_turn_environment,
)
from mlxrl.rollout.audit import audit

from .comparing import assert_same, scorer_distance

PROMPTS = ["a", "Hello there, how are you?", "What?"]
SAMPLING = SamplingConfig(temperature=0.7, max_tokens=5)


def requests_of(prompts=PROMPTS, group_size=3, **options):
    return group_requests(
        [Task(prompt) for prompt in prompts], single_turn_environment, group_size=group_size, **options
    )


def engine_of(lend, **options):
    model, tokenizer = lend("qwen3")
    return Engine(model, tokenizer, SAMPLING, **options)


@pytest.fixture(scope="module")
def alone(lend):
    """What each architecture says without cache or batch, computed once."""
    known = {}

    def rollout(architecture):
        if architecture not in known:
            model, tokenizer = lend(architecture)
            limits = Engine(model, tokenizer, SAMPLING).limits
            known[architecture] = naive_rollout(model, tokenizer, requests_of(), limits)
        return known[architecture]

    return rollout


@pytest.mark.parametrize("width", [1, 2, 5, 64])
def test_the_engine_says_what_the_plainest_loop_says(lend, alone, architecture, width):
    model, tokenizer = lend(architecture)
    assert_same(Engine(model, tokenizer, SAMPLING, width=width).rollout(requests_of()), alone(architecture))


def test_the_scorer_gives_each_sampled_token_the_samplers_probability(lend, alone, architecture):
    model, tokenizer = lend(architecture)
    trajectories = Engine(model, tokenizer, SAMPLING).rollout(requests_of())
    assert scorer_distance(model, trajectories, 0.7) < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_sampler_and_scorer_agree_at_other_temperatures(lend, architecture, temperature):
    model, tokenizer = lend(architecture)
    sampling = SamplingConfig(temperature=temperature, max_tokens=6)
    assert scorer_distance(model, Engine(model, tokenizer, sampling).rollout(requests_of()), temperature) < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_sampler_and_scorer_agree_after_the_weights_moved(make, architecture):
    model, tokenizer = make(architecture)
    engine, optimizer = Engine(model, tokenizer, SAMPLING), optim.Adam(learning_rate=0.02)
    first = engine.rollout(requests_of())
    for step in range(3):
        tokens = np.stack([t.segments[0].token_ids[:10] for t in engine.rollout(requests_of(PROMPTS[1:2], step=step))])
        mask = np.ones_like(tokens) * (np.arange(10) > 0)
        gradient = nn.value_and_grad(model, lambda t=tokens, m=mask: score(model, t, m).logprobs.sum())()[1]
        optimizer.update(model, gradient)
        mx.eval(model.parameters())
    moved = engine.rollout(requests_of())
    assert scorer_distance(model, moved, 0.7) < 1e-4
    # the prompts were read anew: the old samples have other probabilities now
    assert scorer_distance(model, first, 0.7) > 1e-2


def test_a_row_does_not_depend_on_order_or_neighbours(lend):
    model, tokenizer = lend("qwen3")
    engine = Engine(model, tokenizer, SAMPLING, width=4)
    requests = requests_of()
    together = engine.rollout(requests)
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = engine.rollout([requests[i] for i in order])
    assert_same([shuffled[i] for i in np.argsort(order)], together, 1e-5)
    for i in (0, 4, 8):
        assert_same(engine.rollout([requests[i]]), [together[i]], 1e-5)


def test_prompts_of_very_different_length_share_a_batch(lend):
    model, tokenizer = lend("qwen3")
    prompts = ["x", "long " * 60]
    engine = Engine(model, tokenizer, SAMPLING)
    requests = requests_of(prompts, 2)
    assert_same(engine.rollout(requests), naive_rollout(model, tokenizer, requests, engine.limits))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "gemma3_text"])
def test_a_prompt_of_one_token_is_enough(lend, architecture):
    model, tokenizer = lend(architecture)
    engine = Engine(model, tokenizer, SAMPLING, use_chat_template=False)
    requests = requests_of(["x", "y", "some more"], 2)
    together = engine.rollout(requests)
    lengths = [1, 1, 1, 1, *[len(tokenizer.encode("some more"))] * 2]
    assert [len(t.segments[0].token_ids) - t.num_sampled for t in together] == lengths
    assert_same(together, naive_rollout(model, tokenizer, requests, engine.limits, use_chat_template=False))
    assert_same(engine.rollout(requests[:1]), together[:1])


def test_a_model_whose_rows_mix_in_a_batch_is_run_row_by_row(lend, alone):
    # With soft caps mlx-lm lays gemma2's mask of B rows over its 2 key-value heads: 2 rows are mixed up without a
    # word, 3 are refused
    model, tokenizer = lend("gemma2")
    assert not audit(model).batched
    with pytest.warns(UserWarning, match="a gemma2 model is played row by row: "):
        engine = Engine(model, tokenizer, SAMPLING, width=2)
    assert engine.width == 1
    assert_same(engine.rollout(requests_of()), alone("gemma2"))


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_5", "qwen3_moe", "gemma3_text", "cohere"])
def test_the_rows_of_the_others_stay_apart(lend, architecture):
    verdict = audit(lend(architecture)[0])
    assert verdict.batched
    assert verdict.ragged
    assert verdict.reason == ""


def completions(lend, **options):
    model, tokenizer = lend("cohere")  # the one whose next token is least certain
    options = {"prompts": PROMPTS[:2], "group_size": 4, "sampling": SamplingConfig(max_tokens=8)} | options
    return [t.completion_ids for t in generate_groups(model=model, tokenizer=tokenizer, **options)]


def test_the_members_of_a_group_differ_and_so_do_steps_and_seeds(lend):
    first = completions(lend)
    assert len({tuple(ids) for ids in first}) == 8
    assert completions(lend) == first
    for other in (completions(lend, step=1), completions(lend, seed=1)):
        assert all(one != two for one, two in zip(first, other, strict=True))


def test_the_same_prompt_twice_makes_two_groups(lend):
    model, tokenizer = lend("cohere")
    trajectories = generate_groups(
        model=model, tokenizer=tokenizer, prompts=["hi", "hi"], group_size=2, sampling=SAMPLING
    )
    assert [(t.group_id, t.sample_index) for t in trajectories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({tuple(t.completion_ids) for t in trajectories}) == 4


def test_an_end_token_is_an_action_ends_its_row_and_costs_the_others_nothing(lend):
    model, tokenizer = lend("llama")
    engine = Engine(model, tokenizer, SamplingConfig(max_tokens=40), width=64)
    trajectories = engine.rollout(requests_of(group_size=4))
    lengths = [t.num_sampled for t in trajectories]
    assert len(set(lengths)) > 3  # some ended early, at different places
    for trajectory in trajectories:
        segment, ids = trajectory.segments[0], trajectory.completion_ids
        ended = ids[-1] in tokenizer.eos_token_ids
        assert trajectory.stop_reason == (StopReason.stop if ended else StopReason.length)
        assert ended or len(ids) == 40
        assert not set(ids[:-1]) & set(tokenizer.eos_token_ids)
        assert segment.roles[-1] == Role.ACTION  # the end token itself is trained
        assert segment.sampler_logprobs[-1] < 0
        assert not trajectory.turns[0].action.endswith("<|end|>")
        assert trajectory.truncated != ended
    assert any(t.stop_reason == StopReason.stop for t in trajectories)
    # the first token comes from the prompt's own pass, and the host knows that the longest row is at its limit
    assert engine.stats.decode_forwards == max(lengths) - 1 == 39
    assert engine.stats.sampled_tokens == sum(lengths)


def test_nothing_to_play_is_no_trajectories(lend):
    assert engine_of(lend).rollout([]) == []


@pytest.mark.parametrize("name", ["width", "max_prompt_len", "max_turns", "max_observation_len"])
def test_limits_below_one_are_refused_by_name(lend, name):
    for value in (0, 1.5, True, "4"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {value!r}"):
            engine_of(lend, **{name: value})
    engine_of(lend, **{name: np.int64(4)})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"env_timeout": "5"}, "env_timeout must be above 0 seconds.* got '5'"),
        (
            {"template_kwargs": {"tokenize": True}},
            "template_kwargs must be a dict by name, none of .*tokenize.* got {'tokenize'",
        ),
        ({"template_kwargs": ["a"]}, r"template_kwargs must be a dict by name, .* got \['a'\]"),
        ({"template_kwargs": 5}, r"template_kwargs must be a dict by name, .* got 5"),
        ({"template_kwargs": {1: 2}}, r"template_kwargs must be a dict by name, .* got {1: 2}"),
        ({"template_kwargs": {"continue_final_message": True}}, "none of .*continue_final_message"),
        ({"env_timeout": True}, "env_timeout must be above 0 seconds.* got True"),
        ({"deterministic": "no"}, "deterministic must be true or false, got 'no'"),
        ({"echo": 1}, "echo must be true or false, got 1"),
        ({"use_chat_template": "no"}, "use_chat_template must be true, false or None, got 'no'"),
    ],
)
def test_other_options_are_refused_by_name_too(lend, options, reason):
    with pytest.raises(ValueError, match=reason):
        engine_of(lend, **options)


def test_settings_are_no_dict(lend):
    model, tokenizer = lend("qwen3")
    with pytest.raises(ValueError, match=r"sampling must be a SamplingConfig, got {'temperature': 1}"):
        Engine(model, tokenizer, cast(Any, {"temperature": 1}))
    with pytest.raises(ValueError, match=r"sampling must be a SamplingConfig, or None .* got {'temperature': 1}"):
        requests_of(sampling=cast(Any, {"temperature": 1}))
    with pytest.raises(ValueError, match="sampling must be a SamplingConfig, got 0"):
        generate_groups(model=model, tokenizer=tokenizer, prompts=["a"], group_size=1, sampling=cast(Any, 0))


def test_a_tokenizer_is_mlx_lms(lend):
    model, tokenizer = lend("qwen3")
    with pytest.raises(ValueError, match=r"tokenizer must be mlx-lm's TokenizerWrapper, .* got a .*; wrap it"):
        Engine(model, tokenizer._tokenizer, SAMPLING)


def test_a_model_in_training_mode_is_refused_by_a_rollout_too(lend):
    engine = engine_of(lend)
    engine.model.train()
    try:
        with pytest.raises(ValueError, match=r"training mode.*call model\.eval\(\) first"):
            engine.rollout(requests_of())
    finally:
        engine.model.eval()


def test_numbers_of_numpy_are_numbers(lend):
    model, tokenizer = lend("qwen3")
    (plain,) = group_requests([Task("a")], single_turn_environment, group_size=1)
    for kind in (np.uint64, np.int64, np.int32):
        sampling = SamplingConfig(max_tokens=cast(Any, np.int8(100)))
        request = replace(plain, key=cast(Any, kind(5)), sampling=sampling)
        assert (request.key, type(request.key), type(sampling.max_tokens)) == (5, int, int)
        engine = Engine(model, tokenizer, SAMPLING, deterministic=cast(Any, np.True_), cache_bytes=10**6)
        (played,) = engine.rollout([request])
        assert 1 <= played.num_sampled <= 100
    with pytest.raises(ValueError, match=r"temperature must be a finite number, got 1000"):
        SamplingConfig(temperature=10**400)


def test_prompts_may_come_one_by_one(lend):
    model, tokenizer = lend("qwen3")
    options: Any = {"model": model, "tokenizer": tokenizer, "group_size": 2, "sampling": SAMPLING}
    expected = generate_groups(prompts=["a", "b"], **options)
    assert len(expected) == 4
    assert_same(generate_groups(prompts=iter(["a", "b"]), **options), expected)


def test_groups_tasks_and_factory_are_checked_by_name():
    with pytest.raises(ValueError, match=r"group_ids must be one a task, got 1 for 2 tasks"):
        group_requests(["a", "b"], single_turn_environment, group_size=1, group_ids=[1])
    with pytest.raises(ValueError, match=r"env_factory must be a function of task, seed and group_index, got None"):
        group_requests(["a"], cast(Any, None), group_size=1)


def test_one_row_at_a_time_has_no_other_width(lend):
    model, tokenizer = lend("qwen3")
    options: Any = {"env_factory": single_turn_environment, "tasks": [Task("a")], "group_size": 1}
    with pytest.raises(ValueError, match=r"width must be 1 where rollout_mode is 'sequential', got 4"):
        generate_agentic_trajectories(model=model, tokenizer=tokenizer, rollout_mode="sequential", width=4, **options)


def test_an_unknown_context_is_refused(lend):
    with pytest.raises(ValueError, match="context must be 'transcript' or 'turn', got 'chat'"):
        engine_of(lend, context="chat")


def test_a_group_has_at_least_one_member(lend):
    with pytest.raises(ValueError, match="group_size must be a whole number of at least 1, got 0"):
        requests_of(group_size=0)
    with pytest.raises(ValueError, match=r"group_size must be a whole number of at least 1, got 1\.5"):
        requests_of(group_size=cast(Any, 1.5))


def test_a_seed_has_64_bits():
    with pytest.raises(
        ValueError, match=f"seed, step, group and sample must be whole numbers of 64 bits, got .{2**63}"
    ):
        requests_of(seed=2**63)


@pytest.mark.parametrize("prompts", [[3], [{"role": "user", "content": "hi"}]])
def test_a_prompt_is_text_or_a_conversation(lend, prompts):
    model, tokenizer = lend("qwen3")
    with pytest.raises(ValueError, match=r"prompts must be texts or lists of chat messages, got .*list in the list"):
        generate_groups(model=model, tokenizer=tokenizer, prompts=prompts, group_size=1)


def test_an_engine_keeps_to_what_its_model_was_made_for(lend):
    for architecture in ("qwen3", "qwen3_5"):
        model, tokenizer = lend(architecture)
        assert Engine(model, tokenizer, SAMPLING).limits.max_context == 1024


def test_the_policy_version_is_recorded(lend):
    trajectories = engine_of(lend).rollout(requests_of(PROMPTS[:1], 1), policy_version=7)
    assert trajectories[0].policy_version == 7
