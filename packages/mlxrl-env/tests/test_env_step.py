"""What a step may return, and what is refused."""

import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.env import StepResult, as_step_result


def test_a_step_result_passes_unchanged():
    result = StepResult("next", 0.5, False, True, {"a": 1})
    assert as_step_result(result) == result


def test_a_four_tuple_ends_as_terminated():
    assert as_step_result(("next", 1, True, {"a": 1})) == StepResult("next", 1.0, True, False, {"a": 1})


def test_a_gymnasium_five_tuple_keeps_its_two_ends_apart():
    assert as_step_result(("next", 0.0, False, True, None)) == StepResult("next", 0.0, False, True, {})


@pytest.mark.parametrize(("terminated", "truncated"), [(True, False), (False, True), (True, True)])
def test_nobody_reads_the_last_observation_so_it_may_be_none(terminated, truncated):
    expected = StepResult("", 1.0, terminated, truncated, {})
    assert as_step_result((None, 1.0, terminated, truncated, {})) == expected
    assert as_step_result(StepResult(cast(Any, None), 1.0, terminated, truncated)) == expected


def test_nor_does_anybody_where_no_further_action_is_allowed():
    assert as_step_result((None, 1.0, False, False, {}), last=True) == StepResult("", 1.0, False)


def test_chat_messages_are_an_observation():
    messages = [{"role": "tool", "content": "42"}]
    assert as_step_result((messages, 0, 0, {})).observation == ({"role": "tool", "content": "42"},)


class Scalar:
    """A number as array libraries give it: no float, but read by float() and item()."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value

    def __float__(self):
        return float(self.value)


def test_scalars_of_array_libraries_become_python_numbers():
    result = as_step_result(("next", Scalar(0.25), Scalar(True), {}))
    assert (result.reward, type(result.reward), result.terminated) == (0.25, float, True)


@given(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.booleans())
def test_normalising_twice_changes_nothing(observation, reward, terminated, truncated):
    once = as_step_result((observation, reward, terminated, truncated, {}))
    assert as_step_result(once) == once == StepResult(observation, reward, terminated, truncated, {})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (None, TypeError, "step must return a StepResult.*got NoneType None"),
        ("next", TypeError, "step must return a StepResult.*got str 'next'"),
        (("next", 0.0, True), ValueError, "got 3 values"),
        (("next", 0.0, True, False, {}, None), ValueError, "got 6 values"),
        (("next", math.nan, True, {}), ValueError, "reward of step must be finite, got nan"),
        (("next", -math.inf, True, {}), ValueError, "reward of step must be finite, got -inf"),
        (("next", None, True, {}), TypeError, "reward of step must be a number, got NoneType"),
        (("next", "1.0", True, {}), TypeError, "reward of step must be a number, got str '1.0'"),
        (
            (None, 0.0, False, {}),
            TypeError,
            "observation of step: expected text or .* messages, got NoneType",
        ),
        (((1.0, 2.0), 0.0, True, {}), TypeError, "observation of step: a chat message must be .* got float 1.0"),
        (([], 0.0, True, {}), ValueError, "observation of step: .* empty list"),
        (([{"role": "user"}], 0.0, True, {}), TypeError, "a chat message must be"),
        (("next", 0.0, "no", {}), TypeError, "terminated of step must be True or False, got str 'no'"),
        (("next", 0.0, None, {}), TypeError, "terminated of step must be True or False, got NoneType"),
        (("next", 0.0, True, 2, {}), TypeError, "truncated of step must be True or False, got int 2"),
        (("next", 0.0, True, "info"), TypeError, "info of step must be a mapping or None, got str 'info'"),
        (StepResult("next", math.inf, True), ValueError, "reward of step must be finite, got inf"),
    ],
)
def test_a_wrong_result_is_refused_by_what_came(value, error, words):
    with pytest.raises(error, match=words):
        as_step_result(value)
