"""Environments of other libraries: their names, what is said where a library is missing, chance of each game's own."""

import importlib.util
import random
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mlxrl.env import Task, describe_env, make_env
from mlxrl.env.adapters import LIBRARIES, is_installed, library_names
from mlxrl.env.adapters.seeded import NumberedSuite, OwnChance

MODULES = {
    "gem:game:Wordle-v0-easy": "gem",
    "gymnasium:FrozenLake-v1": "gymnasium",
    "openenv:http://localhost:8000": "openenv",
    "reasoning-gym:chain_sum": "reasoning_gym",
    "skyrl-gym:gsm8k": "skyrl_gym",
    "textarena:Mastermind-v0": "textarena",
    "verifiers:anything": "verifiers",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_library_that_is_not_installed_is_named_with_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULES[name], None)  # Python's mark for what cannot be imported
    extra = name.partition(":")[0]
    options = {"path": "rows.jsonl"} if extra == "skyrl-gym" else {}
    with pytest.raises(ValueError, match=rf'environments "{extra}:..." need a package; .*"mlxrl-env\[{extra}\]"'):
        make_env(name, **options)


@pytest.mark.parametrize("name", MODULES)
def test_a_description_needs_no_library(name, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    described = describe_env(name)
    assert described.name == name
    assert 10 < len(described.summary) <= 100
    assert described.required == (("path",) if name.startswith("skyrl-gym") else ())


@pytest.mark.parametrize("name", MODULES)
def test_what_a_library_lists_has_the_names_that_are_played(name):
    library, _, inner = name.partition(":")
    assert is_installed(library) == (importlib.util.find_spec(LIBRARIES[library].module) is not None)
    pytest.importorskip(LIBRARIES[library].module, reason=f'needs pip install "mlxrl-env[{library}]"')
    names = library_names(library)
    assert list(names) == sorted(set(names))
    assert (inner in names) == (LIBRARIES[library].names is not None)


@pytest.mark.parametrize("library", [name for name in LIBRARIES if LIBRARIES[name].names])
def test_names_of_a_library_that_is_not_installed_cannot_be_listed(library, monkeypatch):
    monkeypatch.setitem(sys.modules, LIBRARIES[library].module, None)
    assert not is_installed(library)
    with pytest.raises(ValueError, match=rf'"mlxrl-env\[{library}\]"'):
        library_names(library)


def test_a_library_may_be_spelled_with_underscores_and_capitals():
    assert describe_env("Reasoning_Gym:chain_sum").defaults == describe_env("reasoning-gym:chain_sum").defaults


def test_every_library_has_a_name_in_the_refusal_of_an_unknown_one():
    with pytest.raises(ValueError, match="unknown environment 'nothing'") as refused:
        make_env("nothing")
    assert [library for library in LIBRARIES if f"{library}:NAME" not in str(refused.value)] == []


def test_every_library_is_in_the_readme_and_an_extra():
    package = Path(__file__).parents[1]
    readme, project = (package / "README.md").read_text(), (package / "pyproject.toml").read_text()
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    assert [name for name in LIBRARIES if f"`{name}:" not in readme or f"`mlxrl-env[{name}]`" not in readme] == []
    assert [name for name in LIBRARIES if name not in extras] == []


def test_a_library_without_a_name_after_it_is_no_environment():
    with pytest.raises(ValueError, match=r"names the module 'gymnasium'|unknown object of gymnasium"):
        make_env("gymnasium:")


def made(number: int, seed: int) -> Any:
    """What stands for a game: what it was made of."""
    return number, seed


def numbers(suite, split):
    return [task.columns["number"] for task in suite.tasks(split)]


def test_tasks_are_numbers_that_differ_and_evaluation_does_not_depend_on_the_training_size():
    small, large = (NumberedSuite("game", made, size, 3, seed=5) for size in (4, 40))
    assert len(small.tasks("train")) == 4
    assert len({*numbers(large, "train"), *numbers(large, "eval")}) == 43
    assert numbers(small, "eval") == numbers(large, "eval")
    assert numbers(small, "train") == numbers(large, "train")[:4]
    assert numbers(small, "train") != numbers(NumberedSuite("game", made, 4, 3, seed=6), "train")


@pytest.mark.parametrize(("option", "value"), [("size", 0), ("eval_size", -1), ("seed", 0.5)])
def test_a_count_out_of_range_is_refused(option, value):
    options = {"size": 1, "eval_size": 0, "seed": 0, option: value}
    with pytest.raises(ValueError, match=f"{option} must be a whole number of at least"):
        NumberedSuite("game", made, **options)


def test_the_game_of_a_task_is_made_of_its_number_and_the_seed():
    suite = NumberedSuite("game", made, 1, 0, seed=0)
    assert suite.make(Task("7", {"number": 7}, "train-0"), 3, 1) == (7, 3)


def test_chance_is_each_games_own_whatever_else_draws_in_between():
    alone, disturbed = OwnChance(1), OwnChance(1)
    drawn = []
    for chance in (alone, disturbed):
        for _ in range(3):
            with chance.drawing():
                drawn.append(random.random())
            if chance is disturbed:
                random.random()
                with OwnChance(2).drawing():
                    random.random()
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_the_shared_generator_goes_on_as_if_no_game_had_drawn():
    random.seed(11)
    expected = [random.random() for _ in range(2)]
    random.seed(11)
    first = random.random()

    def break_off():
        with OwnChance(1).drawing():
            raise KeyError(random.random())

    with pytest.raises(KeyError):  # what a game raises changes nothing of it
        break_off()
    assert [first, random.random()] == expected


def test_numpys_shared_generator_is_kept_as_well():
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(11)
    expected = numpy.random.random(2).tolist()
    numpy.random.seed(11)
    first, inner = numpy.random.random(), []
    for _ in range(2):
        with OwnChance(1).drawing():
            inner.append(numpy.random.random())
    assert [first, numpy.random.random()] == expected
    assert inner[0] == inner[1]  # the same chance from its start


def test_games_in_threads_draw_what_they_draw_alone():
    def play(seed, into):
        chance = OwnChance(seed)
        for _ in range(200):
            with chance.drawing():
                into.append(random.random())

    alone, together = [[] for _ in range(4)], [[] for _ in range(4)]
    for seed in range(4):
        play(seed, alone[seed])
    threads = [threading.Thread(target=play, args=(seed, together[seed])) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
