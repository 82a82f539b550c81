"""Tasks from rows: columns, prompts, splits and refusals that name file and line."""

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


@pytest.mark.parametrize("blank", [{}, {"final": None}])
@pytest.mark.parametrize(("column", "options"), [("answer", {}), ("final", {"answer_column": "final"})])
def test_a_row_without_an_answer_is_a_task_that_nothing_is_known_of(tmp_path, blank, column, options):
    path = write(tmp_path, {"prompt": "2+2?", column: "4"}, {"prompt": "Sing.", **blank})
    first, second = make_env("dataset", path=path, **options).tasks("train")
    assert (first.columns["answer"], second.columns["answer"]) == ("4", None)


@pytest.mark.parametrize("cells", [("12", "7"), ('"[3, 1, 2]"', "[]"), ('"{""a"": 1}"', '"{""a"": 2}"')])
def test_what_is_asked_and_answered_stays_text_in_csv(tmp_path, cells):
    texts = [cell.strip('"').replace('""', '"') for cell in cells]
    path = write(tmp_path, "ask,gold,n", *(f"{cell},{cell},{cell}" for cell in cells), name="t.csv")
    named = {"path": path, "answer_column": "gold"}
    asked = make_env("dataset", prompt_column="ask", **named).tasks("train")
    assert [(task.prompt, task.columns["answer"], task.columns["gold"]) for task in asked] == [(t, t, t) for t in texts]
    assert [task.columns["n"] for task in asked] == [json.loads(text) for text in texts]  # others as before
    filled = make_env("dataset", prompt_template="Sort {ask}", **named).tasks("train")
    assert [task.prompt for task in filled] == [f"Sort {text}" for text in texts]


def test_columns_have_further_names_and_the_tables_own_of_that_name_gives_way(tmp_path):
    path = write(tmp_path, {"question": "2+2?", "gold": "4", "answer": "long", "level": None})
    columns = {"prompt": "question", "answer": "gold", "hardness": "level"}
    (task,) = make_env("dataset", path=path, columns=columns).tasks("train")
    assert task.prompt == "2+2?"
    assert task.columns == {"question": "2+2?", "gold": "4", "answer": "4", "level": None, "hardness": None}


