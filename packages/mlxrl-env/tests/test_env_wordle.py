"""Wordle: the marks, the states, and that every word can be found."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from mlxrl.env import Task, WordleEnv
from mlxrl.env.wordle import WORDS, marks


def say(name):
    return f"<action>{name}</action>"


def started(secret) -> tuple[Any, Any]:
    env = WordleEnv(Task("", {"start": (WORDS.index(secret),)}, "a"))
    return env, env.reset()


def test_the_words_are_many_distinct_and_of_five_letters():
    assert len(WORDS) == len(set(WORDS)) > 200
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [
        ("stone", "stone", "GGGGG"),
        ("crane", "music", "YXXXX"),
        (
            "eerie",
            "level",
            "YGXXX",
        ),  # two e in level: one in place, one elsewhere; the third e of the guess is left over
        ("allow", "apple", "GYXXX"),  # one l in apple, and it is the first l of the guess that has it
        ("hello", "label", "XYYYX"),  # two l in label, both elsewhere
        ("melon", "lemon", "YGYGG"),
        ("belle", "apple", "XXXGG"),  # the l in place takes the one there is
    ],
)
def test_a_letter_is_marked_as_often_as_the_secret_has_it(guess, secret, expected):
    assert marks(guess, secret) == expected


def test_guesses_and_marks_are_shown_until_the_word_is_found():
    env, first = started("stone")
    assert first == "Guess a 5-letter word: <action>WORD</action>. G right, Y elsewhere, X absent."
    # crane: n is in place, e too; c, r and a are absent
    results = [env.step(say(word)) for word in ("crane", "zzzzz", "STONE")]
    assert results[0].observation == f"{first}\ncrane XXXGG"
    assert results[1].observation == f"{first}\ncrane XXXGG\nzzzzz XXXXX"
    assert (results[2].observation, results[2].reward, results[2].terminated) == ("Correct.", 1.0, True)


@pytest.mark.parametrize(
    "guess", ["four", "sixsix", "st-ne", "12345", "st ne", "\N{LATIN SMALL LETTER E WITH ACUTE}tude"]
)
def test_what_is_not_five_letters_is_invalid(guess):
    env, first = started("stone")
    for text in (say(guess), guess):
        result = env.step(text)
        assert (result.observation, result.info) == (first, {"invalid_action": True})


@pytest.mark.parametrize("text", ["stone", " Stone.\n", "**STONE**", "<action>stone", "<action>'stone'.</action>"])
def test_a_bare_word_is_a_guess(text):
    assert started("stone")[0].step(text).terminated


def test_a_state_is_what_is_known_in_whatever_order_and_however_often_it_was_asked():
    states = []
    for order in (("crane", "music"), ("music", "crane"), ("music", "crane", "music")):
        env, _ = started("stone")
        states.append([env.state_id(env.step(say(word)).observation) for word in order])
    assert states[0][1] == states[1][1] == states[2][2]
    assert states[0][0] != states[1][0]
    other, _ = started("apple")
    assert other.state_id(other.step(say("crane")).observation) != states[0][0]


@cache
def best_guess(candidates):
    """The candidate whose marks split the candidates into the smallest largest part."""
    return min(candidates, key=lambda guess: (max(Counter(marks(guess, word) for word in candidates).values()), guess))


def test_keeping_to_the_words_that_fit_finds_every_word_in_six_guesses():
    for secret in WORDS:
        env, _ = started(secret)
        candidates, rewards = WORDS, []
        while not rewards or (rewards[-1] == 0.0 and len(rewards) < 6):
            guess = best_guess(candidates)
            result = env.step(say(guess))
            rewards.append(result.reward)
            shown = result.observation.splitlines()[-1].split()[-1]
            candidates = tuple(word for word in candidates if marks(guess, word) == shown)
        assert rewards[-1] == 1.0, secret
