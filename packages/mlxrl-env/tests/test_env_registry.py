"""Environments by name: the shipped ones, registered ones, and a user's own code."""

import subprocess
import sys

import pytest

import mlxrl.env
from mlxrl.env import (
    EnvDescription,
    FactorySuite,
    KeyDoorEnv,
    Suite,
    describe_env,
    env_names,
    make_env,
    register_env,
    registry,
)

OWN = '''
from mlxrl.env import ArithmeticSuite, KeyDoorEnv

def factory(task, seed, group_index):
    """Keys and doors.

    As they come.
    """
    return KeyDoorEnv(task, seed)

positional = lambda number, seed, group: KeyDoorEnv(number, seed)

def with_defaults(task, seed=0, group_index=0):
    return KeyDoorEnv(task, seed)

def builder(count=4):
    return ArithmeticSuite(size=count)

def needy(path, fast=True, **anything):
    return ArithmeticSuite()

def wrong():
    return 3

def lone(task):
    return KeyDoorEnv(task)

def one_more(task, seed, group_index, level):
    return KeyDoorEnv(task, seed)

def keywords_only(task, *, seed, group_index):
    return KeyDoorEnv(task, seed)

def no_task(seed, group_index):
    return KeyDoorEnv(0, seed)

def three(path, level, size):
    return ArithmeticSuite(size=size)

class Three(ArithmeticSuite):
    """Sums of three options."""

    def __init__(self, path, level, size):
        super().__init__(size=size)

number = 3
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_the_shipped_names():
    assert env_names() == (
        "alphabet-sort",
        "arithmetic",
        "dataset",
        "frozen-lake",
        "guess-number",
        "jsonl",
        "key-door",
        "recurring-text",
        "sokoban",
        "tool-math",
        "wordle",
    )


@pytest.mark.parametrize("name", ["key-door", "key_door", "Key-Door"])
def test_a_name_may_be_spelled_with_underscores_and_capitals(name):
    suite = make_env(name)
    assert isinstance(suite, Suite)
    assert suite.name == "key-door"


@pytest.mark.parametrize("attribute", ["factory", "positional", "with_defaults"])
def test_a_factory_in_a_file_gets_whole_numbers_as_tasks(own, attribute):
    suite = make_env(f"{own}:{attribute}", tasks=3, eval_tasks=2)
    assert isinstance(suite, Suite)
    assert [task.id for task in suite.tasks("train")] == ["0", "1", "2"]
    assert [task.columns for task in suite.tasks("eval")] == [{"number": 3}, {"number": 4}]  # others than in training
    env = suite.make(suite.tasks("train")[2], 5, 1)
    assert env.reset() == KeyDoorEnv(2, 5).reset()


def test_a_builder_in_a_file_gets_the_options(own):
    assert len(make_env(f"{own}:builder", count=7).tasks("train")) == 7


@pytest.mark.parametrize("attribute", ["three", "Three"])
def test_a_builder_may_need_three_options(own, attribute):
    assert len(make_env(f"{own}:{attribute}", path="a", level=2, size=3).tasks("train")) == 3
    assert describe_env(f"{own}:Three").required == ("path", "level", "size")


def test_a_module_on_the_path_is_a_place_for_a_builder():
    suite = make_env("mlxrl.env:ArithmeticSuite", size=3)
    assert len(suite.tasks("train")) == 3


def test_a_file_is_loaded_once(own):
    with open(own, "a") as file:
        file.write("\nloads = []\ndef a(): loads.append(1); return ArithmeticSuite(size=len(loads))\nb = a\n")
    assert [len(make_env(f"{own}:{name}").tasks("train")) for name in "ab"] == [1, 2]


def test_a_file_that_breaks_while_loading_shows_its_own_error_each_time(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            make_env(f"{tmp_path}/broken.py:factory")


def test_an_import_that_fails_inside_a_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        make_env("needs_more:factory")


@pytest.mark.parametrize("name", env_names())
def test_every_shipped_environment_says_in_a_line_what_it_asks(name):
    described = describe_env(name)
    assert described.name == name
    assert 10 < len(described.summary) <= 100
    assert described.summary.endswith(".")
    assert described.required == (("path",) if name in ("dataset", "jsonl") else ())
    assert "seed" in described.defaults or name == "guess-number"  # which holds out nothing


def test_a_description_tells_options_with_their_defaults_and_those_that_must_be_given(own):
    assert describe_env("key-door").defaults == {
        "seed": 0,
        "max_turns": 10,
        "invalid_penalty": 0.0,
        "show_actions": True,
    }
    assert describe_env(f"{own}:factory") == EnvDescription(
        name=f"{own}:factory", summary="Keys and doors.", required=(), defaults={"tasks": 100, "eval_tasks": 20}
    )
    assert describe_env(f"{own}:needy") == EnvDescription(f"{own}:needy", "", ("path",), {"fast": True})
    with pytest.raises(ValueError, match="unknown environment 'key-dor'; did you mean 'key-door'"):
        describe_env("key-dor")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("arithmetik", {}, r"unknown environment 'arithmetik'; did you mean 'arithmetic'\? \(known: .*arithmetic, "),
        ("zzz", {}, r"unknown environment 'zzz' \(known: .*arithmetic, .*path/to/file.py:factory"),
        ("arithmetic", {"sed": 1}, r"unknown option of environment 'arithmetic': 'sed'; did you mean 'seed'\?"),
        ("jsonl", {}, "environment 'jsonl' needs the option 'path'"),
        ("key-door", {"size": 3}, r"unknown option .*'size' \(known: invalid_penalty, max_turns, seed, show_actions\)"),
        ("nowhere.py:factory", {}, "names the file .*nowhere.py, which does not exist; correct the path"),
        ("no_such_module:factory", {}, "names the module 'no_such_module', which cannot be imported; install it"),
        ("mlxrl.env.nothing:factory", {}, "names the module 'mlxrl.env.nothing', which cannot be imported"),
        ("mlxrl.env:KeyDorEnv", {}, r"unknown object of mlxrl.env: 'KeyDorEnv'; did you mean 'KeyDoorEnv'\?"),
    ],
)
def test_an_unknown_name_or_option_is_refused_with_the_alternatives(name, options, words):
    with pytest.raises(ValueError, match=words):
        make_env(name, **options)


@pytest.mark.parametrize(
    ("attribute", "options", "error", "words"),
    [
        ("facory", {}, ValueError, r"unknown object of .*own.py: 'facory'; did you mean 'factory'\?"),
        ("factory", {"task": 3}, ValueError, r"'task'; did you mean 'tasks'\? \(known: eval_tasks, tasks\)"),
        ("factory", {"tasks": 0}, ValueError, "tasks must be a whole number of at least 1, got 0"),
        ("builder", {"cout": 3}, ValueError, r"'cout'; did you mean 'count'\?"),
        ("needy", {}, ValueError, "needs the option 'path'"),
        (
            "wrong",
            {},
            TypeError,
            r"must build a suite .* got int; .* takes \(task, seed, group_index\) by position, got \(\)",
        ),
        ("lone", {}, TypeError, r"takes \(task, seed, group_index\) by position, got \(task\); take those three"),
        (
            "one_more",
            {},
            TypeError,
            r"takes \(task, seed, group_index\) by position, got \(task, seed, group_index, level\); take",
        ),
        (
            "keywords_only",
            {},
            TypeError,
            r"takes \(task, seed, group_index\) by position, got \(task, \*, seed, group_index\)",
        ),
        (
            "no_task",
            {},
            ValueError,
            r"needs the option 'seed'; .* \(task, seed, group_index\) by position, got \(seed, group_index\)",
        ),
        (
            "Three",
            {},
            ValueError,
            r"needs the option 'path'; .* \(task, seed, group_index\) by position, got \(path, level, size\)",
        ),
        ("three", {"size": 3}, ValueError, "needs the option 'path'"),
        ("number", {}, TypeError, "must be a function or a class, got int"),
    ],
)
def test_a_wrong_object_of_a_users_file_is_refused(own, attribute, options, error, words):
    with pytest.raises(error, match=words):
        make_env(f"{own}:{attribute}", **options)


def test_a_registered_name_is_known_and_not_taken_twice():
    register_env("Two_Doors", lambda task, seed, group_index: KeyDoorEnv(task, seed))
    try:
        suite = make_env("two-doors", tasks=2)
        assert isinstance(suite, FactorySuite)
        assert suite.name == "two-doors"
        with pytest.raises(ValueError, match="name must be new and without a colon, got 'two-doors'"):
            register_env("two-doors", KeyDoorEnv)
        with pytest.raises(ValueError, match="without a colon, got 'a:b'"):
            register_env("a:b", KeyDoorEnv)
    finally:
        del registry._BUILDERS["two-doors"]


def test_every_public_name_is_there_and_sorted():
    assert sorted(mlxrl.env.__all__) == list(mlxrl.env.__all__)
    assert all(hasattr(mlxrl.env, name) for name in mlxrl.env.__all__)


def test_the_package_imports_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import mlxrl.env; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["mlxrl"]
