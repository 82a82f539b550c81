"""Files that are whole or not there: written aside, flushed to disk, then renamed into place."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any


def aside(path: Path) -> Path:
    """Where a file, folder or link is written before it is moved into place."""
    return path.with_name(f".{path.name}.new")


def write_text(path: Path, text: str) -> None:
    """Replace a file's content at once."""
    new = aside(path)
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder appear with all its files.

    Args:
        path: the folder; one that is there already is replaced.
        fill: writes the files into the folder it is given.
    """
    new = aside(path)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    fill(new)
    for file in new.iterdir():
        _sync(file)
    _sync(new)
    if path.exists():
        shutil.rmtree(path)
    new.rename(path)
    _sync(path.parent)


def point_link(link: Path, target: Path) -> None:
    """Point a relative symbolic link at a folder, replacing where it pointed before."""
    new = aside(link)
    new.unlink(missing_ok=True)
    if link.is_dir() and not link.is_symlink():  # a copy of the run, made by following links
        remove(link)
    new.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    new.replace(link)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append JSON objects, a line each, and flush them to disk.

    Numbers that are not finite, however deep, are null, and what JSON does not know, such as a date, is its text.
    """
    with path.open("a") as file:
        file.writelines(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; a last line that was cut off in writing is left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return list(_rows(file))


def size_of_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Bytes of a file of lines before the first that is not to be kept, or a last one that was cut off in writing.

    All lines are read, one at a time: one that is damaged behind the cut is found as well.

    Args:
        path: the file.
        keep: whether an object is to be kept.
    """
    end, kept = 0, True
    with path.open("rb") as file:
        for row in _rows(file):
            kept = keep(row) and kept
            end = file.tell() if kept else end
    return end


def cut_off(path: Path, size: int) -> None:
    """Keep the first bytes of a file alone."""
    os.truncate(path, size)
    _sync(path)


def _rows(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in file:
        if line.endswith(b"\n"):
            yield json.loads(line)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
