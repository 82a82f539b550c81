"""Libraries whose environments speak text, reasoning-gym, GEM and TextArena, on the real packages."""

import importlib.util
import logging
import random
import subprocess
import sys
from typing import Any

import pytest

from mlxrl.env import Environment, SyncEnv, make_env


@pytest.fixture
def reasoning_gym():
    return pytest.importorskip("reasoning_gym", reason='needs pip install "mlxrl-env[reasoning-gym]"')


@pytest.fixture
def gem():
    if importlib.util.find_spec("gem") is None:  # which sets up the process's logging when it is imported
        pytest.skip('needs pip install "mlxrl-env[gem]"')


@pytest.fixture
def textarena():
    return pytest.importorskip("textarena", reason='needs pip install "mlxrl-env[textarena]"')


def started(name, *, task=0, seed=0, **options) -> tuple[Any, Any]:
    suite = make_env(name, size=10, eval_size=2, **options)
    env = suite.make(suite.tasks("train")[task], seed, 0)
    assert isinstance(env, Environment)
    played = SyncEnv(env)
    return played, played.reset()


def test_a_question_of_reasoning_gym_is_scored_by_its_own_scorer(reasoning_gym):
    suite = make_env("reasoning-gym:chain_sum", size=4, eval_size=2, min_terms=2, max_terms=2, max_digits=1)
    task = suite.tasks("train")[0]
    answer = str(task.columns["answer"])
    assert str(task.prompt).endswith("\nGive the final answer as <answer>...</answer>.")
    # the task's scorer gives 1 for the answer, and where it is part of what was said its share of the characters
    for said, reward in (
        (f"<answer>1000</answer> no, <answer> {answer} </answer>", 1.0),
        (answer, 1.0),
        (f"{answer} it is", len(answer) / len(f"{answer} it is")),
        ("<answer>-12345</answer>", 0.0),
    ):
        env = SyncEnv(suite.make(task, 0, 0))
        assert (env.max_turns, env.reset()) == (1, task.prompt)
        assert env.state_id(task.prompt) == task.prompt
        result = env.step(said)
        assert (result.terminated, result.reward) == (True, pytest.approx(reward))


def test_an_answer_that_the_scorer_trips_over_earns_nothing(reasoning_gym):
    suite = make_env("reasoning-gym:prime_factorization", size=1)
    result = SyncEnv(suite.make(suite.tasks("train")[0], 0, 0)).step("two times three")
    assert (result.reward, result.terminated, result.info["invalid_action"]) == (0.0, True, True)
    assert "ValueError" in str(result.info["scorer"])


def test_questions_follow_from_the_seed_and_those_evaluated_on_are_not_trained_on(reasoning_gym):
    def prompts(split, **options):
        return [task.prompt for task in make_env("reasoning-gym:letter_counting", **options).tasks(split)]

    small = {"size": 5, "eval_size": 3}
    assert prompts("train", seed=1, **small) == prompts("train", seed=1, **small) != prompts("train", seed=2, **small)
    assert prompts("eval", seed=1, size=9, eval_size=3) == prompts("eval", seed=1, **small)
    assert not set(prompts("train", seed=1, **small)) & set(prompts("eval", seed=1, **small))
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    suite = make_env("reasoning-gym:chain_sum", size=400, eval_size=100, **few)  # 200 sums there are
    train, held_out = ({task.prompt for task in suite.tasks(split)} for split in ("train", "eval"))
    assert 0 < len(suite.tasks("train")) < 400
    assert not train & held_out


def test_the_instruction_may_be_your_own_or_none(reasoning_gym):
    plain = make_env("reasoning-gym:letter_counting", size=1, instruction="").tasks("train")[0].prompt
    told = make_env("reasoning-gym:letter_counting", size=1, instruction="Be brief.").tasks("train")[0].prompt
    assert told == f"{plain}\nBe brief."


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("leter_counting", {}, "unknown task of reasoning-gym 'leter_counting'; did you mean 'letter_counting'"),
        ("letter_counting", {"min_word": 3}, "unknown option of environment .*'min_word'; did you mean 'min_words'"),
        ("letter_counting", {"min_words": 0}, "environment 'reasoning-gym:letter_counting': min_words must be"),
        ("letter_counting", {"size": 0}, "size must be a whole number of at least 1, got 0"),
    ],
)
def test_what_reasoning_gym_does_not_have_is_refused(reasoning_gym, task, options, words):
    with pytest.raises(ValueError, match=words):
        make_env(f"reasoning-gym:{task}", **options)


def test_a_game_of_gem_is_won_by_halving(gem):
    env, opening = started("gem:game:GuessTheNumber-v0-easy")
    assert env.max_turns == 4  # of the game's registration: 1 to 10 in 4 turns
    assert opening.endswith("Enter your next guess.")
    low, high, rewards, result = 1, 10, [], None
    while result is None or not result.terminated:
        guess = (low + high) // 2
        result = env.step(f"I halve: \\boxed{{{guess}}}")
        rewards.append(result.reward)
        low, high = (guess + 1, high) if "higher" in result.observation else (low, guess - 1)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert "Congratulations" in result.observation


def test_a_state_of_gem_does_not_count_turns(gem):
    env, _ = started("gem:game:GuessTheNumber-v0-hard")
    before = env.step("\\boxed{99}").observation
    after = env.step("\\boxed{99}").observation
    assert ("turn 1," in before, "turn 2," in after) == (True, True)
    assert env.state_id(before) == env.state_id(after)
    assert env.state_id(env.step("\\boxed{98}").observation) != env.state_id(after)


