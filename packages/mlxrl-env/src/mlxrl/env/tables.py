"""Rows read from files, and from Hugging Face datasets: the same rows whatever the format."""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from mlxrl.env.names import unknown

HUB = "hf:"
"""What the name of a dataset of the Hugging Face hub begins with."""

_TOO_DEEP = "is nested too deep to be read; make it flatter"

Row = dict[str, Any]
NumberedRow = tuple[int, Row]


@dataclass(frozen=True)
class Table:
    """The rows of a file or dataset.

    Args:
        source: what it is called in messages: the path, or the hub's name.
        name: a short name for the ids of tasks.
        unit: what the numbers count, "line" or "row".
        rows: the rows, each with its number from 1: the line that it begins in, where the format has lines.
    """

    source: str
    name: str
    unit: str
    rows: tuple[NumberedRow, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of all rows, in the order in which they come up."""
        return tuple(dict.fromkeys(column for _, row in self.rows for column in row))

    def place(self, number: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.source} {self.unit} {number}"


def read_table(
    path: str,
    format: str | None = None,
    split: str | None = None,
    subset: str | None = None,
    texts: Collection[str] = (),
) -> Table:
    """Reads a table.

    Args:
        path: a file of JSON lines (.jsonl), of one JSON array (.json), of comma-separated values (.csv) or of parquet
            (.parquet); a folder that `datasets` saved with save_to_disk; or "hf:owner/name", a dataset of the hub.
        format: "jsonl", "json", "csv" or "parquet", for a file whose name does not end so.
        split: the part of a dataset of several; by default "train".
        subset: the configuration of a dataset of the hub.
        texts: columns of a CSV file that stay text, or chat messages where each cell is a JSON list of them.

    A CSV file begins with a line of column names. Its cells are text, except that a column whose every cell is a
    number holds numbers, one whose every cell is true or false (or True or False) holds booleans, and one whose every
    cell is a JSON list or object holds those; an empty cell is None. A number counts only in the spelling that JSON
    gives it (4, 0.5, not 007 or 1.50), so that its text stays the same.

    Raises:
        ValueError: there is no such file or dataset, it is broken or has no rows, an option does not fit it, or the
            package that reads it is not installed.
    """
    if path.startswith(HUB):
        name = path.removeprefix(HUB)
        _refuse(path, "a dataset of the hub", format=format)
        return _checked(Table(path, name.rpartition("/")[2], "row", tuple(_read_hub(path, name, split, subset))))
    file = Path(path).expanduser()
    if file.is_dir():
        _refuse(path, "a folder of a dataset", format=format, subset=subset)
        return _checked(Table(str(file), file.name, "row", tuple(_read_folder(file, split))))
    _refuse(path, "a file", split=split, subset=subset)
    if not file.is_file():
        raise ValueError(f"the file {file} does not exist; correct the path (relative to {Path.cwd()})")
    kind = format or file.suffix.lower().removeprefix(".")
    if kind not in _READERS:
        raise unknown("format", kind, _READERS, f"; {file} tells none by its ending, so set format")
    unit, read = _READERS[kind]
    if kind == "csv":
        read = partial(_read_csv, texts=texts)
    return _checked(Table(str(file), file.name, unit, tuple(read(file))))


def shown(value: object) -> str:
    """A value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(path: str, what: str, **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} = {value!r} has no meaning for {what}, which {path!r} is; leave it out")


def _checked(table: Table) -> Table:
    """The table, if it has rows, and all of their texts are such as can be encoded."""
    if not table.rows:
        raise ValueError(f"{table.source} has no rows; give it at least one")
    for number, row in table.rows:
        for column, value in row.items():
            for text in _texts_of([column, value]):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise ValueError(
                        f"{table.place(number)}, column {column!r} has half a character (a lone surrogate) in "
                        f"{shown(text)}; write the whole character, or leave it out"
                    ) from None
    return table


def _texts_of(value: object) -> Iterator[str]:
    """The texts in nested lists and objects, their keys too."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*cast(Row, value), *cast(Row, value).values()]
        elif isinstance(value, list):
            left += cast(list[object], value)


def _read_jsonl(file: Path) -> list[NumberedRow]:
    rows: list[NumberedRow] = []
    for line, raw in enumerate(_text(file).split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            row: object = json.loads(raw)
        except ValueError as error:
            raise ValueError(
                f"{file} line {line} is not JSON ({error}), got {shown(raw)}; write one object a line"
            ) from None
        except RecursionError:
            raise ValueError(f"{file} line {line} {_TOO_DEEP}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{file} line {line} must be an object, got {shown(row)}; write one object a line")
        rows.append((line, cast(Row, row)))
    return rows


def _read_json(file: Path) -> list[NumberedRow]:
    text = _text(file)
    try:
        values: object = json.loads(text)
    except json.JSONDecodeError as error:
        hint = 'format = "jsonl" reads one object a line' if error.msg == "Extra data" else "write a list of objects"
        line = shown(text.split("\n")[error.lineno - 1])
        raise ValueError(f"{file} line {error.lineno} is not JSON ({error.msg}), got {line}; {hint}") from None
    except RecursionError:
        raise ValueError(f"{file} line {_deepest_line(text)} {_TOO_DEEP}") from None
    if not isinstance(values, list):
        raise ValueError(f"{file} must hold a list of objects, got {shown(values)}; write [...] around the rows")
    rows: list[NumberedRow] = []
    for number, row in enumerate(cast(list[object], values), start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{file} row {number} must be an object, got {shown(row)}; write a list of objects")
        rows.append((number, cast(Row, row)))
    return rows


def _read_csv(file: Path, texts: Collection[str] = ()) -> list[NumberedRow]:
    records = _csv_records(file)
    if not records:
        return []
    (_, names), *records = records
    for name in names:
        if not name.strip() or names.count(name) > 1:
            raise ValueError(f"{file} has a column named {name!r}, twice or blank, in {names}; give each its own name")
    for line, cells in records:
        if len(cells) != len(names):
            raise ValueError(
                f"{file} line {line} has {len(cells)} cells for {len(names)} columns, got {shown(cells)}; "
                "put cells with commas, quotes or line ends in double quotes"
            )
    columns: list[Sequence[object]] = []
    for i, name in enumerate(names):
        try:
            columns.append(_csv_column([cells[i] for _, cells in records], name in texts))
        except RecursionError:
            line = next(line for line, cells in records if _is_too_deep(cells[i]))
            raise ValueError(f"{file} line {line}, column {name!r} {_TOO_DEEP}") from None
    return [
        (line, dict(zip(names, values, strict=True)))
        for (line, _), values in zip(records, zip(*columns, strict=True), strict=True)
    ]


def _csv_records(file: Path) -> list[tuple[int, list[str]]]:
    """The records that are not blank, each with the line that it begins in."""
    records: list[tuple[int, list[str]]] = []
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    before = csv.field_size_limit(2**31 - 1)  # a long prompt is no mistake
    start = 1
    try:
        for cells in reader:
            if cells:
                records.append((start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{file} line {start} is not CSV ({error}); put cells with commas, quotes or line ends in double quotes, "
            "and double the quotes within"
        ) from None
    finally:
        csv.field_size_limit(before)
    return records


def _csv_column(cells: Sequence[str], is_text: bool) -> Sequence[object]:
    """The values of a column's cells; its type is decided by all of them together."""
    for decode in (_as_chat,) if is_text else (_as_number, _BOOLEANS.get, _as_nested):
        values = [decode(cell) if cell else None for cell in cells]
        if all(value is not None or not cell for value, cell in zip(values, cells, strict=True)):
            return values
    return [cell or None for cell in cells]


def _as_number(cell: str) -> int | float | None:
    if not re.fullmatch(r"-?(?:0|[1-9][0-9]{0,299})(?:\.[0-9]{1,300})?(?:e[-+][0-9]{1,3})?", cell):
        return None
    value = json.loads(cell)
    return value if json.dumps(value) == cell else None


_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}


