from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxrl.env import RecurringStateTextEnv, StopReason
from mlxrl.policy import score
from mlxrl.policy.testing import ARCHITECTURES, THINKING_TEMPLATE, character_tokenizer
from mlxrl.rollout import (
    Engine,
    Role,
    SamplingConfig,
    generate_agentic_trajectories,
    group_requests,
    naive_rollout,
)

from .comparing import assert_same, engine_of, scorer_distance
from .environments import Chatter, Conversation, chatter, converse

SHORT, EIGHT = SamplingConfig(temperature=0.7, max_tokens=4), SamplingConfig(max_tokens=8)


def play(policy, *lines, sampling=EIGHT, group_size=1, **options):
    model, tokenizer = policy
    return generate_agentic_trajectories(
        model=model, tokenizer=tokenizer, env_factory=converse, tasks=[lines], group_size=group_size,
        sampling=sampling, **options,
    )  # fmt: skip


def spelled(tokenizer, segment):
    """The segment as text, and one letter a token: m masked, A action, e echo."""
    return tokenizer.decode(segment.token_ids.tolist()), "".join("mAe"[role] for role in segment.roles)


GO = {"<|assistant|>": "g", "g": "o"}  # answers "go" and ends


def test_a_transcript_is_spelled_token_by_token(scripted):
    policy = scripted(GO)
    (trajectory,) = play(policy, "hi", "no", echo=True)
    text, roles = spelled(policy[1], trajectory.segments[0])
    assert text == "<|user|>hi<|end|><|assistant|>go<|end|><|user|>no<|end|><|assistant|>go<|end|>"
    #               user     h i end    assistant g o end     user   n o end    assistant g o end
    assert roles == "m" + "mm" + "m" + "m" + "AAA" + "m" + "ee" + "m" + "m" + "AAA"
    # the prompt belongs to turn 0, the observation to turn 1, which answers it
    np.testing.assert_array_equal(trajectory.segments[0].turns, [0] * 8 + [1] * 8)
    first, second = trajectory.turns
    assert (first.span, second.span) == ((5, 8), (13, 16))
    assert (first.observation, second.observation) == ("hi", "no")
    assert (first.state_id, second.state_id) == ("saw hi", "saw no")
    assert (first.action, second.action) == ("go", "go")
    assert (first.reward, second.reward, trajectory.environment_return) == (1.0, 2.0, 3.0)
    assert second.info == {"answers": 2}
    assert trajectory.completion == "go\ngo"
    assert trajectory.stop_reason == StopReason.env_done
    assert trajectory.num_sampled == len(trajectory.completion_ids) == 6


def test_without_echo_what_is_not_sampled_is_masked(scripted):
    policy = scripted(GO)
    (trajectory,) = play(policy, "hi", "no")
    assert spelled(policy[1], trajectory.segments[0])[1] == "mmmmmAAAmmmmmAAA"


def test_an_action_cut_by_its_limit_gets_the_templates_end_token_masked(scripted):
    policy = scripted(GO)
    (trajectory,) = play(policy, "hi", "no", sampling=SamplingConfig(max_tokens=2))
    text, roles = spelled(policy[1], trajectory.segments[0])
    assert text == "<|user|>hi<|end|><|assistant|>go<|end|><|user|>no<|end|><|assistant|>go"
    assert roles == "mmmmm" + "AA" + "m" + "mmmmm" + "AA"
    assert [turn.action for turn in trajectory.turns] == ["go", "go"]


def test_each_turn_has_its_own_segment_where_the_context_is_the_turn(scripted):
    policy = scripted(GO)
    (trajectory,) = play(policy, "hi", "no", context="turn")
    texts = [spelled(policy[1], segment) for segment in trajectory.segments]
    assert texts == [
        ("<|user|>hi<|end|><|assistant|>go<|end|>", "mmmmmAAA"),
        ("<|user|>no<|end|><|assistant|>go<|end|>", "mmmmmAAA"),
    ]
    assert [(turn.segment, turn.span) for turn in trajectory.turns] == [(0, (5, 8)), (1, (5, 8))]
    np.testing.assert_array_equal(trajectory.segments[1].turns, [1] * 8)


