"""Tasks from JSON lines: columns, splits and refusals that name file and line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.env import make_env


def write(folder, *rows, name="tasks.jsonl"):
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_a_row_is_a_task_with_all_its_columns(tmp_path):
    path = write(tmp_path, {"prompt": "2+2?", "answer": "4", "level": 1}, "", {"prompt": "3+3?", "answer": "6"})
    suite = make_env("jsonl", path=path)
    first, second = suite.tasks("train")
    assert (first.prompt, first.columns) == ("2+2?", {"prompt": "2+2?", "answer": "4", "level": 1})
    assert second.columns == {"prompt": "3+3?", "answer": "6", "level": None}  # a column that only others have
    assert (first.id, second.id) == ("tasks.jsonl:1", "tasks.jsonl:3")  # the lines as an editor counts them
    assert suite.tasks("eval") == ()
    assert suite.rewards == ()


def test_a_prompt_may_be_chat_messages(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    suite = make_env("jsonl", path=write(tmp_path, {"prompt": chat}))
    (task,) = suite.tasks("train")
    assert task.prompt == tuple(chat)
    assert suite.make(task, 0, 0).reset() == tuple(chat)


def test_other_column_names_are_read_and_the_answer_is_passed_as_answer(tmp_path):
    path = write(tmp_path, {"question": "2+2?", "final": 4})
    (task,) = make_env("jsonl", path=path, prompt_column="question", answer_column="final").tasks("train")
    assert task.prompt == "2+2?"
    assert task.columns == {"question": "2+2?", "final": 4, "answer": 4}


def test_a_file_without_answers_is_fine_under_the_default_name(tmp_path):
    (task,) = make_env("jsonl", path=write(tmp_path, {"prompt": "Sing."})).tasks("train")
    assert task.columns == {"prompt": "Sing."}


def test_a_byte_order_mark_and_foreign_letters_are_read(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "Größe?\u2028"}\r\n'.encode())
    (task,) = make_env("jsonl", path=str(path)).tasks("train")
    assert task.prompt == "Größe?\u2028"


def test_a_second_file_is_the_evaluation_split(tmp_path):
    train = write(tmp_path, {"prompt": "a"})
    held_out = write(tmp_path, {"prompt": "b"}, name="eval.jsonl")
    suite = make_env("jsonl", path=train, eval_path=held_out)
    assert [[task.prompt for task in suite.tasks(split)] for split in ("train", "eval")] == [["a"], ["b"]]


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.sampled_from("abcdefgh"), min_size=2).filter(lambda prompts: len(set(prompts)) > 1),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_a_fraction_splits_distinct_prompts_and_loses_no_row(tmp_path_factory, prompts, fraction, seed):
    path = write(tmp_path_factory.mktemp("rows"), *({"prompt": prompt} for prompt in prompts))
    suite, again = (make_env("jsonl", path=path, eval_fraction=fraction, seed=seed) for _ in range(2))
    train, held = ([task.prompt for task in suite.tasks(split)] for split in ("train", "eval"))
    assert sorted(train + held) == sorted(prompts)
    assert not set(train) & set(held)
    # the rounded share of the distinct prompts, but at least one on each side
    assert len(set(held)) == min(max(1, round(fraction * len(set(prompts)))), len(set(prompts)) - 1)
    assert (suite.tasks("train"), suite.tasks("eval")) == (again.tasks("train"), again.tasks("eval"))


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, "tasks.jsonl has no rows; write one JSON object a line"),
        (["", " "], {}, "tasks.jsonl has no rows"),
        ([{"prompt": "a"}, "{broken"], {}, r"tasks.jsonl line 2 is not JSON \(.*\); write one object a line"),
        ([{"prompt": "a"}, "[1]"], {}, "tasks.jsonl line 2 must be an object, got list"),
        ([{"question": "a", "n": 1}], {}, r"line 1 has no value in column 'prompt' \(its columns: question, n\)"),
        ([{"prompt": "a"}], {"answer_column": "gold"}, r"line 1 has no value in column 'gold' \(its columns: prompt\)"),
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], {}, "line 2 has no value in column 'answer'"),
        ([{"prompt": "a", "answer": None}], {}, "line 1 has no value in column 'answer'"),
        ([{"prompt": " "}], {}, "line 1, column 'prompt' must be text or a list of chat messages, and not empty"),
        ([{"prompt": 3}], {}, "line 1, column 'prompt' must be text or a list of chat messages.*got 3"),
        ([{"prompt": []}], {}, "line 1, column 'prompt' must be text or a list of chat messages"),
        ([{"prompt": [{"role": "user"}]}], {}, "line 1, column 'prompt': a chat message must be"),
        ([{"prompt": "a", "completions": 1}], {}, "column 'completions', which is an argument of reward functions"),
        ([{"prompt": "a"}], {"eval_fraction": 1.0}, "eval_fraction must be .* at least 0 and below 1, got 1.0"),
        ([{"prompt": "a"}], {"eval_fraction": float("nan")}, "eval_fraction must be .* got nan"),
        ([{"prompt": "a"}], {"eval_fraction": 0.5}, "needs at least 2 distinct prompts, got 1"),
        ([{"prompt": "a"}], {"eval_fraction": 0.5, "eval_path": "b"}, "set eval_path or eval_fraction, not both"),
        ([{"prompt": "a"}], {"eval_path": "nowhere.jsonl"}, "nowhere.jsonl does not exist; correct the path"),
        ([{"prompt": "a"}], {"prompt_column": 3}, "prompt_column must be text, and not empty, got 3"),
        ([{"prompt": "a"}], {"eval_path": ""}, "eval_path must be text, and not empty, got ''"),
        ([{"prompt": "a"}], {"seed": -1}, "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line_and_what_to_do(tmp_path, rows, options, words):
    with pytest.raises(ValueError, match=words):
        make_env("jsonl", path=write(tmp_path, *rows), **options)


def test_bytes_that_are_no_utf8_are_refused_by_their_line(tmp_path):
    (tmp_path / "tasks.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xff\xff"}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        make_env("jsonl", path=str(tmp_path / "tasks.jsonl"))


def test_a_missing_file_is_refused_by_its_path(tmp_path):
    with pytest.raises(ValueError, match=r"the file .*none.jsonl does not exist; correct the path"):
        make_env("jsonl", path=str(tmp_path / "none.jsonl"))
