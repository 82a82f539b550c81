import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mlxrl.env import StepResult, StopReason
from mlxrl.policy.testing import character_tokenizer
from mlxrl.rollout import Engine, SamplingConfig, group_requests, naive_rollout

from .comparing import assert_same

SAMPLING = SamplingConfig(max_tokens=4)


class Steady:
    """Three turns of small talk; a subclass says which part of it breaks, and when."""

    max_turns = 3

    def __init__(self):
        self.turn = 0

    def reset(self) -> Any:
        return "begin"

    def step(self, action):
        self.turn += 1
        return StepResult(f"turn {self.turn}", 1.0, terminated=self.turn == 3)

    def state_id(self, observation):
        return observation


class BreaksInStep(Steady):
    def __init__(self, turn, result):
        super().__init__()
        self.broken, self.result = turn, result

    def step(self, action):
        good = super().step(action)
        return self.result() if self.turn == self.broken + 1 else good


class BreaksInReset(Steady):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def reset(self):
        return self.result()


class BreaksInState(Steady):
    def __init__(self, turn, result):
        super().__init__()
        self.broken, self.result = turn, result

    def state_id(self, observation):
        return self.result() if self.turn == self.broken else observation


class Countless(Steady):
    max_turns: Any = "3"


def boom():
    raise KeyError("boom")


def returns(value):
    return lambda: value


def step_result(observation: Any = "x", reward: Any = 0.0):
    return returns(StepResult(observation, reward, False))