def test_a_system_prompt_stands_before_text_and_before_messages(tmp_path):
    chat = [{"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
    path = write(tmp_path, {"prompt": "2+2?"}, {"prompt": chat})
    first, second = make_env("dataset", path=path, system_prompt="Be brief.").tasks("train")
    system = {"role": "system", "content": "Be brief."}
    assert first.prompt == (system, {"role": "user", "content": "2+2?"})
    assert second.prompt == (system, *chat)


def test_a_template_asks_for_columns_and_needs_no_prompt_column(tmp_path):
    path = write(tmp_path, {"a": "{2}", "b": 3}, {"a": "x", "b": 0.5})
    template = r"{a}+{b}? Put it in \boxed{{}}, {a}."
    suite = make_env("dataset", path=path, prompt_template=template)
    # what stands in a column is text as it is, braces too
    assert [task.prompt for task in suite.tasks("train")] == [
        r"{2}+3? Put it in \boxed{}, {2}.",
        r"x+0.5? Put it in \boxed{}, x.",
    ]


def test_equal_rows_are_tasks_of_their_own(tmp_path):
    tasks = make_env("dataset", path=write(tmp_path, *[{"prompt": "a"}] * 3)).tasks("train")
    assert [task.id for task in tasks] == ["tasks.jsonl:1", "tasks.jsonl:2", "tasks.jsonl:3"]


def test_equal_prompts_stay_on_one_side_of_a_fraction_also_under_a_template(tmp_path):
    path = write(tmp_path, *({"n": n % 5, "answer": n} for n in range(40)))
    suite = make_env("dataset", path=path, prompt_template="Number {n}", eval_fraction=0.4)
    train, held = ({task.prompt for task in suite.tasks(split)} for split in ("train", "eval"))
    assert (len(train), len(held), len(train | held)) == (3, 2, 5)
    assert len(suite.tasks("eval")) == 16  # 2 of 5 numbers, each 8 times


def test_another_seed_holds_out_other_prompts(tmp_path):
    path = write(tmp_path, *({"prompt": str(n)} for n in range(30)))
    held = [make_env("dataset", path=path, eval_fraction=0.5, seed=seed).tasks("eval") for seed in (0, 1)]
    assert held[0] != held[1]


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
        ([{"question": "a", "n": 1}], {}, r"line 1 has no value in column 'prompt' \(its columns: question, n\)"),
        (
            [{"prompt": "a"}],
            {"answer_column": "gold"},
            r"no column 'gold' \(its columns: prompt\), which answer_column",
        ),
        (
            [{"prompt": " "}],
            {},
            "line 1, column 'prompt': a prompt must be text or a list of chat messages, and not empty",
        ),
        ([{"prompt": 3}], {}, "line 1, column 'prompt': a prompt must be text or a list of chat messages.*got 3"),
        ([{"prompt": []}], {}, "line 1, column 'prompt': a prompt must be text or a list of chat messages"),
        ([{"prompt": [{"role": "user"}]}], {}, "line 1, column 'prompt': a chat message must be"),
        ([{"prompt": "a", "completions": 1}], {}, "column 'completions', which is an argument of reward functions"),
        ([{"prompt": "a"}], {"eval_fraction": 1.0}, "eval_fraction must be .* at least 0 and below 1, got 1.0"),
        ([{"prompt": "a"}], {"eval_fraction": float("nan")}, "eval_fraction must be .* got nan"),
        ([{"prompt": "a"}], {"eval_fraction": 0.5}, "needs at least 2 distinct prompts, got 1"),
        ([{"prompt": "a"}], {"eval_fraction": 0.5, "eval_path": "b"}, "set eval_path or eval_fraction, not both"),
        ([{"prompt": "a"}], {"eval_path": "nowhere.jsonl"}, "nowhere.jsonl does not exist; correct the path"),
        ([{"prompt": "a"}], {"prompt_column": 3}, "prompt_column must be text, and not empty, got 3"),
        ([{"prompt": "a"}], {"eval_path": ""}, "eval_path must be text, and not empty, got ''"),
        (
            [{"prompt": "a"}],
            {"columns": {"hint": "clue"}},
            r"has no column 'clue' \(its columns: prompt\), which columns.hint",
        ),
        ([{"prompt": "a"}], {"columns": {"prompt": "ask"}}, "line 1 has no value in column 'ask'"),
        ([{"prompt": "a"}], {"columns": {"answer": "gold"}}, r"no column 'gold' \(its columns: prompt\), which"),
        ([{"prompt": "a"}], {"columns": {"prompts": "prompt"}}, "columns.prompts is an argument of reward functions"),
        ([{"prompt": "a"}], {"columns": {"hint": 3}}, "columns.hint must be text, and not empty, got 3"),
        (
            [{"prompt": "a"}],
            {"columns": {"prompt": "b"}, "prompt_column": "c"},
            "set columns.prompt or prompt_column, not both, got 'b' and 'c'",
        ),
        ([{"prompt": "a"}], {"system_prompt": ""}, "system_prompt must be text, and not empty, got ''"),
        (
            [{"prompt": [{"role": "system", "content": "Sing."}]}],
            {"system_prompt": "Be brief."},
            "line 1, column 'prompt': the prompt begins with a system message of its own, 'Sing.'; leave system_prompt",
        ),
        ([{"a": 1}], {"prompt_template": "{a"}, r"prompt_template: .* in '{a'; write a column as {column}"),
        (
            [{"a": 1}],
            {"prompt_template": r"{a}, in \boxed{}"},
            "braces that are no column, in .*braces themselves as {{",
        ),
        ([{"a": 1}], {"prompt_template": "{a:b}"}, "braces that are no column"),
        ([{"a": 1}], {"prompt_template": "{{a}}"}, "'{{a}}' asks the same of every row"),
        ([{"a": 1}], {"prompt_template": "{b}"}, "line 1, column 'b': prompt_template asks for {b}, which .* got None"),
        ([{"a": [1]}], {"prompt_template": "{a}"}, r"{a}, which must be text or a number, got \[1\]"),
        ([{"a": " "}], {"prompt_template": "{a}"}, "line 1, column 'a': a prompt must be .* not empty"),
        (
            [{"a": 1}],
            {"prompt_template": "{a}", "prompt_column": "a"},
            "set prompt_template or the prompt's column, not both, got the column 'a'",
        ),
        ([{"prompt": "a"}], {"seed": -1}, "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line_and_what_to_do(tmp_path, rows, options, words):
    with pytest.raises(ValueError, match=words):
        make_env("jsonl", path=write(tmp_path, *rows), **options)
