"""`envs`: the list, an episode at random, and one by hand."""

import io
import os
import pty
import random
import re
import select
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest

from mlxrl.cli import main
from mlxrl.cli.envs import random_player
from mlxrl.env import env_names
from mlxrl.env.adapters import LIBRARIES

PROGRAM = "import sys; sys.argv[0] = 'mlxrl-cli'; from mlxrl.cli import main; main()"
OWN = '''
import asyncio

class Doors:
    """Says yes or no."""

    max_turns = 3

    async def reset(self):
        self.asked = asyncio.Queue()
        return [{"role": "system", "content": "Doors."}, {"role": "user", "content": "Left or right?"}], {}

    async def step(self, action):
        await self.asked.put(action)
        if action == "break":
            raise KeyError("boom")
        return f"{self.asked.qsize()} so far", 0.5, False, False, {}

    async def state_id(self, observation):
        return "always the same"

def doors(task, seed, group_index):
    """Two doors, and a choice."""
    return Doors()

def nothing(task, seed, group_index):
    return 3
'''


def envs(*arguments, folder, said="", expect=0):
    """What the command printed, on standard error where it should fail, when `said` is piped in."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "160")
        patch.setattr(sys, "argv", ["mlxrl-cli", "envs", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(said))
        with pytest.raises(SystemExit) as stopped:
            main()
    assert (stopped.value.code or 0) == expect, f"{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue() if expect == 0 else err.getvalue()


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_the_list_names_every_environment_with_turns_reward_and_options(tmp_path):
    output, _, libraries = envs(folder=tmp_path).partition("of another library")
    assert [line.split()[0] for line in output.splitlines() if re.match(r"[a-z]+(-[a-z]+)* .", line)][1:] == list(
        env_names()
    )
    assert re.findall(r"^([a-z-]+):NAME ", libraries, re.MULTILINE) == list(LIBRARIES)
    assert re.search(r"^frozen-lake +10 +its own +Walk over the ice to the goal", output, re.MULTILINE)
    assert re.search(r"^arithmetic +1 +answer_tag +Asks ", output, re.MULTILINE)
    assert re.search(r"^dataset +- +- +Plain prompts", output, re.MULTILINE)
    assert "side=4, slippery=false" in output
    assert "path (required), format, " in output


def test_a_library_that_is_not_installed_is_listed_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)  # Python's mark for what cannot be imported
    line = r'^textarena:NAME +not installed: pip install "mlxrl-env\[textarena\]" *$'
    assert re.search(line, envs(folder=tmp_path), re.MULTILINE)
    assert 'pip install "mlxrl-env[textarena]"' in envs("textarena", folder=tmp_path, expect=2)


def test_the_environments_of_a_library_that_is_installed_are_counted_listed_and_played(tmp_path):
    pytest.importorskip("gymnasium", reason='needs pip install "mlxrl-env[gymnasium]"')
    names = envs("gymnasium", folder=tmp_path).split()
    assert "gymnasium:FrozenLake-v1" in names
    counted = re.search(r"^gymnasium:NAME +(\d+), such as (.*?) *$", envs(folder=tmp_path), re.MULTILINE)
    assert counted is not None
    assert int(counted[1]) == len(names)
    assert {f"gymnasium:{name}" for name in counted[2].split(", ")} < {*names}
    assert envs("gymnasium:FrozenLake-v1", "--random", folder=tmp_path).startswith("gymnasium:FrozenLake-v1, task")


def test_a_library_that_lists_no_environments_says_so(tmp_path):
    pytest.importorskip("verifiers", reason='needs pip install "mlxrl-env[verifiers]"')
    assert "name one as verifiers:NAME" in envs("verifiers", folder=tmp_path, expect=2)


@pytest.mark.parametrize("name", sorted(set(env_names()) - {"dataset", "jsonl"}))
def test_an_episode_at_random_ends_and_the_seed_decides_it(name, tmp_path):
    first, again, other = (envs(name, "--random", "--seed", seed, folder=tmp_path) for seed in (1, 1, 2))
    assert first == again
    assert first.splitlines()[1:] != other.splitlines()[1:]
    assert re.search(r"^over after \d+ turns?, .*; return [-0-9.e]+$", first, re.MULTILINE)


def test_an_episode_by_hand_shows_states_rewards_and_what_was_invalid(tmp_path):
    output = envs("key-door", "--task", "train-0", folder=tmp_path, said="go left\n<action>left</action>\n")
    # the task starts as the list of tasks says; a sentence is no action, and leaves the state as it was
    assert output.splitlines()[0] == "key-door, task train-0, seed 0, at most 10 turns"
    first, second = re.findall(r"^Room .*\n(turn .*)\n(> .*)\n(reward .*)$", output, re.MULTILINE)
    assert first == ("turn 1, state 1", "> go left", "reward 0, invalid action")
    assert second == ("turn 2, state 1 again", "> <action>left</action>", "reward 0")
    assert output.splitlines()[-2:] == ["turn 3, state 2", "left in turn 3; return 0"]


def test_a_plain_prompt_is_scored_by_the_rewards_of_its_suite(tmp_path):
    output = envs("arithmetic", "--task", 3, folder=tmp_path, said="<answer>0</answer>\n")
    question = re.search(r"What is ([0-9+]+)\?", output)
    assert question is not None
    assert "reward function answer_tag (weight 1): 0" in output
    right = sum(map(int, question[1].split("+")))
    output = envs("arithmetic", "--task", 3, folder=tmp_path, said=f"It is:\\n<answer>{right}</answer>\n")
    assert "It is:\n<answer>" in output
    assert output.splitlines()[-1] == "reward function answer_tag (weight 1): 1"


def test_an_async_environment_of_ones_own_is_played(own):
    output = envs("own.py:doors", "--task", "7", "--set", "tasks=9", folder=own, said="left\nright\nleft\n")
    assert output.startswith("own.py:doors, task 7, seed 0, at most 3 turns\n\n[system] Doors.\nLeft or right?\n")
    assert "2 so far\nturn 3, state 1 again\n> left\nreward 0.5" in output
    assert output.splitlines()[-1] == "over after 3 turns, no turns are left; return 1.5"


def test_options_reach_the_environment_and_it_may_be_a_dataset(tmp_path):
    assert "at most 12 turns" in envs("frozen-lake", "--set", "max_turns=12", "--set", "side=5", folder=tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Say hello.", "answer": "hello"}\n')
    output = envs("dataset", "--set", "path=tasks.jsonl", folder=tmp_path, said="hello\n")
    assert "Say hello.\nturn 1, state 1\n> hello" in output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["key-dor"], 2, "unknown environment 'key-dor'; did you mean 'key-door'?"),
        (["key-door", "--set", "sed=1"], 2, "unknown option of environment 'key-door': 'sed'; did you mean 'seed'?"),
        (["key-door", "--set", "sed"], 2, "--set takes key=value, got 'sed'"),
        (["key-door", "--set", "max_turns=0"], 2, "max_turns must be a whole number of at least 1, got 0"),
        (["key-door", "--task", "zz"], 2, "--task 'zz' is no task of 'key-door'; give a number below 48"),
        (["key-door", "--task", "48"], 2, "--task '48' is no task of 'key-door'"),
        (["dataset"], 2, "environment 'dataset' needs the option 'path'; give --set path=VALUE"),
        (["none.py:make"], 2, "none.py, which does not exist; correct the path"),
        (["own.py:dors"], 2, "unknown object of own.py: 'dors'; did you mean 'doors'?"),
        (["own.py:nothing"], 2, "environment 'own.py:nothing' made a int; an environment has max_turns, reset"),
        (["broken.py:make"], 2, "environment 'broken.py:make' raised ZeroDivisionError: division by zero ("),
        (["own.py:doors"], 1, "step of the environment raised KeyError: 'boom' ("),
    ],
)
def test_what_cannot_be_played_is_one_message(own, arguments, code, words):
    (own / "broken.py").write_text("1 / 0\n")
    message = envs(*arguments, folder=own, said="break\n", expect=code)
    assert words in message
    assert len(message.splitlines()) == 1


def test_random_actions_are_names_that_are_listed_or_forms_that_are_shown_or_words():
    draw = random_player(random.Random(0))
    listed = {draw("At hall. <action>NAME</action>: attic, den") for _ in range(50)}
    assert listed == {"<action>attic</action>", "<action>den</action>"}
    shown = {draw("Use <tool>1 + 2</tool>") for _ in range(100)}
    assert shown >= {f"<tool>{content}</tool>" for content in ("1 + 2", "Use", "1", "2")}
    assert all(re.fullmatch("<tool>(1 [+] 2|Use|1|2|[a-z]{5})</tool>", action) for action in shown)
    drawn = {draw("Two words") for _ in range(200)}
    assert drawn >= {"Two", "words", "<action>Two</action>", "<action>words</action>"}
    assert any(re.fullmatch("<action>[a-z]{5}</action>", action) for action in drawn - {"<action>words</action>"})
    assert re.fullmatch("[a-z]{5}|<action>[a-z]{5}</action>", draw(""))


def test_at_a_terminal_actions_are_typed_after_a_prompt_and_the_end_of_input_ends(tmp_path):
    leader, follower = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "envs", "guess-number", "--task", "0"],
        cwd=tmp_path, stdin=follower, stdout=follower, stderr=follower, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(follower)
    shown = ""

    def read_until(words):
        nonlocal shown
        deadline = time.monotonic() + 60
        while words not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([leader], [], [], 0.1)[0]:
                shown += os.read(leader, 4096).decode()

    try:
        read_until("turn 1, state 1\r\n> ")
        assert "Ctrl-D ends" in shown
        os.write(leader, b"<action>2</action>\n")  # the secret of the first task is 1
        read_until("Lower: 1-1\r\nturn 2, state 2\r\n> ")
        assert shown.count("<action>2</action>") == 1  # typed, and not printed again
        os.write(leader, b"\x04")
        read_until("\r\nleft in turn 2; return 0\r\n")
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
        os.close(leader)
