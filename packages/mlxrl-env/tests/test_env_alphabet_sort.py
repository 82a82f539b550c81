"""Alphabet sort: what a list is worth, and how names come in."""

from typing import Any

import pytest

from mlxrl.env import AlphabetSortEnv, Task, make_env
from mlxrl.env.alphabet_sort import NAMES


def say(names):
    return f"<action>{', '.join(names)}</action>"


def new_names(observation):
    """The names that an observation asks for."""
    return observation.partition(": ")[2].partition(".")[0].split(", ")


def started(**options) -> tuple[Any, Any]:
    env = AlphabetSortEnv(Task("", {"start": (1,)}, "a"), **options)
    return env, env.reset()


def test_the_names_are_distinct_and_sort_by_their_letters_alone():
    assert len(set(NAMES)) == len(NAMES)
    assert all(name.isascii() and name.isalpha() and name == name.capitalize() for name in NAMES)


def test_every_level_is_won_by_sorting_and_merging():
    suite = make_env("alphabet-sort")
    for task in suite.tasks("train"):
        env: Any = suite.make(task, 0, 0)
        observation, known, results = env.reset(), [], []
        while not results or not results[-1].terminated:
            known = sorted([*known, *new_names(observation)])
            results.append(env.step(say(known)))
            observation = results[-1].observation
        assert len(known) == 9  # three names in each of three turns
        assert [result.reward for result in results] == pytest.approx([1 / 3] * 3)
        assert (observation, results[-1].truncated) == ("Done.", False)


def test_a_list_is_worth_its_places_that_are_right():
    env, observation = started()
    a, b, c = sorted(new_names(observation))
    # of three places the last is right: 1/3 of a turn, which is 1/3 of an episode
    assert env.step(say([b, a, c])).reward == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("change", "worth"),
    [
        (lambda names: names, 1.0),
        (lambda names: [name.upper() for name in names], 1.0),
        (lambda names: names[:2], 2 / 3),  # two of three places
        (lambda names: [*names, "Zed"], 3 / 4),  # three of the four places that the list has
        (lambda names: ["Zed", *names], 0.0),  # every name one place too late
        (lambda names: names * 50, 3 / 150),
    ],
)
def test_too_many_and_too_few_names_cost_their_places(change, worth):
    env, observation = started(max_turns=1)
    result = env.step(say(change(sorted(new_names(observation)))))
    assert (result.reward, result.terminated) == (pytest.approx(worth), True)


@pytest.mark.parametrize("between", [", ", "\n", " ", ";", ",\n"])
def test_names_may_be_put_apart_as_one_likes(between):
    env, observation = started(max_turns=1)
    text = f"Sorted: <action>{between.join(sorted(new_names(observation)))}</action>"
    assert env.step(text).reward == 1.0


@pytest.mark.parametrize("text", ["{}", "**{}**.", "<action>{}.", '<action>"{}"</action>', "`{}`\n"])
def test_a_list_may_stand_alone_or_dressed_up(text):
    env, observation = started(max_turns=1)
    assert env.step(text.format(", ".join(sorted(new_names(observation))))).reward == 1.0
    env, observation = started(max_turns=1)
    assert env.step(text.format('", "'.join(sorted(new_names(observation))))).reward == 1.0


@pytest.mark.parametrize(
    "text",
    ["Let me think.", "Sorted: Ada, Leo, Max", "Ada, Leo and Max", "<list>Ada</list>", "<action>foo, bar</action>"],
)
def test_a_turn_without_a_list_is_lost_and_asks_again(text):
    env, first = started()
    lost = env.step(text)
    assert (lost.observation, lost.info) == (first, {"invalid_action": True})
    known = sorted(new_names(first))
    second = env.step(say(known))
    last = env.step(say(sorted([*known, *new_names(second.observation)])))
    # two lists of three turns, both right
    assert second.reward + last.reward == pytest.approx(2 / 3)
    assert (last.terminated, last.truncated) == (False, True)


def test_the_state_is_what_is_asked_for_whatever_was_answered():
    states = []
    for places in ((0,), (1, 0)):
        env, observation = started()
        answer = [new_names(observation)[place] for place in places]
        states.append(env.state_id(env.step(say(answer)).observation))
    assert states[0] == states[1]


def test_the_number_of_names_is_an_option():
    env, observation = started(names=5, max_turns=2)
    assert len(new_names(observation)) == 5
    assert len(new_names(env.step(say(new_names(observation))).observation)) == 5
