"""Sums of digits: form, splits, seeds and refusals."""

import re
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.env import SingleTurnEnv, make_env
from mlxrl.env.arithmetic import is_held_out


def held_out(problem):
    return zlib.crc32(b"h" + problem.encode()) % 10 == 0


def problems(tasks):
    return [task.prompt.removeprefix("What is ").removesuffix("?") for task in tasks]


def test_a_task_asks_three_to_five_digits_and_knows_their_sum():
    for task in make_env("arithmetic").tasks("train"):
        prompt = str(task.prompt)
        assert re.fullmatch(r"What is [1-9](\+[1-9]){2,4}\?", prompt)
        assert task.columns == {"answer": str(sum(map(int, re.findall(r"\d", prompt)))), "question": prompt}


def test_a_known_sum_is_held_out_by_its_order_of_digits():
    # crc32("h1+1+4") = 3430552550, a multiple of ten; crc32("h4+1+1") = 1961912345, none
    assert is_held_out("1+1+4")
    assert not is_held_out("4+1+1")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 20), st.sampled_from([(3, 5), (3, 3), (2, 8)]))
def test_splits_are_sized_and_disjoint_and_evaluation_is_held_out_and_distinct(seed, size, eval_size, terms):
    suite = make_env("arithmetic", seed=seed, size=size, eval_size=eval_size, terms=terms)
    train, held = problems(suite.tasks("train")), problems(suite.tasks("eval"))
    assert (len(train), len(held), len(set(held))) == (size, eval_size, eval_size)
    assert not any(map(held_out, train))
    assert all(map(held_out, held))
    assert all(terms[0] <= len(problem.split("+")) <= terms[1] for problem in train + held)


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others():
    first, again, other = (make_env("arithmetic", seed=seed) for seed in (1, 1, 2))
    assert first.tasks("train") == again.tasks("train")
    assert first.tasks("eval") == again.tasks("eval")
    assert first.tasks("train") != other.tasks("train")


def test_ids_tell_all_tasks_apart():
    suite = make_env("arithmetic")
    ids = {task.id for split in ("train", "eval") for task in suite.tasks(split)}
    assert len(ids) == 2000 + 200


def test_an_episode_asks_the_task_and_is_scored_by_answer_tag():
    suite = make_env("arithmetic")
    task = suite.tasks("eval")[0]
    env = suite.make(task, 0, 3)
    assert isinstance(env, SingleTurnEnv)
    assert env.reset() == task.prompt
    assert suite.rewards == (("answer_tag", 1.0),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size must be a whole number of at least 1, got 0"),
        ({"size": 1.5}, "size must be a whole number of at least 1, got 1.5"),
        ({"seed": True}, "seed must be a whole number of at least 0, got True"),
        ({"terms": 3}, r"terms must be .* as in \[3, 5\], got 3"),
        ({"terms": [3]}, r"terms must be .* as in \[3, 5\], got \[3\]"),
        ({"terms": [1, 3]}, r"terms\[0\] must be a whole number of at least 2, got 1"),
        ({"terms": [5, 3]}, r"terms\[1\] must be a whole number of at least 5, got 3"),
        ({"terms": [2, 2], "eval_size": 50}, "got 50 but found [0-9]+; lower eval_size or widen terms"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(options, words):
    with pytest.raises(ValueError, match=words):
        make_env("arithmetic", **options)


def test_all_held_out_sums_of_two_digits_can_be_asked_for():
    everything = {f"{a}+{b}" for a in range(1, 10) for b in range(1, 10)}
    count = sum(map(held_out, everything))
    held = problems(make_env("arithmetic", terms=(2, 2), eval_size=count).tasks("eval"))
    assert set(held) == {problem for problem in everything if held_out(problem)}


def test_a_split_that_is_none_is_refused():
    with pytest.raises(ValueError, match='split must be "train" or "eval", got \'test\''):
        make_env("arithmetic").tasks("test")  # pyright: ignore[reportArgumentType]