def _as_nested(cell: str) -> object:
    if not cell.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(cell)
    except ValueError:
        return None


def _is_too_deep(cell: str) -> bool:
    try:
        _as_nested(cell)
    except RecursionError:
        return True
    return False


def _deepest_line(text: str) -> int:
    """The line of a JSON text, from 1, in which its brackets are nested deepest."""
    depth = deepest = place = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth > deepest:
            deepest, place = depth, token.start()
    return text.count("\n", 0, place) + 1


def _as_chat(cell: str) -> object:
    """The value of a JSON list of objects that have roles."""
    value = _as_nested(cell)
    if not isinstance(value, list) or not value:
        return None
    messages = cast(list[object], value)
    return messages if all(isinstance(message, dict) and "role" in message for message in messages) else None


def _read_parquet(file: Path) -> list[NumberedRow]:
    parquet = _module("pyarrow.parquet", "pyarrow", "parquet")
    try:
        values = parquet.ParquetFile(file).read().to_pylist()
    except Exception as error:  # of many classes, all of them about the file
        raise ValueError(f"{file} cannot be read as parquet ({type(error).__name__}: {error}); write it anew") from None
    return _numbered(values)


def _read_folder(folder: Path, split: str | None) -> list[NumberedRow]:
    datasets = _module("datasets", "datasets", "datasets")
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # likewise
        raise ValueError(
            f"{folder} cannot be read as a dataset ({type(error).__name__}: {error}); "
            "name a folder that save_to_disk wrote, or a file"
        ) from None
    if isinstance(dataset, dict):  # a DatasetDict
        splits = cast(dict[str, Any], dataset)
        if (split or "train") not in splits:
            raise unknown(f"split of {folder}:", split or "train", splits)
        dataset = splits[split or "train"]
    elif split is not None:
        raise ValueError(f"split = {split!r}, but {folder} holds one dataset without splits; leave it out")
    return _numbered(dataset.to_list())


def _read_hub(path: str, name: str, split: str | None, subset: str | None) -> list[NumberedRow]:
    datasets = _module("datasets", "datasets", "datasets")
    try:
        dataset = datasets.load_dataset(name, subset, split=split or "train")
    except Exception as error:  # likewise, or about the connection
        raise ValueError(
            f"{path!r} (split {split or 'train'!r}, subset {subset!r}) cannot be loaded ({type(error).__name__}: "
            f"{error}); correct its name, split and subset, or try again"
        ) from None
    return _numbered(dataset.to_list())


def _numbered(rows: Sequence[Row]) -> list[NumberedRow]:
    return list(enumerate(rows, start=1))


def _text(file: Path) -> str:
    raw = file.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{file} line {line} is not UTF-8 ({error.reason}: {raw[error.start : error.end]!r}); save it as UTF-8"
        ) from None


def _module(name: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, package):
            raise  # the package is there; something that it imports is not
        raise ValueError(
            f"reading this needs the package {package}, which is not installed; install 'mlxrl-env[{extra}]'"
        ) from None


_READERS: dict[str, tuple[str, Callable[[Path], list[NumberedRow]]]] = {
    "csv": ("line", _read_csv),
    "json": ("row", _read_json),
    "jsonl": ("line", _read_jsonl),
    "parquet": ("row", _read_parquet),
}