def test_a_turn_limit_may_be_given_to_a_game_of_gem(gem):
    env, _ = started("gem:game:Sokoban-v0-easy", max_turns=2)
    assert env.max_turns == 2
    assert [env.step("\\boxed{up}").truncated for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("game:Wordl-v0-easy", {}, "unknown environment of GEM 'game:Wordl-v0-easy'; did you mean 'game:Wordle-v0"),
        ("game:Sokoban-v0-easy", {"max_turns": 0}, "max_turns must be a whole number of at least 1, got 0"),
        ("game:Sokoban-v0-easy", {"dim_room": 3}, "'gem:game:Sokoban-v0-easy' cannot be had: TypeError: "),
    ],
)
def test_what_gem_does_not_have_is_refused(gem, name, options, words):
    with pytest.raises(ValueError, match=words):
        make_env(f"gem:{name}", **options)


def test_loading_gem_leaves_the_logging_of_the_process_alone(gem):
    code = (
        "import logging, mlxrl.env; mlxrl.env.make_env('gem:game:Sokoban-v0-easy', size=1); "
        "print(logging.getLogger().handlers, logging.getLogger().level)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["[]", str(logging.WARNING)]  # as Python starts


def test_a_game_of_textarena_is_won_by_halving(textarena):
    env, opening = started("textarena:GuessTheNumber-v0")
    assert env.max_turns == 10  # of the game's registration: 1 to 20 in 10 turns
    assert "between 1 and 20" in opening
    low, high, rewards, result = 1, 20, [], None
    while result is None or not result.terminated:
        guess = (low + high) // 2
        result = env.step(str(guess))  # the game wants brackets, which its own wrapper puts
        assert "between 1 and 20" not in result.observation  # what it said before is not said again
        rewards.append(result.reward)
        low, high = (guess + 1, high) if "higher" in result.observation else (low, guess - 1)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert "Congratulations" in result.observation


def test_an_invalid_move_is_marked_and_the_second_in_a_row_ends_the_game(textarena):
    env, _ = started("textarena:GuessTheNumber-v0")
    assert env.step("5").info == {"invalid_action": False}
    first, second = env.step("five"), env.step("six")
    assert (first.info, first.terminated) == ({"invalid_action": True}, False)
    assert (second.info, second.terminated) == ({"invalid_action": True}, True)


def test_a_state_is_the_board_or_else_all_that_was_said(textarena):
    env, opening = started("textarena:FrozenLake-v0")
    start = env.state_id(opening)
    assert str(start) in opening
    way, back = ("right", "left") if "|  P  |  H  |" not in opening else ("down", "up")
    assert env.state_id(env.step(way).observation) != start
    assert env.state_id(env.step(back).observation) == start
    env, opening = started("textarena:GuessTheNumber-v0")
    start = env.state_id(opening)
    after = env.state_id(env.step("5").observation)
    assert (start[0], len(start), after[:1], after[1]) == (opening, 1, start, "[5]")


@pytest.mark.parametrize("name", ["textarena:FrozenLake-v0", "textarena:2048-v0-mega-easy", "gem:game:2048-v0-easy"])
def test_start_and_chance_follow_from_task_and_seed_alone(request, name):
    name = name.replace("2048", "Game2048") if name.startswith("gem") else name
    request.getfixturevalue(name.partition(":")[0])
    action = "\\boxed{down}" if name.startswith("gem") else "down"

    def played(task, seed):
        env, opening = started(name, task=task, seed=seed)
        random.random()  # others draw in between
        return opening, env.step(action).observation

    random.seed(1)
    first = played(0, 0)
    random.seed(2)
    assert played(0, 0) == first
    assert played(0, 1)[0] == first[0]
    assert len({played(task, 0)[0] for task in range(4)}) > 1
    if "2048" in name:  # where a new tile comes after each move
        assert len({played(0, seed)[1] for seed in range(6)}) > 1


def test_the_games_for_one_player_that_need_no_word_lists_start_and_take_a_turn(textarena):
    for name in ("Mastermind-v0", "TowerOfHanoi-v0", "Minesweeper-v0", "LightsOut-v0", "PegJump-v0", "Countdown-v0"):
        env, opening = started(f"textarena:{name}")
        assert len(opening) > 40
        assert env.max_turns >= 1
        assert env.step("[1]").observation


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mastermnd-v0", "unknown game of TextArena 'Mastermnd-v0'; did you mean 'Mastermind-v0'"),
        ("TicTacToe-v0", "'textarena:TicTacToe-v0' cannot be had: AssertionError: The number of players has to be 2"),
    ],
)
def test_what_textarena_cannot_give_one_player_is_refused(textarena, name, words):
    with pytest.raises(ValueError, match=words) as refused:
        make_env(f"textarena:{name}")
    assert "-raw" not in str(refused.value)


def test_a_turn_limit_may_be_given_to_a_game_of_textarena(textarena):
    assert started("textarena:2048-v0")[0].max_turns == 20  # it has none of its own
    assert started("textarena:2048-v0", max_turns=3)[0].max_turns == 3
    with pytest.raises(ValueError, match="max_turns must be a whole number of at least 1, got 0"):
        make_env("textarena:2048-v0", max_turns=0)
