"""The same rows come out of every format, and what cannot be read is named by file, line and value."""

import csv
import importlib
import importlib.util
import io
import json
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxrl.env import make_env
from mlxrl.env.tables import read_table

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Say "a, b"\nand „Größe“ \u2028'}]
ROWS = [
    {
        "prompt": CHAT,
        "answer": "4, \"four\"\nor '4'",
        "level": 3,
        "share": 0.1,
        "hint": None,
        "tests": {"in": [1, None]},
        "easy": False,
    },
    {
        "prompt": CHAT[1:],
        "answer": "007",
        "level": -12,
        "share": 1e-05,
        "hint": " ü ",
        "tests": {"in": [2, 3]},
        "easy": True,
    },
    {"prompt": CHAT[1:], "answer": "1.50", "level": None, "share": 2.0, "hint": "true", "tests": None, "easy": None},
]


def as_csv(rows):
    """The rows as CSV, lists and objects as JSON."""
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, list(rows[0]))
    writer.writeheader()
    nested = (list, dict)
    writer.writerows({k: json.dumps(v) if isinstance(v, nested) else v for k, v in row.items()} for row in rows)
    return written.getvalue()


def write(folder, format, rows):
    """The rows in a format; what names them, and the options that read them."""
    path = folder / f"tasks.{format}"
    if format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif format == "json":
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf-8")
    elif format == "csv":
        path.write_text(as_csv(rows), encoding="utf-8", newline="")
    elif format == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list(rows)
        if format == "folder":
            dataset.save_to_disk(path)
        elif format == "folder of splits":
            datasets.DatasetDict(train=dataset.select([0]), test=dataset).save_to_disk(path)
            return {"path": str(path), "split": "test"}
        else:  # what stands in ./owner/name is loaded as the hub's owner/name is
            (folder / "owner" / "name").mkdir(parents=True)
            importlib.import_module("pyarrow.parquet").write_table(
                dataset.data.table, folder / "owner" / "name" / "validation.parquet"
            )
            return {"path": "hf:owner/name", "split": "validation"}
    return {"path": str(path)}


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """The folder of the test is where names begin, and the hub's caches are in it."""
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("datasets") is not None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("format", ["jsonl", "json", "csv", "parquet", "folder", "folder of splits", "hub"])
def test_the_same_rows_in_any_format_are_the_same_tasks(at_home, format):
    options = write(at_home, format, ROWS)
    tasks = make_env("dataset", **options).tasks("train")
    assert [(task.prompt, task.columns) for task in tasks] == [(tuple(row["prompt"]), row) for row in ROWS]
    # 3 is a whole number and 2.0 is none, whatever the format: 3 == 3.0 would hide it
    assert [repr(task.columns[name]) for task in tasks[::2] for name in ("level", "share")] == [
        "3",
        "0.1",
        "None",
        "2.0",
    ]
    assert make_env("dataset", **options).tasks("train") == tasks
    held_out = make_env("dataset", path=options["path"], split=options.get("split"), eval_fraction=0.5)
    assert len(held_out.tasks("eval")) + len(held_out.tasks("train")) == len(ROWS)