@pytest.mark.parametrize("context", ["transcript", "turn"])
def test_a_long_observation_is_cut_and_its_turn_says_so(scripted, context):
    policy = scripted(GO)
    (trajectory,) = play(policy, "a long prompt", "12345678", "1234", max_observation_len=4, context=context)
    text = "".join(spelled(policy[1], segment)[0] for segment in trajectory.segments)
    # the prompt is never cut; of the others 4 tokens stay, and the template around them stays whole
    assert text.startswith("<|user|>a long prompt<|end|>")
    assert text.count("<|user|>1234<|end|><|assistant|>go<|end|>") == 2
    assert [turn.observation_cut for turn in trajectory.turns] == [False, True, False]
    assert trajectory.turns[1].observation == "12345678"  # the record keeps what the environment said


def test_plain_text_goes_on_without_a_template(scripted):
    policy = scripted({"i": "g", "o": "k", "g": "!", "k": "?"})
    (trajectory,) = play(policy, "hi", "no", "", use_chat_template=False, echo=True)
    text, roles = spelled(policy[1], trajectory.segments[0])
    # after "?" and "!" comes the end token, and after the end token of the empty observation another
    assert text == "hig!<|end|>nok?<|end|><|end|>"
    assert roles == "mm" + "AAA" + "ee" + "AAA" + "A"


def test_sampled_tokens_are_never_encoded_again(scripted):
    tokenizer = character_tokenizer(merges=["ab"])
    policy = scripted({"<|assistant|>": "a", "a": "b"}, tokenizer=tokenizer)
    (trajectory,) = play(policy, "abc", "ab")
    a, b, end = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "<|end|>"))
    assert tokenizer.encode("ab") == [tokenizer.convert_tokens_to_ids("ab")] != [a, b]  # the text would drift
    segment = trajectory.segments[0]
    for turn in trajectory.turns:
        assert segment.token_ids[slice(*turn.span)].tolist() == [a, b, end]
        assert turn.action == "ab"


@pytest.mark.parametrize(
    ("architecture", "context"),
    [("qwen3", "turn"), *((name, "transcript") for name in ARCHITECTURES if name != "gemma2")],
)
def test_turns_decode_as_the_plainest_loop_does(lend, architecture, context):
    model, tokenizer = lend(architecture)
    requests = group_requests([1, 3, 2], chatter, group_size=2)
    engine = Engine(model, tokenizer, SHORT, width=4, context=context, echo=True)
    trajectories = engine.rollout(requests)
    if architecture in ("qwen3", "gemma3_text"):  # the loop is slow: with and without a sliding window of 16
        expected = naive_rollout(model, tokenizer, requests, engine.limits)
    else:
        expected = Engine(model, tokenizer, SHORT, width=1, context=context, echo=True).rollout(requests)
    assert_same(trajectories, expected)
    assert [len(t.turns) for t in trajectories] == [1, 1, 3, 3, 2, 2]
    for trajectory in trajectories:
        check_record(model, tokenizer, trajectory)


def check_record(model, tokenizer, trajectory):
    """Spans hold the actions and nothing else, and the model's own probabilities bear the record out."""
    spans = np.concatenate([np.arange(*turn.span) for turn in trajectory.turns if turn.segment == 0])
    np.testing.assert_array_equal(spans, np.nonzero(trajectory.segments[0].roles == Role.ACTION)[0])
    for turn in trajectory.turns:
        ids = trajectory.segments[turn.segment].token_ids[slice(*turn.span)].tolist()
        assert tokenizer.decode([token for token in ids if token not in tokenizer.eos_token_ids]) == turn.action
    for segment in trajectory.segments:
        # what is sampled was conditioned on exactly the recorded tokens before it, over all turns
        scores = score(model, segment.token_ids[None], segment.roles[None] == Role.ACTION, temperature=0.7)
        np.testing.assert_allclose(scores.logprobs[0], segment.sampler_logprobs, atol=1e-4)


