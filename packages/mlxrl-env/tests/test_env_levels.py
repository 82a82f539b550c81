"""What holds for every game with levels, and for wordle: starts, states, ends, nonsense, suites."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.env import (
    AlphabetSortEnv,
    Environment,
    FrozenLakeEnv,
    SokobanEnv,
    Task,
    ToolMathEnv,
    WordleEnv,
    as_messages,
    as_step_result,
    make_env,
)

GAMES = (AlphabetSortEnv, FrozenLakeEnv, SokobanEnv, ToolMathEnv, WordleEnv)
LEVEL_GAMES = (AlphabetSortEnv, FrozenLakeEnv, SokobanEnv, ToolMathEnv)
SUITES = ("alphabet-sort", "frozen-lake", "sokoban", "tool-math", "wordle")
NONSENSE = (
    "",
    "nonsense",
    "<action></action>",
    "<action> , ; </action>",
    "<action>" * 20_000,
    "<tool>" * 20_000,
    '{"name":' * 20_000,
    "<tool>__import__('os')</tool>",
    "<answer>none</answer>",
    "\N{PILE OF POO}\x00",
)
ACTIONS = (
    *(f"<action>{name}</action>" for name in ("up", "down", "left", "right", "Ada, Max", "crane", "stone")),
    "<tool>12 * 3</tool>",
    "<tool>7 + 4</tool>",
    *NONSENSE[:4],
)


@pytest.mark.parametrize("game", GAMES)
@given(data=st.data())
@settings(max_examples=40)
def test_any_play_keeps_the_rules(game, data):
    env = game("a task", data.draw(st.integers(0, 50)), invalid_penalty=0.25)
    observation = env.reset()
    over, turn = False, 0
    while not over:
        before = env.state_id(observation)
        assert before == env.state_id(observation)
        result = env.step(data.draw(st.sampled_from(ACTIONS)))
        turn += 1
        if result.info["invalid_action"]:
            assert result.reward == -0.25
            assert env.state_id(result.observation) == before  # an invalid action stays where it is
        else:
            assert 0.0 <= result.reward <= 1.0
        assert result.truncated == (turn == env.max_turns and not result.terminated)
        observation = result.observation
        over = result.terminated or result.truncated
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("more")


@pytest.mark.parametrize("text", NONSENSE, ids=lambda text: repr(text)[:20])
@pytest.mark.parametrize("game", GAMES)
def test_nonsense_is_an_invalid_action_and_no_more(game, text):
    env = game("a task", 3)
    before = env.state_id(env.reset())
    for turn in range(env.max_turns):
        result = env.step(text)
        assert (result.reward, result.info, result.terminated) == (0.0, {"invalid_action": True}, False)
        assert env.state_id(result.observation) == before
        assert result.truncated == (turn == env.max_turns - 1)


@pytest.mark.parametrize("name", SUITES)
def test_members_of_a_group_start_alike_and_share_nothing(name):
    suite = make_env(name)
    task = suite.tasks("train")[0]
    first, second, fresh = (suite.make(task, 5, member) for member in (0, 1, 2))
    assert first.reset() == second.reset() == task.prompt
    for action in ACTIONS:
        first.reset()
        first.step(action)
    # what the first did is not seen by the second: it answers as one that never had company
    fresh.reset()
    for action in ACTIONS:
        result = as_step_result(second.step(action))
        assert result == fresh.step(action)
        if result.terminated or result.truncated:
            break


@pytest.mark.parametrize("game", GAMES)
def test_the_same_task_and_seed_start_alike_and_others_otherwise(game):
    assert game("a", 1).start == game("a", 1).start == game(Task("", {}, "a"), 1).start
    openings = {game("a", seed).reset() for seed in range(20)}
    assert len(openings) > 10 or game is WordleEnv  # whose opening hides its secret
    assert len({game("a", seed).start for seed in range(20)}) > 10
    assert len({game(f"task {number}").start for number in range(20)}) > 10


@pytest.mark.parametrize("game", GAMES)
def test_reset_gives_the_same_start_again_after_any_play(game):
    env = game("a", 4)
    opening = env.reset()
    for action in ACTIONS:
        assert env.reset() == opening
        env.step(action)
        if env.max_turns > 1:
            assert env.reset() == opening


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_holds_distinct_tasks_that_start_as_their_prompts_say(name):
    suite = make_env(name)
    assert (suite.name, suite.rewards) == (name, ())
    splits = [suite.tasks(split) for split in ("train", "eval")]
    starts = [task.columns["start"] for split in splits for task in split]
    assert len(set(starts)) == len(starts)
    assert len({task.id for split in splits for task in split}) == len(starts)
    for split in splits:
        assert split
        for task in split[:20]:
            env = suite.make(task, seed=7, group_index=2)
            assert isinstance(env, Environment)
            assert env.reset() == task.prompt
            assert len(as_messages(task.prompt)[0]["content"]) <= 160


@pytest.mark.parametrize("name", ["alphabet-sort", "frozen-lake", "sokoban", "tool-math"])
def test_openings_differ_within_and_between_the_splits(name):
    suite = make_env(name, size=100, eval_size=30)
    assert [len(suite.tasks(split)) for split in ("train", "eval")] == [100, 30]
    assert len({task.prompt for split in ("train", "eval") for task in suite.tasks(split)}) == 130


@pytest.mark.parametrize("name", ["alphabet-sort", "frozen-lake", "sokoban", "tool-math"])
def test_the_seed_draws_the_levels_and_more_training_leaves_the_evaluation_as_it_is(name):
    small, large, other = make_env(name, size=5), make_env(name, size=9), make_env(name, size=5, seed=1)
    assert small.tasks("eval") == large.tasks("eval")
    assert small.tasks("train") == large.tasks("train")[:5]
    assert not {task.prompt for task in small.tasks("train")} & {task.prompt for task in other.tasks("train")}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: FrozenLakeEnv(side=2), "side must be a whole number of at least 3, got 2"),
        (lambda: make_env("frozen-lake", slippery=1), "slippery must be True or False, got 1"),
        (lambda: FrozenLakeEnv(max_turns=5), "max_turns must be a whole number of at least 6, got 5"),
        (lambda: FrozenLakeEnv(side=6, max_turns=9), "max_turns must be a whole number of at least 10, got 9"),
        (lambda: SokobanEnv(side=4), "side must be a whole number of at least 5, got 4"),
        (lambda: SokobanEnv(boxes=3), "boxes must be 1 or 2, got 3"),
        (lambda: SokobanEnv(boxes=True), "boxes must be a whole number of at least 1, got True"),
        (lambda: SokobanEnv(max_turns=9), "max_turns must be a whole number of at least 10, got 9"),
        (lambda: AlphabetSortEnv(names=1), "names must be a whole number of at least 2, got 1"),
        (lambda: AlphabetSortEnv(max_turns=40), r"names \* max_turns must be 77 at most, got 3 \* 40"),
        (lambda: WordleEnv(Task("", {"start": (9999,)}, "a")), r"column 'start' of task 'a' must be one of .*9999"),
        (
            lambda: make_env("frozen-lake", side=3, size=2000),
            r"size \+ eval_size must not exceed .* got 2050 but found",
        ),
        *(
            (partial(make_env, name, size=10**6, eval_size=1), r"size \+ eval_size must be 100000 at most, got 1000001")
            for name in ("alphabet-sort", "frozen-lake", "sokoban", "tool-math")  # at once, before a level is made
        ),
        (lambda: make_env("sokoban", size=0), "size must be a whole number of at least 1, got 0"),
        (lambda: make_env("tool-math", eval_size=-1), "eval_size must be a whole number of at least 0, got -1"),
        (lambda: make_env("tool-math", seed=0.5), "seed must be a whole number of at least 0, got 0.5"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize("game", LEVEL_GAMES)
@pytest.mark.parametrize(("start", "words"), [((1, 2), "one number"), ((-1,), "at least 0"), (("a",), "at least 0")])
def test_a_start_that_is_no_level_is_refused(game, start, words):
    with pytest.raises(ValueError, match=f"column 'start' of task 'a' must be .*{words}"):
        game(Task("", {"start": start}, "a"))
