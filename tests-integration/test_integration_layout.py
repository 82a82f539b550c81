"""Where things lie in the packages: the namespace, and what every one of them has."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def files(folder, pattern):
    return [path for path in folder.rglob(pattern) if "__pycache__" not in path.parts]


def test_the_namespace_has_no_init():
    # One stray file makes every other member unimportable.
    assert list(ROOT.glob("packages/*/src/mlxrl/__init__.py")) == []


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_package_has_its_portion_and_its_papers(folder):
    name = folder.name.removeprefix("mlxrl-")
    assert [path.name for path in folder.glob("src/mlxrl/*")] == [name]
    assert (folder / "src/mlxrl" / name / "py.typed").read_bytes() == b""
    assert (folder / "README.md").read_text().startswith(f"# {folder.name}\n")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_packages_test_files_carry_its_name(folder):
    name = folder.name.removeprefix("mlxrl-")
    tests = [path.name for path in files(folder / "tests", "*.py") if path.name.startswith("test_")]
    assert tests
    assert [test for test in tests if not test.startswith(f"test_{name}_")] == []
    assert files(folder / "tests", "__init__.py") == []


def test_a_module_over_400_lines_says_why():
    modules = [path for folder in ["packages", "tests-integration"] for path in files(ROOT / folder, "*.py")]
    long = [path for path in [ROOT / "noxfile.py", *modules] if len(path.read_text().splitlines()) > 400]
    # The word to look for: "It is long because ...".
    assert [path.name for path in long if "because" not in (ast.get_docstring(ast.parse(path.read_text())) or "")] == []