def test_a_split_is_held_out_of_a_folder_of_splits(at_home):
    options = write(at_home, "folder of splits", ROWS)
    suite = make_env("dataset", path=options["path"], eval_split="test")
    assert [len(suite.tasks(split)) for split in ("train", "eval")] == [1, 3]
    for name, words in [
        ("dev", "unknown split of .*: 'dev'"),
        ("tset", r"did you mean 'test'\? \(known: test, train\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            read_table(options["path"], split=name)


def test_a_dataset_of_the_hub_that_cannot_be_had_is_named(at_home):
    write(at_home, "hub", ROWS)
    with pytest.raises(
        ValueError, match=r"'hf:owner/name' \(split 'test', subset None\) cannot be loaded \(ValueError"
    ):
        read_table("hf:owner/name", split="test")


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(
        ValueError, match=r"cannot be read as a dataset .*name a folder that save_to_disk wrote, or a file"
    ):
        read_table(str(tmp_path))


def test_a_folder_without_splits_has_none_to_name(tmp_path):
    with pytest.raises(ValueError, match=r"split = 'test', but .*tasks.folder holds one dataset without splits"):
        read_table(**write(tmp_path, "folder", ROWS), split="test")


def test_parquet_that_is_none_is_refused_by_its_file(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "tasks.parquet").write_text("prompt,answer\n")
    with pytest.raises(ValueError, match=r"tasks.parquet cannot be read as parquet \(ArrowInvalid: "):
        read_table(str(tmp_path / "tasks.parquet"))


@pytest.mark.parametrize(
    ("path", "missing", "extra"),
    [
        ("tasks.parquet", "pyarrow", "parquet"),
        ("folder", "datasets", "datasets"),
        ("hf:owner/name", "datasets", "datasets"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_to_install(at_home, monkeypatch, path, missing, extra):
    (at_home / "tasks.parquet").touch()
    (at_home / "folder").mkdir()
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails as if it were not there
    words = f"needs the package {missing}, which is not installed; install 'mlxrl-env\\[{extra}\\]'"
    with pytest.raises(ValueError, match=words):
        read_table(path)


CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(cells=st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=1, max_size=4))
@example(cells=[["\ufeff", "\r\n", '"']])
@example(cells=[["NaN", "1e5", "-0"], ["[", "01", "٣"]])
@example(cells=[["9" * 400, "1" + "0" * 5000, "1.0e5"]])
def test_a_csv_cell_keeps_its_text_or_becomes_the_value_that_was_written(tmp_path_factory, cells):
    rows = [dict(zip("abc", values, strict=True)) for values in cells]
    found = read_table(write(tmp_path_factory.mktemp("csv"), "csv", rows)["path"]).rows
    for column in "abc":
        written = [row[column] for row in rows]
        read = [row[column] for _, row in found]
        for before, after in zip(written, read, strict=True):
            text = json.dumps(before) if isinstance(before, list) else "" if before is None else str(before)
            if after is None:
                assert before is None
            elif isinstance(after, (list, dict)):
                assert after == json.loads(text)
            else:  # a number or a boolean has the text that the cell had
                assert str(after) == text
        kinds = {type(value) for value in written} - {type(None)}
        if kinds in ({int}, {list}, {bool}) or (kinds == {float} and all("e+" not in str(v) for v in written)):
            assert read == written


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["true", "false", ""], [True, False, None]),
        (["True", "False"], [True, False]),
        (["true", "yes"], ["true", "yes"]),
        (["TRUE", "1"], ["TRUE", "1"]),
        (["true", "1"], ["true", "1"]),
    ],
)
def test_a_column_of_csv_holds_booleans_where_each_of_its_cells_is_one(tmp_path, cells, values):
    (tmp_path / "t.csv").write_text("prompt,answer,n\n" + "".join(f"true,true,{cell}\n" for cell in cells))
    tasks = make_env("dataset", path=str(tmp_path / "t.csv")).tasks("train")
    assert [task.columns["n"] for task in tasks] == values
    assert {(task.prompt, task.columns["answer"]) for task in tasks} == {("true", "true")}  # these stay text


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", f'{{"a": 1}}\n{{"a": {DEEP}}}\n', "t.jsonl line 2 is nested too deep to be read"),
        ("t.json", f'[{{"a": "[[["}},\n{{"a": {DEEP}}}]\n', "t.json line 2 is nested too deep to be read"),
        ("t.csv", f"b,a\n1,[]\n1,{DEEP}\n", "t.csv line 3, column 'a' is nested too deep to be read; make it flatter"),
    ],
)
def test_what_is_nested_too_deep_is_refused_by_its_line(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_table(str(tmp_path / name))


HALF = r"a\ud800b"  # as JSON escapes it


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("t.jsonl", f'{{"a": "x"}}\n{{"a": "{HALF}"}}\n', "line 2, column 'a'"),
        ("t.jsonl", f'{{"a": [1, {{"b": "{HALF}"}}]}}\n', "line 1, column 'a'"),
        ("t.jsonl", f'{{"a": {{"{HALF}": 1}}}}\n', "line 1, column 'a'"),
        ("t.jsonl", f'{{"{HALF}": 1}}\n', r"line 1, column 'a\\ud800b'"),
        ("t.json", f'[{{"a": "x"}}, {{"a": "{HALF}"}}]', "row 2, column 'a'"),
        ("t.csv", f'a,b\nx,"[""{HALF}""]"\n', "line 2, column 'b'"),
    ],
)
def test_half_a_character_is_refused_by_its_place_wherever_it_stands(tmp_path, name, text, place):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} {place} has half a character .* in 'a\\ud800b'; write the whole"):
        read_table(str(tmp_path / name))


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    (tmp_path / "t.jsonl").write_text(r'{"a": "\ud83d\ude00"}')
    assert read_table(str(tmp_path / "t.jsonl")).rows == ((1, {"a": "\N{GRINNING FACE}"}),)


@settings(deadline=None)
@given(cells=st.lists(st.sampled_from(["x", "x\ny", "\n\n", "x\r\ny"]), min_size=1, max_size=6))
def test_rows_of_csv_are_numbered_by_the_line_that_they_begin_in(tmp_path_factory, cells):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_text("a\n" + "".join(f'"{cell}"\n' for cell in cells), newline="")
    table = read_table(str(path))
    lines = [2 + sum(cell.count("\n") + 1 for cell in cells[:i]) for i in range(len(cells))]
    assert table.rows == tuple((line, {"a": cell}) for line, cell in zip(lines, cells, strict=True))


