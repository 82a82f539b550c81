"""Prompts as messages, and the environment of a plain prompt."""

import pytest

from mlxrl.env import Environment, SingleTurnEnv, StepResult, StopReason, Task, as_messages


def test_text_becomes_one_user_message():
    assert as_messages("2+2?") == ({"role": "user", "content": "2+2?"},)


def test_messages_are_copied_with_all_their_fields():
    message = {"role": "tool", "content": "4", "name": "sum"}
    (copied,) = as_messages([message])
    assert copied == message
    assert copied is not message


@pytest.mark.parametrize("value", [None, 3, b"2+2?", {"role": "user", "content": "2+2?"}, ["2+2?"], [{"role": "user"}]])
def test_what_is_no_prompt_is_refused(value):
    with pytest.raises(TypeError, match="chat message"):
        as_messages(value)


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="got an empty list"):
        as_messages([])


def test_a_plain_prompt_ends_with_the_first_answer_and_no_reward():
    env = SingleTurnEnv(Task("2+2?", {"answer": "4"}, "a"))
    assert isinstance(env, Environment)
    assert env.max_turns == 1
    assert env.reset() == "2+2?"
    assert env.step("4") == StepResult("", 0.0, terminated=True)


def test_the_state_of_a_plain_prompt_is_hashable_and_is_its_messages():
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})
    env = SingleTurnEnv(Task(chat))
    assert hash(env.state_id(env.reset())) == hash((("system", "Be brief."), ("user", "2+2?")))
    assert env.state_id("2+2?") == (("user", "2+2?"),)


def test_stop_reasons_are_their_own_names_as_text():
    names = ["stop", "length", "max_turns", "context", "env_done", "env_error", "timeout"]
    assert [str(reason) for reason in StopReason] == names