def test_one_row_at_a_time_plays_the_same_episodes_one_after_the_other(lend):
    model, tokenizer = lend("qwen3")
    order = []

    class Noted(Chatter):
        def __init__(self, task, group_index):
            super().__init__(task)
            self.name = (task, group_index)

        def step(self, action):
            order.append(self.name)
            return super().step(action)

    def play_in(mode):
        return generate_agentic_trajectories(
            model=model, tokenizer=tokenizer, env_factory=lambda task, seed, member: Noted(task, member),
            tasks=[2, 3], group_size=2, sampling=SHORT, rollout_mode=mode,
        )  # fmt: skip

    parallel = play_in("parallel_per_turn")
    order.clear()
    sequential = play_in("sequential")
    assert order == [(2, 0)] * 2 + [(2, 1)] * 2 + [(3, 0)] * 3 + [(3, 1)] * 3  # so that one cache at a time exists
    assert_same(parallel, sequential, 1e-5)
    assert [t.task for t in parallel] == [t.task for t in sequential] == [2, 2, 3, 3]


def test_an_unknown_mode_is_refused(scripted):
    with pytest.raises(ValueError, match=r"rollout_mode must be .* got 'random'"):
        play(scripted(GO), "hi", rollout_mode="random")


def test_why_an_episode_ended(scripted):
    policy = scripted(GO)

    def reason(env, **options):
        (trajectory,) = generate_agentic_trajectories(
            model=policy[0], tokenizer=policy[1], env_factory=lambda *_: env, tasks=[0], group_size=1, **options
        )
        return trajectory.stop_reason, len(trajectory.turns)

    two = SamplingConfig(max_tokens=2)
    assert reason(Conversation("a")) == (StopReason.stop, 1)  # one turn: it ended by itself
    assert reason(Conversation("a"), sampling=two) == (StopReason.length, 1)  # or did not
    assert reason(Conversation("a", "b")) == (StopReason.env_done, 2)
    assert reason(Conversation("a", "b", truncates=True)) == (StopReason.max_turns, 2)
    assert reason(Conversation("a", "b", "c", "d"), max_turns=3) == (StopReason.max_turns, 3)
    assert reason(Conversation("a", "b", "c", "d", max_turns=2)) == (StopReason.max_turns, 2)
    assert reason(Conversation("a", "b"), max_turns=9) == (StopReason.env_done, 2)


def test_a_template_that_rewrites_history_makes_each_turn_a_segment_of_its_own(scripted):
    tokenizer = character_tokenizer(chat_template=THINKING_TEMPLATE)
    policy = scripted({">": "g", "g": "o"}, tokenizer=tokenizer)
    (trajectory,) = play(policy, "hi", "no", "so", template_kwargs={"enable_thinking": False}, echo=True)
    texts = [spelled(policy[1], segment) for segment in trajectory.segments]
    history, opening = "<|user|>hi<|end|>", "<|assistant|><think></think>"
    for (text, roles), line in zip(texts, ["no", "so", None], strict=True):
        # the model sees what the template makes of all turns so far: without the thoughts that it put before answers
        assert text == f"{history}{opening}go<|end|>"
        assert roles == "m" * (len(roles) - 3) + "AAA"
        history += f"<|assistant|>go<|end|><|user|>{line}<|end|>"
    assert [(turn.segment, turn.action) for turn in trajectory.turns] == [(0, "go"), (1, "go"), (2, "go")]


def test_members_of_a_group_start_from_the_same_state(lend):
    model, tokenizer = lend("qwen3")
    trajectories = generate_agentic_trajectories(
        model=model, tokenizer=tokenizer, group_size=3, tasks=["a", "b"], sampling=SHORT,
        env_factory=lambda task, seed, group: RecurringStateTextEnv(task=task, seed=seed),
    )  # fmt: skip
    starts = [trajectory.turns[0].observation for trajectory in trajectories]
    assert len(set(starts[:3])) == len(set(starts[3:])) == 1
    assert [(t.group_id, t.sample_index) for t in trajectories] == [(g, s) for g in (0, 1) for s in (0, 1, 2)]
    assert all(mx.all(mx.array(t.segments[0].sampler_logprobs) <= 0) for t in trajectories)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
def test_rows_that_wait_for_company_say_what_they_say_alone(lend, architecture, share):
    policy = lend(architecture)
    sampling = SamplingConfig(temperature=0.7, max_tokens=24)  # long enough for turns to end at different times
    engine = engine_of(policy, sampling)
    engine.room = replace(engine.room, regroup_share=share)
    requests = group_requests([2, 3, 2, 4], chatter, group_size=2)
    trajectories = engine.rollout(requests)
    assert scorer_distance(policy[0], trajectories, 0.7) < 1e-4
    assert_same(trajectories, engine_of(policy, sampling).rollout(requests))
