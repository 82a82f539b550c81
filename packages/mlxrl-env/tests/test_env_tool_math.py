"""Tool math: the calculator, how it is called, and what an answer is."""

import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.env import Task, ToolMathEnv, make_env
from mlxrl.env.calculator import calculate, shown


def started(number=1, **options) -> tuple[Any, Any]:
    env = ToolMathEnv(Task("", {"start": (number,)}, "a"), **options)
    return env, env.reset()


def question(observation):
    return observation.removeprefix("What is ").partition("?")[0]


def test_every_question_is_answered_by_asking_the_calculator():
    suite = make_env("tool-math")
    for task in suite.tasks("train"):
        env: Any = suite.make(task, 0, 0)
        called = env.step(f"<tool>{question(env.reset())}</tool>")
        (message,) = called.observation
        assert (message["role"], called.reward, called.terminated) == ("tool", 0.0, False)
        assert int(message["content"]) == eval(question(task.prompt))  # ours in a test, and by other rules than ours
        answered = env.step(f"So it is <answer>{message['content']}</answer>.")
        assert (answered.observation, answered.reward, answered.terminated) == ("Correct.", 1.0, True)


def test_the_opening_names_both_actions():
    _, observation = started()
    assert re.fullmatch(
        r"What is [-+*() 0-9]+\? Use <tool>12 \* 3</tool> to calculate, <answer>36</answer> to answer\.", observation
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool>12 * 3</tool>",
        "<TOOL> 12*3 \n</TOOL>",
        "First <tool>1 + 1</tool>, no: <tool>12 * 3</tool>",
        '{"name": "calculator", "arguments": {"expression": "12 * 3"}}',
        'I call {"name": "calculator", "arguments": {"expression": "12 * 3"}} now.',
        '{"arguments": {"expression": "12 * 3"}, "name": "calculator"}',
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 3"}}\n</tool_call>',
        '<tool>{"name": "calculator", "arguments": {"expression": "12 * 3"}}</tool>',
        "<answer>5</answer> after all <tool>12 * 3</tool>",
        '{"name": "calculator", "arguments": "{\\"expression\\": \\"12 * 3\\"}"}',  # as JSON text
        '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"12 * 3\\"}"}',
        "So <tool>12*3",  # the end closes it
        "12 * 3",  # nothing else is said
        "72 / 2",
        "**`12*3`**.",
        "<tool>`12*3`.</tool>",
        "<tool>**12*3**</tool>",
    ],
)
def test_a_call_is_read_in_each_of_its_forms(text):
    env, _ = started()
    result = env.step(text)
    assert result.observation == ({"role": "tool", "content": "36"},)
    assert result.info == {"invalid_action": False}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("2 ** 3", "a number is missing before '*'"),
        ("1 / (2 - 2)", "error: "),
        ("12 *", "a number is missing at the end"),
        ("abs(3)", "'a' is no number"),
        ("", "a number is missing at the end"),
        ("1" * 101, "at most 100 are allowed"),
    ],
)
def test_a_call_that_cannot_be_calculated_is_invalid_and_says_why(call, words):
    env, observation = started(invalid_penalty=0.5)
    state = env.state_id(observation)
    result = env.step(f"<tool>{call}</tool>")
    (message,) = result.observation
    assert (message["role"], result.reward, result.info) == ("tool", -0.5, {"invalid_action": True})
    assert words in message["content"]
    assert env.state_id(result.observation) == state


def test_a_text_that_asks_for_nothing_is_told_the_forms():
    env, observation = started()
    result = env.step('It is {"name": "calculator"}, {"arguments": {"expression": 3}} or 36.')
    assert result.info == {"invalid_action": True}
    assert observation.endswith(result.observation)


@pytest.mark.parametrize("form", ["{}", " {} ", "{}.0", "\n{}\n", "{}.", "**{}**", "`{}`", '"{}."'])
def test_the_right_answer_in_any_spelling_is_worth_1(form):
    env, observation = started()
    answer = form.format(calculate(question(observation)))
    assert env.step(f"<answer>{answer}</answer>").reward == 1.0
    for text in (f"It is <answer>{answer}", answer):  # never closed; nothing else
        env.reset()
        assert env.step(text).reward == 1.0


@pytest.mark.parametrize("text", ["12 *", "* 3", "1 2", "()", "36 is it", "It is 36", "...", "<answer>12 *</answer>"])
def test_what_is_neither_a_number_nor_an_expression_is_invalid(text):
    env, _ = started()
    result = env.step(text)
    assert (result.terminated, result.info) == (False, {"invalid_action": True})


def test_a_wrong_answer_ends_the_episode_without_a_reward():
    env, observation = started()
    result = env.step(f"<answer>{calculate(question(observation)) + 1}</answer>")
    assert (result.observation, result.reward, result.terminated) == ("Wrong.", 0.0, True)
    assert result.info == {"invalid_action": False}


def test_an_answer_that_is_no_number_is_invalid():
    env, _ = started()
    result = env.step("<answer>about 36</answer>")
    assert (result.terminated, result.info) == (False, {"invalid_action": True})


def test_a_state_is_the_results_so_far_in_whatever_order():
    states = []
    for calls in (("2 * 3", "5 + 5"), ("5 + 5", "(1 + 1) * 3"), ("10", "6", "2*5")):
        env, _ = started()
        states.append([env.state_id(env.step(f"<tool>{call}</tool>").observation) for call in calls])
    assert states[0][-1] == states[1][-1] == states[2][-1]  # 6 and 10 are known
    assert states[0][0] != states[1][0]


numbers = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str)


def _composed(parts):
    sign = st.sampled_from(["+", "-", "*", "/"])
    return st.tuples(parts, sign, parts).map(" ".join) | parts.map("({})".format) | parts.map("-{}".format)


@given(st.recursive(numbers, _composed, max_leaves=6).filter(lambda text: len(text) <= 100))
def test_the_calculator_agrees_with_python(expression):
    exact = re.sub(r"[0-9]+(?:\.[0-9]+)?", lambda number: f"Fraction('{number[0]}')", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            calculate(expression)
    else:
        assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1,234 * 10", "12340"),
        ("1 / 4", "0.25"),
        ("-1 / 4", "-0.25"),
        ("2 / 3", "0.666666666667"),
        ("10 / 4", "2.5"),
        ("1 / 3 * 3", "1"),  # exact on the way
        (".5 + .5", "1"),
        ("2 - -3", "5"),
        ("1 / 10000000000000", "0"),  # smaller than what is shown
        ("9" * 49 + "*" + "9" * 49, str((10**49 - 1) ** 2)),
    ],
)
def test_results_are_shown_as_whole_numbers_or_decimals(expression, result):
    assert shown(calculate(expression)) == result


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(" * 100, "a number is missing at the end"),
        ("-" * 100, "a number is missing at the end"),
        ("1 + ", "a number is missing at the end"),
        ("()", r"a number is missing before '\)'"),
        ("1 2", "'2' cannot stand there"),
        ("1)", r"'\)' cannot stand there"),
        ("(1", "a parenthesis is not closed"),
        ("1.2.3", "'.3' cannot stand there"),
        ("1e5", "'e' is no number"),
        ("3 \N{SUPERSCRIPT TWO}", "is no number and none of"),
        (" ", "a number is missing at the end"),
    ],
)
def test_what_is_no_expression_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        calculate(text)