def test_a_cell_of_csv_may_be_longer_than_python_reads_by_default(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "t.csv").write_text(f"prompt,n\n{'long ' * 40_000},1\n")
    ((_, row),) = read_table(str(tmp_path / "t.csv")).rows
    assert (len(row["prompt"]), row["n"]) == (200_000, 1)
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.jsonl", '\n{"prompt": "Größe?\u2028", "n": 1}\n\n'),
        ("t.json", '[\n{"prompt": "Größe?\u2028", "n": 1}\n]\n'),
        ("T.CSV", "prompt,n\n\nGröße?\u2028,1\n"),
    ],
)
def test_byte_order_marks_blank_lines_and_either_line_end_are_read(tmp_path, name, text, mark, ending):
    (tmp_path / name).write_bytes((mark + text.replace("\n", ending)).encode())
    table = read_table(str(tmp_path / name))
    assert [row for _, row in table.rows] == [{"prompt": "Größe?\u2028", "n": 1}]
    assert table.place(3) == f"{tmp_path / name} {'row' if name == 't.json' else 'line'} 3"


def test_the_format_may_be_said_where_the_name_does_not_say_it(tmp_path):
    (tmp_path / "tasks.txt").write_text('{"prompt": "a"}\n')
    assert read_table(str(tmp_path / "tasks.txt"), format="jsonl").rows == ((1, {"prompt": "a"}),)
    with pytest.raises(ValueError, match=r"unknown format 'txt' \(known: csv, json, jsonl, parquet; .*so set format\)"):
        read_table(str(tmp_path / "tasks.txt"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", "", "t.jsonl has no rows; give it at least one"),
        ("t.jsonl", " \n\n", "t.jsonl has no rows"),
        (
            "t.jsonl",
            '{"a": 1}\n{broken\n',
            r"t.jsonl line 2 is not JSON \(.*\), got '{broken'; write one object a line",
        ),
        ("t.jsonl", '{"a": 1}\n[1]\n', r"t.jsonl line 2 must be an object, got \[1\]"),
        ("t.json", "[]", "t.json has no rows"),
        ("t.json", '[\n{"a": 1},\n{"a": 2\n]', r"t.json line 4 is not JSON \(.*\), got '\]'; write a list of objects"),
        (
            "t.json",
            '{"a": 1}\n{"a": 2}\n',
            r"t.json line 2 is not JSON \(Extra data\), .*; format = \"jsonl\" reads one",
        ),
        ("t.json", '{"a": 1}', r"t.json must hold a list of objects, got {'a': 1}; write \[...\] around the rows"),
        ("t.json", '[{"a": 1}, 7]', "t.json row 2 must be an object, got 7"),
        ("t.csv", "", "t.csv has no rows"),
        ("t.csv", "a,b\n", "t.csv has no rows"),
        ("t.csv", 'a,b\n"x\ny",2\n3\n', r"t.csv line 4 has 1 cells for 2 columns, got \['3'\]"),
        ("t.csv", "a,b\n1,2,3\n", r"t.csv line 2 has 3 cells for 2 columns, got \['1', '2', '3'\]; put cells with"),
        ("t.csv", 'a\nx\n"y" z\n', r"t.csv line 3 is not CSV \(.*\); put cells"),
        ("t.csv", 'a\n"x\n\n', r"t.csv line 2 is not CSV \(unexpected end of data\)"),
        ("t.csv", "a,a\n1,2\n", r"t.csv has a column named 'a', twice or blank, in \['a', 'a'\]"),
        ("t.csv", "a,\n1,2\n", "t.csv has a column named '', twice or blank"),
    ],
)
def test_a_broken_file_is_refused_by_its_line_and_value(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_table(str(tmp_path / name))


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.csv"])
def test_bytes_that_are_no_utf8_are_refused_by_their_line(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xff\xff"}\n')
    with pytest.raises(ValueError, match=rf"{name} line 2 is not UTF-8 \(.*xff'\); save it as UTF-8"):
        read_table(str(tmp_path / name))


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("none.csv", {}, "the file none.csv does not exist; correct the path"),
        ("t.jsonl", {"split": "test"}, "split = 'test' has no meaning for a file, which 't.jsonl' is; leave it out"),
        ("t.jsonl", {"subset": "main"}, "subset = 'main' has no meaning for a file"),
        (".", {"subset": "main"}, "subset = 'main' has no meaning for a folder of a dataset, which '.' is"),
        (".", {"format": "csv"}, "format = 'csv' has no meaning for a folder of a dataset"),
        ("hf:a/b", {"format": "csv"}, "format = 'csv' has no meaning for a dataset of the hub, which 'hf:a/b' is"),
    ],
)
def test_options_that_have_no_meaning_are_refused(tmp_path, monkeypatch, path, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=words):
        read_table(path, **options)
