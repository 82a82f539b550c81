"""Objects of a user's own files and modules: what they may import, and what they do to the program that loads them."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlxrl.env import names
from mlxrl.env.names import load_object


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """Takes back what a test put on the path and among the modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(names, "_folders", [])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_file_imports_its_neighbour_at_once_and_later(tmp_path):
    folder = write(
        tmp_path,
        own="from near_a import VALUE\ndef later():\n    from near_b import VALUE\n    return VALUE",
        near_a="VALUE = 1",
        near_b="VALUE = 2",
    )
    path = list(sys.path)
    assert load_object(f"{folder}/own.py:VALUE") == 1
    assert load_object(f"{folder}/own.py:later")() == 2
    assert sys.path == [str(folder), *path]  # once


def test_files_and_neighbours_of_the_same_name_in_two_folders_stay_apart(tmp_path):
    text = "from near_c import VALUE, Thing\nimport near_p.inner\nPART = near_p.inner.PART"
    for place in "ab":
        folder = write(tmp_path / place, own=text, second="from near_c import Thing")
        write(folder, near_c=f"VALUE = {place!r}\nclass Thing: pass")
        write(folder / "near_p", __init__="", inner=f"PART = {place!r}")
    a, b = tmp_path / "a", tmp_path / "b"
    assert [load_object(f"{folder}/own.py:VALUE") for folder in (a, b, a)] == ["a", "b", "a"]
    assert [load_object(f"{folder}/own.py:PART") for folder in (a, b)] == ["a", "b"]
    assert load_object(f"{b}/second.py:Thing") is load_object(f"{b}/own.py:Thing")  # of one folder, the same
    assert load_object(f"{b}/own.py:Thing") is not load_object(f"{a}/own.py:Thing")


def test_a_neighbour_does_not_take_the_place_of_a_module_that_the_program_has(tmp_path):
    folder = write(tmp_path, own="import json\nVALUE = json.dumps([1])", json="")
    before = sys.modules["json"]
    assert load_object(f"{folder}/own.py:VALUE") == "[1]"
    assert sys.modules["json"] is before


def test_a_module_is_found_in_the_working_directory(tmp_path, monkeypatch):
    for place in "ab":
        write(tmp_path / place / "pack", __init__="", inner=f"VALUE = {place!r}")
        write(tmp_path / place, lone=f"VALUE = {place!r}")
    for place in "ab":
        monkeypatch.chdir(tmp_path / place)
        assert load_object("pack.inner:VALUE") == load_object("lone:VALUE") == place


def test_an_exit_while_loading_is_an_error_that_names_file_and_code(tmp_path, monkeypatch):
    write(
        tmp_path, leaves="import sys\nVALUE = 1\nsys.exit(0)", through="import leaves", says="raise SystemExit('bye')"
    )
    monkeypatch.chdir(tmp_path)
    for reference in ("leaves.py:VALUE", "leaves:VALUE", "through.py:VALUE"):
        with pytest.raises(
            ValueError, match=rf"'{reference}' cannot be .*leaves.py, line 3, ended it by sys.exit\(0\)"
        ):
            load_object(reference)
    with pytest.raises(
        ValueError, match=r"says.py, line 1, ended it by sys.exit\('bye'\); put what only a script does"
    ):
        load_object("says.py:VALUE")


def test_what_is_no_python_is_named_by_its_own_file_and_line(tmp_path, monkeypatch):
    write(tmp_path, broken="VALUE = 1\ndef f(:\n", through="import broken", shifted="VALUE = 1\n  x = 2\n")
    monkeypatch.chdir(tmp_path)
    for reference in ("broken.py:VALUE", "broken:VALUE", "through.py:VALUE"):
        with pytest.raises(ValueError, match=rf"'{reference}' cannot be loaded: .*/broken.py, line 2: .+; correct it"):
            load_object(reference)
    with pytest.raises(ValueError, match=r"shifted.py, line 2: unexpected indent"):
        load_object("shifted.py:VALUE")
    write(tmp_path, binary="VALUE = 1\n\0")
    with pytest.raises(ValueError, match=r"'binary.py:VALUE' cannot be loaded: [^N]*null bytes; correct it"):
        load_object("binary.py:VALUE")


def test_an_exit_while_loading_does_not_end_the_program(tmp_path):
    write(tmp_path, leaves="import sys\nsys.exit(0)")
    code = "from mlxrl.env import make_env\nmake_env('leaves.py:make')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ValueError: 'leaves.py:make' cannot be loaded" in ended.stderr
