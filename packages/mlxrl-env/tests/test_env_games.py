"""The text games: their rules, their recurring states and their suites."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.env import Environment, GuessNumberEnv, KeyDoorEnv, RecurringStateTextEnv, Task, as_step_result, make_env

GAMES = (KeyDoorEnv, GuessNumberEnv, RecurringStateTextEnv)
SUITES = ("key-door", "guess-number", "recurring-text")
ACTIONS = {
    KeyDoorEnv: ("left", "right", "take", "open"),
    GuessNumberEnv: tuple(str(number) for number in range(1, 16)),
    RecurringStateTextEnv: ("left", "right"),
}
NUMBERS = "<action>NUMBER</action>: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15"


def say(name):
    return f"<action>{name}</action>"


def started(game, start, **options):
    if game is not RecurringStateTextEnv:
        options = {"show_actions": False, **options}
    env = game(Task("", {"start": start}, "a"), **options)
    return env, env.reset()


def turns_to_win(game, start):
    """The fewest actions that win, by trying all sequences, shortest first; a state seen before is not gone on from."""
    paths: deque[tuple[str, ...]] = deque([()])
    seen = set()
    while paths:
        path = paths.popleft()
        env, observation = started(game, start)
        for action in path:
            result = env.step(say(action))
            if result.terminated:
                return len(path)
            observation = result.observation
        if observation not in seen:
            seen.add(observation)
            paths.extend((*path, action) for action in ACTIONS[game])
    raise AssertionError(f"{game.__name__} cannot be won from {start}")


def test_the_key_is_fetched_and_the_door_opened():
    env, first = started(KeyDoorEnv, (3, 2, 4))
    assert first == "Room 3 key 2 door 4"
    seen = [env.step(say(action)) for action in ("left", "take", "right", "right", "open")]
    assert [result.observation for result in seen] == [
        "Room 2 key 2 door 4",
        "Room 2 key held door 4",
        "Room 3 key held door 4",
        "Room 4 key held door 4",
        "Solved.",
    ]
    assert [result.reward for result in seen] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [result.terminated for result in seen] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("start", "action"),
    [
        ((1, 2, 3), "left"),  # a wall
        ((4, 2, 3), "right"),  # a wall
        ((1, 2, 3), "take"),  # the key is in room 2
        ((3, 2, 3), "open"),  # at the door without the key
        ((1, 2, 3), "jump"),  # no action
    ],
)
def test_what_cannot_be_done_changes_nothing_and_costs_the_penalty(start, action):
    env, first = started(KeyDoorEnv, start, invalid_penalty=0.2)
    result = env.step(say(action))
    assert (result.observation, result.reward, result.info) == (first, -0.2, {"invalid_action": True})


def test_a_key_that_is_held_cannot_be_taken_again():
    env, _ = started(KeyDoorEnv, (1, 1, 2))
    first, second = env.step(say("take")), env.step(say("take"))
    assert (first.info["invalid_action"], second.info["invalid_action"]) == (False, True)
    assert first.observation == second.observation == "Room 1 key held door 2"


def test_hints_narrow_the_range():
    env, first = started(GuessNumberEnv, (11,))
    assert first == "Start: 1-15"
    # 8 < 11 leaves 9-15; 12 > 11 leaves 9-11; 3 is outside what is left and tells nothing new; 11 wins
    seen = [env.step(say(guess)) for guess in ("8", "12", "3", "11")]
    assert [result.observation for result in seen] == ["Higher: 9-15", "Lower: 9-11", "Higher: 9-11", "Correct."]
    assert [result.reward for result in seen] == [0.0, 0.0, 0.0, 1.0]
    assert (seen[3].terminated, seen[3].truncated) == (True, False)


@pytest.mark.parametrize("guess", ["0", "16", "-3", "eight", "8.0", "8 or 9", "", "\N{SUPERSCRIPT TWO}"])
def test_a_guess_that_is_no_number_in_the_whole_range_is_invalid(guess):
    env, _ = started(GuessNumberEnv, (11,))
    for text in (say(guess), guess):
        result = env.step(text)
        assert (result.observation, result.info) == ("Invalid: 1-15", {"invalid_action": True})


@pytest.mark.parametrize("text", ["8", " 8.", "`8`", "**8**!", "<action>8", "<action> 8. </action>"])
def test_a_bare_number_is_a_guess(text):
    env, _ = started(GuessNumberEnv, (11,))
    assert env.step(text).observation == "Higher: 9-15"


def test_the_state_of_a_guess_is_the_range_whatever_the_hint():
    env, _ = started(GuessNumberEnv, (11,))
    assert env.state_id("Higher: 9-11") == env.state_id("Lower: 9-11") == "9-11"


@pytest.mark.parametrize("start", GuessNumberEnv.starts)
def test_halving_finds_every_number_within_four_guesses(start):
    env, observation = started(GuessNumberEnv, start)
    rewards = []
    while not rewards or (rewards[-1] == 0.0 and len(rewards) < 4):
        least, greatest = map(int, str(env.state_id(observation)).split("-"))
        result = env.step(say((least + greatest) // 2))
        observation = result.observation
        rewards.append(result.reward)
    assert rewards[-1] == 1.0


def test_a_walk_shows_its_moves_and_arrives():
    env, first = started(RecurringStateTextEnv, (1, 3))
    assert first == "<action>NAME</action>: left, right\nRoom 1 goal 3"
    middle, last = env.step(say("right")), env.step(say("right"))
    assert middle.observation == "<action>NAME</action>: left, right\nRoom 2 goal 3"
    assert (middle.reward, middle.terminated) == (0.0, False)
    assert (last.observation, last.reward, last.terminated) == ("Arrived.", 1.0, True)


@pytest.mark.parametrize(("start", "action"), [((1, 3), "left"), ((4, 2), "right"), ((2, 4), "up")])
def test_a_walk_into_a_wall_or_nowhere_stays_where_it_is(start, action):
    env, first = started(RecurringStateTextEnv, start, invalid_penalty=0.2)
    result = env.step(say(action))
    assert (result.observation, result.reward, result.info) == (first, -0.2, {"invalid_action": True})


def test_going_back_brings_the_same_state_again_in_another_turn():
    env, first = started(RecurringStateTextEnv, (2, 4))
    env.step(say("left"))
    back = env.step(say("right"))
    assert env.state_id(back.observation) == env.state_id(first)


def test_a_game_can_be_won_within_its_turns_from_every_start():
    # a walk: to the next room, or from one end to the other
    walks = [turns_to_win(RecurringStateTextEnv, start) for start in RecurringStateTextEnv.starts]
    assert (len(walks), min(walks), max(walks)) == (12, 1, 3)
    # the nearest key: all in one room, take and open; the farthest: 3 to the key, take, 3 to the door, open
    needed = [turns_to_win(KeyDoorEnv, start) for start in KeyDoorEnv.starts]
    assert (min(needed), max(needed)) == (2, 8)


@pytest.mark.parametrize("game", GAMES)
def test_every_observation_is_short(game):
    for start in game.starts:
        env, observation = started(game, start)
        assert len(observation) <= 60
        for action in (*ACTIONS[game], "nonsense"):
            env.reset()
            assert len(env.step(say(action)).observation) <= 60


@pytest.mark.parametrize(
    "text",
    [
        "<action>right</action>",
        "  <action> right\n</action>\n",
        "<ACTION>Right</Action>",
        "I will go. <action>right</action>.",
        "<think>not <action>left</action></think><action>right</action>",
        "<action>'Right'.</action>",
        "<action>**right**!</action>",
        "<action>`right`</action>",
        "I will go. <action>right",  # cut off, or stopped there
        "<action>left</action> or <action>right. ",
        "right",
        ' **"Right"**.\n',
    ],
)
def test_an_action_is_read_from_its_last_tag_or_a_text_that_is_nothing_else(text):
    env, _ = started(KeyDoorEnv, (2, 1, 1))
    assert env.step(text).observation == "Room 3 key 1 door 1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "go right",
        "right right",
        "right, then take",
        ".right",
        "r i g h t",
        "<action>right\nThat is my move.",
        "<action>go right</action>",
        "right <action>jump</action>",
        "<action></action>",
        "<action><b>right</b></action>",
        "<act>right</act>",
        "<action>" + " " * 50_000,
        "<action>" * 50_000,
    ],
)
def test_everything_else_is_an_invalid_action(text):
    env, first = started(KeyDoorEnv, (2, 1, 1))
    result = env.step(text)
    assert (result.observation, result.info) == (first, {"invalid_action": True})


@pytest.mark.parametrize("game", GAMES)
@given(data=st.data())
def test_any_play_keeps_the_rules_of_every_game(game, data):
    start = data.draw(st.sampled_from(game.starts))
    env, observation = started(game, start, invalid_penalty=0.25)
    turn = 0
    ended = False
    while not ended:
        before = env.state_id(observation)
        assert before == env.state_id(observation)
        hash(before)
        result = env.step(data.draw(st.sampled_from([*map(say, ACTIONS[game]), "nonsense"])))
        turn += 1
        if result.info["invalid_action"]:
            assert result.reward == -0.25
            assert env.state_id(result.observation) == before  # an invalid action stays where it is
        else:
            assert result.reward == float(result.terminated)
        assert result.truncated == (turn == env.max_turns and not result.terminated)
        observation = result.observation
        ended = result.terminated or result.truncated
    assert turn <= env.max_turns
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("more")
    assert env.reset() == started(game, start)[1]  # the same start again


@pytest.mark.parametrize("game", GAMES)
@given(task=st.text(), seed=st.integers(0, 2**40))
def test_the_same_task_and_seed_start_alike(game, task, seed):
    assert game(task, seed).start == game(task, seed).start == game(Task("", {}, task), seed).start


@pytest.mark.parametrize("game", GAMES)
def test_seeds_and_tasks_reach_every_start(game):
    # 64 starts at most; the chance that 1,500 draws miss a given one is (63/64)^1500, less than 1e-10
    assert {game("a", seed).start for seed in range(1500)} == set(game.starts)
    assert {game(str(task)).start for task in range(1500)} == set(game.starts)


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_starts_each_task_as_its_prompt_says_whatever_the_seed(name):
    suite = make_env(name)
    assert suite.rewards == ()
    for split in ("train", "eval"):
        for task in suite.tasks(split):
            env = suite.make(task, seed=7, group_index=2)
            assert isinstance(env, Environment)
            assert env.reset() == task.prompt
            assert str(task.prompt).startswith("<action>")  # a model is told how to act


@pytest.mark.parametrize(
    ("game", "start", "first", "action", "second"),
    [
        (
            KeyDoorEnv,
            (3, 3, 4),
            "<action>NAME</action>: left, right, take, open\nRoom 3 key 3 door 4",
            "take",
            "<action>NAME</action>: left, right, take, open\nRoom 3 key held door 4",
        ),
        (
            GuessNumberEnv,
            (11,),
            f"{NUMBERS}\nStart: 1-15",
            "8",
            f"{NUMBERS}\nHigher: 9-15",
        ),
    ],
)
def test_every_observation_tells_the_form_and_the_actions_unless_told_otherwise(game, start, first, action, second):
    env = game(Task("", {"start": start}, "a"))
    assert env.reset() == first
    assert env.step(say(action)).observation == second
    bare, opening = started(game, start, show_actions=False)
    assert opening == first.splitlines()[1]
    assert bare.step(say(action)).observation == second.splitlines()[1]
    assert bare.state_id(opening) == env.state_id(first).splitlines()[-1]


@pytest.mark.parametrize(("name", "train", "held_out"), [("key-door", 48, 16), ("recurring-text", 9, 3)])
def test_a_quarter_of_the_starts_is_held_out_by_the_seed(name, train, held_out):
    splits = [[task.columns["start"] for task in make_env(name).tasks(split)] for split in ("train", "eval")]
    assert [len(set(split)) for split in splits] == [train, held_out]
    assert not set(splits[0]) & set(splits[1])
    assert make_env(name, seed=0).tasks("eval") == make_env(name).tasks("eval")
    assert make_env(name, seed=1).tasks("eval") != make_env(name).tasks("eval")


def test_secrets_are_hidden_so_both_splits_hold_each_once_under_other_ids():
    suite = make_env("guess-number")
    train, held_out = suite.tasks("train"), suite.tasks("eval")
    assert [task.columns["start"] for task in train] == [(n,) for n in range(1, 16)]
    assert [task.columns for task in train] == [task.columns for task in held_out]
    assert not {task.id for task in train} & {task.id for task in held_out}


def test_options_reach_the_environment():
    suite = make_env("key-door", max_turns=3, invalid_penalty=0.5)
    env = suite.make(suite.tasks("train")[0], 0, 0)
    env.reset()
    results = [as_step_result(env.step("nonsense")) for _ in range(3)]
    assert [result.reward for result in results] == [-0.5, -0.5, -0.5]
    assert [result.truncated for result in results] == [False, False, True]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: KeyDoorEnv(max_turns=0), "max_turns must be a whole number of at least 1, got 0"),
        (lambda: RecurringStateTextEnv("a", max_turns=0), "max_turns must be a whole number of at least 1, got 0"),
        (
            lambda: RecurringStateTextEnv(Task("", {"start": (2, 2)}, "a")),
            r"column 'start' of task 'a' .* got \(2, 2\)",
        ),
        (lambda: GuessNumberEnv(invalid_penalty=-1), "invalid_penalty must be a finite number of at least 0, got -1"),
        (lambda: KeyDoorEnv(invalid_penalty=float("inf")), "invalid_penalty must be a finite number"),
        (lambda: GuessNumberEnv(Task("", {"start": (16,)}, "a")), r"column 'start' of task 'a' .* got \(16,\)"),
        (lambda: make_env("key-door", seed=-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: make_env("key-door", max_turns=0), "max_turns must be a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_an_episode_must_be_started():
    with pytest.raises(RuntimeError, match="call reset"):
        KeyDoorEnv().step(say("left"))
