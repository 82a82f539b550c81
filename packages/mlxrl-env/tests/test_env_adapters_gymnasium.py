"""Gymnasium's environments as text, on the real package."""

from typing import Any

import pytest

from mlxrl.env import SyncEnv, describe_env, make_env
from mlxrl.env.adapters.gymnasium import ACTIONS, read_choice

LAKE: dict[str, Any] = {"is_slippery": False, "size": 3, "eval_size": 2}
MOVES = "<action>NAME</action>: left, down, right, up"


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason='needs pip install "mlxrl-env[gymnasium]"')


def started(name, *, task=0, seed=0, **options) -> tuple[Any, Any]:
    suite = make_env(name, **options)
    env = SyncEnv(suite.make(suite.tasks("train")[task], seed, 0))
    return env, env.reset()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("up", 1),
        ("UP!", 1),
        ("I go up, then left.", 0),  # the last name counts
        ("left in step 2", 0),  # a name before a number
        ("3", None),
        ("2", 2),
        ("action 1.", 1),
        ("1.5", None),
        ("-1", None),
        ("upwards", None),
        ("pick up", 2),  # the longer name
        ("", None),
    ],
)
def test_an_action_is_read_from_a_text_by_name_or_number(text, place):
    assert read_choice(text, ["left", "up", "pick up"]) == place


def test_numbers_count_from_the_first():
    assert read_choice("5", ["a", "b"], first=4) == 1
    assert read_choice("1", ["a", "b"], first=4) is None


def test_the_frozen_lake_is_walked_by_name_number_and_free_text(gymnasium):
    env, opening = started("gymnasium:FrozenLake-v1", **LAKE)
    # the map 4x4 of the package: SFFF FHFH FFFH HFFG; the player's cell is drawn in red
    assert opening == f"[red S]FFF\nFHFH\nFFFH\nHFFG\n{MOVES}"
    assert env.state_id(opening) == 0
    first = env.step("I walk <action>down</action>")
    assert (first.observation, first.reward) == (f"  (Down)\nSFFF\n[red F]HFH\nFFFH\nHFFG\n{MOVES}", 0.0)
    assert env.state_id(first.observation) == 4
    results = [env.step(action) for action in ("1", "let me go right", "DOWN", "2", "<action>right</action>")]
    # down to 8, right to 9, down to 13, right to 14 and 15, the goal
    assert [result.reward for result in results] == [0, 0, 0, 0, 1]
    assert [result.terminated for result in results] == [False] * 4 + [True]


def test_an_unread_action_changes_nothing_and_costs_the_penalty(gymnasium):
    env, opening = started("gymnasium:FrozenLake-v1", invalid_penalty=0.25, **LAKE)
    result = env.step("fly")
    assert (result.observation, result.reward, result.terminated) == (opening, -0.25, False)
    assert result.info == {"invalid_action": True}
    assert env.state_id(result.observation) == 0


def test_a_state_seen_again_has_the_same_id_whatever_was_done_before(gymnasium):
    env, opening = started("gymnasium:FrozenLake-v1", **LAKE)
    before = env.state_id(opening)
    env.step("right")
    again = env.step("left")
    assert again.observation != opening  # it says "(Left)"
    assert env.state_id(again.observation) == before


def test_start_and_chance_follow_from_task_and_seed(gymnasium):
    def played(seed, task=0):
        env, opening = started("gymnasium:Blackjack-v1", task=task, seed=seed)
        return opening, env.step("hit").observation

    assert played(0) == played(0)
    openings, hits = zip(*(played(seed) for seed in range(8)), strict=True)
    assert len(set(openings)) == 1
    assert len(set(hits)) > 1
    assert len({played(0, task)[0] for task in range(8)}) > 1


def test_coloured_drawings_keep_what_their_colours_say(gymnasium):
    newest = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))
    env, opening = started(f"gymnasium:{newest}")
    assert "\x1b" not in opening
    assert opening.count("[yellow ") == 1  # the taxi
    assert opening.count("[magenta ") == 1  # where the passenger wants to go
    assert opening.endswith(", ".join(ACTIONS["Taxi"]))
    assert env.step("<action>south</action>").reward == -1


def test_values_are_told_where_nothing_is_drawn(gymnasium):
    env, opening = started("gymnasium:CartPole-v1")
    values = opening.splitlines()[0].strip("()").split(", ")
    assert len([float(value) for value in values]) == 4
    assert opening.endswith("<action>NAME</action>: left, right")
    assert len(env.state_id(opening)) == 4
    assert env.step("left").reward == 1


def test_actions_may_be_given_names_of_your_own(gymnasium):
    env, opening = started("gymnasium:Blackjack-v1", actions=["stay", "more"])
    assert opening.endswith("<action>NAME</action>: stay, more")
    assert env.step("stay").terminated


def test_an_environment_that_speaks_text_is_spoken_to_in_text(gymnasium):
    class Echo(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "say something", {}

        def step(self, action):
            return f"you said {action}", 1.0, False, action == "bye", {}

    gymnasium.register("MlxrlEcho-v0", Echo)
    try:
        env, opening = started("gymnasium:MlxrlEcho-v0")
        assert opening == "say something\n<action>TEXT</action>"
        assert env.step(" hello ").observation == "you said hello\n<action>TEXT</action>"
        last = env.step("well: <action>bye</action>")
        assert (last.reward, last.terminated, last.truncated) == (1.0, False, True)
        assert env.step("").info == {"invalid_action": True}
    finally:
        del gymnasium.registry["MlxrlEcho-v0"]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Nothing-v1", {}, "environment 'gymnasium:Nothing-v1' cannot be had: NameNotFound: .*Nothing"),
        ("FrozenLake-v1", {"slipery": False}, "cannot be had: TypeError: .*slipery"),
        ("FrozenLake-v1", {"actions": ["up"]}, "actions must name all 4 actions, got 1: up"),
        ("FrozenLake-v1", {"actions": "left"}, "actions must name all 4 actions, got 1: left"),
        ("FrozenLake-v1", {"actions": [1, 2, 3, 4]}, r"actions\[0\] must be text, and not empty, got 1"),
        ("FrozenLake-v1", {"max_turns": 0}, "max_turns must be a whole number of at least 1, got 0"),
        ("FrozenLake-v1", {"invalid_penalty": -1}, "invalid_penalty must be a finite number"),
        ("Pendulum-v1", {}, "actions must be discrete or texts to be given as text, but the action space is Box"),
    ],
)
def test_what_cannot_be_played_is_refused(gymnasium, name, options, words):
    with pytest.raises(ValueError, match=words):
        make_env(f"gymnasium:{name}", **options)


def test_a_description_tells_the_options_beside_the_environments_own():
    assert describe_env("gymnasium:FrozenLake-v1").defaults == {
        "seed": 0,
        "size": 200,
        "eval_size": 50,
        "max_turns": 20,
        "invalid_penalty": 0.0,
        "actions": (),
    }