class SpeechlessError(Exception):
    """Cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


class LeavingError(Exception):
    """Ends the process where it is asked what it is."""

    def __str__(self):
        raise SystemExit


def leaving():
    raise LeavingError


class OwnText(str):
    """Text with a mind of its own."""

    def __len__(self):
        return boom()

    __contains__ = __eq__ = __add__ = lambda self, *_: boom()
    __hash__ = str.__hash__


class Unreadable(Mapping):
    """Says what it holds only to those who do not ask."""

    def __getitem__(self, key):
        raise KeyError("info")

    def __iter__(self):
        raise KeyError("info")

    def __len__(self):
        return 1


def speechless():
    raise SpeechlessError


class Aloof:
    __hash__ = object.__hash__

    def __eq__(self, other):
        return boom()


def cancelled():
    raise asyncio.CancelledError


BROKEN = {
    "step is cancelled": (lambda: BreaksInStep(0, cancelled), "step .* raised CancelledError", 1),
    "error has no words": (lambda: BreaksInStep(0, speechless), "step .* raised SpeechlessError: it cannot say why", 1),
    "error leaves": (lambda: BreaksInStep(0, leaving), "step .* raised LeavingError: it cannot say why", 1),
    "info cannot be read": (
        lambda: BreaksInStep(1, returns(StepResult("x", 0.0, terminated=False, info=Unreadable()))),
        "step .* raised KeyError: 'info'", 2,
    ),
    "step gives a book": (lambda: BreaksInStep(0, returns("x" * 10**6)), "step .{30,700}$", 1),
    "make raises": (boom, "make .* raised KeyError: 'boom'", 0),
    "reset raises": (lambda: BreaksInReset(boom), "reset .* raised KeyError: 'boom'", 0),
    "reset gives None": (lambda: BreaksInReset(returns(None)), "reset .* TypeError: .*got NoneType", 0),
    "reset gives nothing": (lambda: BreaksInReset(returns([])), "reset .* ValueError: .*empty list", 0),
    "state raises at once": (lambda: BreaksInState(0, boom), "state_id .* KeyError: 'boom'", 0),
    "state raises later": (lambda: BreaksInState(2, boom), "state_id .* KeyError: 'boom'", 2),
    "state is no key": (lambda: BreaksInState(1, returns([])), "state_id .* TypeError: .*unhashable", 1),
    "state cannot be spelled": (lambda: BreaksInState(1, returns(10**6000)), "state_id .* ValueError: Exceeds", 1),
    "state cannot be compared": (lambda: BreaksInState(0, Aloof), "state_id .* KeyError: 'boom' .test_rollout_f", 0),
    "step raises at once": (lambda: BreaksInStep(0, boom), "step .* KeyError: 'boom'", 1),
    "step raises midway": (lambda: BreaksInStep(1, boom), "step .* KeyError: 'boom'", 2),
    "step raises at last": (lambda: BreaksInStep(2, boom), "step .* KeyError: 'boom'", 3),
    "step gives None": (lambda: BreaksInStep(0, returns(None)), "step .* TypeError: .*got NoneType", 1),
    "observation is no text": (lambda: BreaksInStep(1, step_result(3)), "step .* TypeError: .*got int 3", 2),
    "reward is not a number": (lambda: BreaksInStep(0, step_result(reward=float("nan"))), "step .*finite, got nan", 1),
    "reward is text": (lambda: BreaksInStep(0, step_result(reward="1")), "step .* TypeError: .*must be a number", 1),
    "message is no message": (
        lambda: BreaksInStep(0, step_result([{"role": "user", "content": 3}])), "step .* TypeError", 1,
    ),
    "turns are no number": (lambda: Countless(), "make .* ValueError: max_turns must be .* got '3'", 0),
}  # fmt: skip


def rollout(lend, factory):
    model, tokenizer = lend("qwen3")
    return Engine(model, tokenizer, SAMPLING, width=3).rollout(group_requests(range(3), factory, group_size=2))


@pytest.fixture(scope="module")
def undisturbed(lend):
    return rollout(lend, lambda task, seed, member: Steady())


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_environment_costs_its_own_row_and_no_other(lend, undisturbed, what):
    build, reason, num_turns = BROKEN[what]
    trajectories = rollout(lend, lambda task, seed, member: build() if (task, member) == (1, 0) else Steady())
    broken = trajectories.pop(2)  # groups of two: (0, 0), (0, 1), (1, 0)
    assert broken.failed
    assert broken.stop_reason == StopReason.env_error
    assert (broken.group_id, broken.sample_index, broken.task) == (1, 0, 1)
    assert re.search(reason, str(broken.error)), broken.error
    assert len(broken.turns) == num_turns
    assert broken.reward is None  # which is not the reward 0
    for one, other in zip(trajectories, undisturbed[:2] + undisturbed[3:], strict=True):
        assert not one.failed
        assert one.stop_reason == other.stop_reason
        assert one.environment_return == 3
        np.testing.assert_array_equal(one.segments[0].token_ids, other.segments[0].token_ids)
        np.testing.assert_allclose(one.segments[0].sampler_logprobs, other.segments[0].sampler_logprobs, atol=1e-5)


@pytest.mark.parametrize("wrap", [OwnText, lambda text: [{"role": OwnText("user"), "content": OwnText(text)}]])
def test_text_of_a_users_own_class_is_taken_as_plain_text(lend, undisturbed, wrap):
    class Wraps(Steady):
        def reset(self):
            return wrap(super().reset())

        def step(self, action):
            said = super().step(action)
            return StepResult(wrap(said.observation), said.reward, said.terminated)

        def state_id(self, observation):
            return f"state {self.turn}"

    trajectories = rollout(lend, lambda task, seed, member: Wraps())
    for one, other in zip(trajectories, undisturbed, strict=True):
        assert one.error is None
        assert [list(x.token_ids) for x in one.segments] == [list(x.token_ids) for x in other.segments]


def test_what_was_played_before_a_failure_is_kept(lend):
    trajectory = rollout(lend, lambda task, seed, member: BreaksInStep(1, boom))[0]
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.0]
    assert trajectory.turns[1].span[1] == len(trajectory.segments[0].token_ids)


def test_all_rows_can_fail(lend):
    trajectories = rollout(lend, lambda *_: boom())
    assert all(t.failed and t.segments == () and t.num_sampled == 0 for t in trajectories)


def test_a_prompt_that_is_too_long_fails_its_row_and_is_never_cut(lend):
    model, tokenizer = lend("qwen3")

    class Asks(Steady):
        def __init__(self, prompt):
            super().__init__()
            self.prompt = prompt

        def reset(self):
            return self.prompt

    requests = group_requests(["a" * 7, "a" * 8], lambda task, seed, member: Asks(task), group_size=1)
    # the template adds three tokens: 10 fit, 11 do not
    fits, too_long = Engine(model, tokenizer, SAMPLING, max_prompt_len=10).rollout(requests)
    assert not fits.failed
    assert fits.turns[0].span[0] == 10
    assert too_long.failed
    assert too_long.stop_reason == StopReason.context
    assert too_long.error == "the prompt has 11 tokens, max_prompt_len is 10"
    assert too_long.segments == too_long.turns == ()


@pytest.mark.parametrize("context", ["transcript", "turn"])
def test_text_of_no_tokens_fails_where_the_model_has_nothing_to_go_on_from(lend, context):
    model, tokenizer = lend("qwen3")

    class Mute(Steady):
        def __init__(self, silent_at):
            super().__init__()
            self.silent_at = silent_at

        def reset(self):
            return "" if self.silent_at == 0 else "x"

        def step(self, action):
            super().step(action)
            return StepResult("" if self.turn == self.silent_at else "y", 0.0, terminated=self.turn == 3)

    engine = Engine(model, tokenizer, SAMPLING, context=context, use_chat_template=False)
    at_once, later = engine.rollout(group_requests([0, 1], lambda task, *_: Mute(task), group_size=1))
    assert at_once.failed
    assert "the prompt of the environment raised ValueError: it has no tokens" in str(at_once.error)
    # in a transcript an empty observation goes on from what was said
    assert later.failed == (context == "turn")


class Said(BreaksInStep):
    """Names its states by the turn: messages are no names."""

    def state_id(self, observation):
        return self.turn


def test_a_role_that_would_complete_a_control_token_fails_its_row_alone(lend, undisturbed):
    spoken = step_result([{"role": "end", "content": "x"}])  # the template writes <|ROLE|>, and <|end|> is a token
    trajectories = rollout(lend, lambda task, seed, member: Said(0, spoken) if (task, member) == (1, 0) else Steady())
    broken = trajectories.pop(2)
    assert broken.stop_reason == StopReason.env_error
    assert "the observation of the environment raised ValueError: role of a chat message must be" in str(broken.error)
    for one, other in zip(trajectories, undisturbed[:2] + undisturbed[3:], strict=True):
        np.testing.assert_array_equal(one.segments[0].token_ids, other.segments[0].token_ids)


def test_a_message_that_the_template_cannot_place_fails_its_row(make):
    template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}<|assistant|>"
    )
    model, tokenizer = make("qwen3", tokenizer=character_tokenizer(chat_template=template))

    tool = [{"role": "tool", "content": "42"}]

    def factory(task, seed, member):
        return Said(0, step_result(tool)) if task == 0 else Steady()

    broken, whole = Engine(model, tokenizer, SAMPLING).rollout(group_requests(range(2), factory, group_size=1))
    assert "the observation of the environment raised ValueError: the chat template drops" in str(broken.error)
    assert not whole.failed


def test_a_failure_names_the_users_own_line_and_not_the_librarys_where_it_ended(lend):
    def parses(action):
        return json.loads("{")

    class Parses(Steady):
        def step(self, action):
            return parses(action)

    (broken, *_) = rollout(lend, lambda *_: Parses())
    line = parses.__code__.co_firstlineno + 1
    assert str(broken.error).endswith(f" (test_rollout_failures.py, line {line})")
    assert "JSONDecodeError" in str(broken.error)


@pytest.mark.parametrize("options", [{}, {"env_timeout": None}, {"deterministic": False}])
def test_an_environment_given_to_several_episodes_fails_them_all_and_no_other(lend, undisturbed, options):
    model, tokenizer = lend("qwen3")
    shared = Steady()

    def factory(task, seed, member):
        return shared if task == 1 else Steady()

    engine = Engine(model, tokenizer, SAMPLING, width=3, **options)
    trajectories = engine.rollout(group_requests(range(3), factory, group_size=2))
    for one, other in zip(trajectories, undisturbed, strict=True):
        if one.task == 1:
            assert "make of the environment raised ValueError: the factory returned one env" in str(one.error)
            assert one.stop_reason == StopReason.env_error
        else:
            assert not one.failed
            np.testing.assert_array_equal(one.segments[0].token_ids, other.segments[0].token_ids)


def test_an_environment_given_to_several_episodes_fails_those_of_the_plain_rollout_too(lend):
    model, tokenizer = lend("qwen3")
    engine = Engine(model, tokenizer, SAMPLING, env_timeout=None)  # in threads either of two may be the first

    def requests():
        shared = Steady()
        return group_requests(range(3), lambda task, *_: shared if task == 1 else Steady(), group_size=2)

    plain = naive_rollout(model, tokenizer, requests(), engine.limits)
    assert [t.stop_reason == StopReason.env_error for t in plain] == [False, False, True, True, False, False]
    assert_same(plain, engine.rollout(requests()))


@pytest.mark.parametrize(
    ("own", "most", "terminated", "reason"),
    [
        (1, None, True, StopReason.stop),
        (1, None, False, StopReason.max_turns),  # the environment is not done: its limit of turns ended it
        (3, 1, False, StopReason.max_turns),
        (3, 2, False, StopReason.max_turns),
        (3, None, True, StopReason.env_done),
    ],
)
def test_an_episode_says_what_ended_it_and_how_many_turns_it_could_have_had(lend, own, most, terminated, reason):
    class Ends(Steady):
        max_turns = own
        turn = 0

        def step(self, action):
            self.turn += 1
            ends = terminated or self.turn == min(own, most or own)
            observation: Any = None if ends else "x"  # nobody reads the last one
            return StepResult(observation, 1.0, terminated=terminated)

    model, tokenizer = lend("qwen3")
    sampling = SamplingConfig(max_tokens=200, stop=tuple("abcdefghijklmnopqrstuvwxyz"))  # no action is cut
    engine = Engine(model, tokenizer, sampling, max_turns=most)
    (trajectory,) = engine.rollout(group_requests([0], lambda *_: Ends(), group_size=1))
    assert not trajectory.truncated
    assert (trajectory.stop_reason, trajectory.max_turns) == (reason, min(own, most or own))
