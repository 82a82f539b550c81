"""Environments of verifiers, on the real package: an environment of one turn, one of several, and those that fail."""

import asyncio
import signal
import threading
from typing import Any

import pytest

from mlxrl.env import Environment, StepResult, SyncEnv, make_env

PLAYED: list[SyncEnv] = []  # of the present test; closed after it, as rollouts do

OWN = """
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(6)])


def right(completion, answer):
    return float(any(answer in message["content"] for message in completion if message["role"] == "assistant"))


def brief(completion):
    return 0.5


RUBRIC = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.2])


class Doubts(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        last = messages[-1]["content"]
        if last == "break":
            raise vf.ToolError("broken")
        reply = [vf.UserMessage(content=f"Sure? You said {last}.")]
        if last == "final":
            reply = state["final_env_response"] = [vf.UserMessage(content="Enough.")]
        return reply

    @vf.stop
    async def sure(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "yes"


class Rewrites(Doubts):
    async def get_prompt_messages(self, state):
        return [vf.UserMessage(content=f"Turn {len(state['trajectory'])}.")]


def load_environment(kind="single", limit=3):
    if kind == "single":
        return vf.SingleTurnEnv(dataset=ROWS, eval_dataset=ROWS.select([5]), system_prompt="Be brief.", rubric=RUBRIC)
    return {"doubts": Doubts, "rewrites": Rewrites}[kind](dataset=ROWS, rubric=RUBRIC, max_turns=limit)
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A module with environments, as an installed package of them would be."""
    pytest.importorskip("verifiers", reason='needs pip install "mlxrl-env[verifiers]"')
    (tmp_path / "mlxrl_own_vf.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    while PLAYED:
        PLAYED.pop().close()


def suite_of(**options):
    return make_env("verifiers:mlxrl-own-vf", **options)


def started(**options) -> tuple[Any, Any]:
    suite = suite_of(**options)
    env = suite.make(suite.tasks("train")[0], 0, 0)
    assert isinstance(env, Environment)
    PLAYED.append(SyncEnv(env))
    return PLAYED[-1], PLAYED[-1].reset()


def user(text):
    return ({"role": "user", "content": text},)


def test_a_single_turn_is_rewarded_by_the_rubric():
    env, opening = started()
    assert env.max_turns == 1
    assert opening == ({"role": "system", "content": "Be brief."}, *user("What is 0 + 1?"))
    result = env.step("It is 1.")
    # right 1 times 1, brief 0.5 times 0.2
    assert (result.reward, result.terminated) == (pytest.approx(1.1), True)
    assert (result.info["right"], result.info["brief"]) == (1.0, 0.5)
    assert started()[0].step("It is 2.").reward == pytest.approx(0.1)


def test_several_turns_are_played_until_the_environment_stops():
    env, opening = started(kind="doubts")
    assert (env.max_turns, opening) == (3, user("What is 0 + 1?"))
    first = env.step("1?")
    assert first == StepResult(user("Sure? You said 1?."), 0.0, terminated=False)
    last = env.step("yes")
    assert (last.reward, last.terminated, last.observation) == (pytest.approx(1.1), True, "")
    env, _ = started(kind="doubts")
    results = [env.step(action) for action in ("a", "b", "c")]
    assert [result.terminated for result in results] == [False, False, True]  # its own limit of 3
    assert results[-1].reward == pytest.approx(0.1)


def test_the_last_words_of_an_environment_are_its_last_observation():
    env, _ = started(kind="doubts")
    result = env.step("final")
    assert (result.terminated, result.observation) == (True, user("Enough."))


def test_an_environment_without_a_limit_gets_one_and_scores_there():
    env, _ = started(kind="doubts", limit=-1, max_turns=2)
    assert env.max_turns == 2
    assert [env.step(action).terminated for action in ("1", "b")] == [False, True]
    assert started(kind="doubts", limit=-1)[0].max_turns == 20


def test_a_state_is_all_that_was_said():
    env, opening = started(kind="doubts")
    start = env.state_id(opening)
    assert start == (("user", "What is 0 + 1?"),)
    after = env.state_id(env.step("a").observation)
    assert after == (*start, ("assistant", "a"), ("user", "Sure? You said a."))


def test_the_rows_are_tasks_and_those_to_evaluate_on_are_the_environments_own():
    suite = suite_of()
    assert [task.columns["answer"] for task in suite.tasks("train")] == ["1", "2", "3", "4", "5", "6"]
    assert [task.columns["answer"] for task in suite.tasks("eval")] == ["6"]
    assert suite.tasks("train")[0].prompt == ({"role": "system", "content": "Be brief."}, *user("What is 0 + 1?"))
    assert suite_of(kind="doubts").tasks("eval") == ()  # not rows to train on
    assert suite_of(eval_size=0).tasks("eval") == ()
    assert len(suite_of(size=2).tasks("train")) == 2
    shuffled = [str(task.columns["answer"]) for task in suite_of(seed=1).tasks("train")]
    assert (sorted(shuffled), shuffled == sorted(shuffled)) == (["1", "2", "3", "4", "5", "6"], False)


def test_an_episode_may_be_played_again_and_another_beside_it():
    suite = suite_of(kind="doubts")
    first, second = (SyncEnv(suite.make(task, 0, 0)) for task in suite.tasks("train")[:2])
    PLAYED.extend([first, second])
    first.reset()
    assert second.reset() == user("What is 1 + 1?")
    assert first.step("1").observation == user("Sure? You said 1.")
    assert second.step("yes").reward == pytest.approx(0.1)
    assert first.step("yes").reward == pytest.approx(1.1)
    assert first.reset() == user("What is 0 + 1?")
    assert first.step("yes").reward == pytest.approx(0.1)


def test_an_episode_that_is_broken_off_leaves_no_task_on_the_loop():
    suite = suite_of(kind="doubts")
    env: Any = suite.make(suite.tasks("train")[0], 0, 0)
    played = SyncEnv(env)
    played.reset()
    played.close()
    assert env._rollout.cancelled()


def test_episodes_run_in_threads_of_their_own():
    suite, rewards = suite_of(kind="doubts"), {}

    def play(place):
        env = SyncEnv(suite.make(suite.tasks("train")[place], 0, 0))
        env.reset()
        env.step(str(place + 1))
        rewards[place] = env.step("yes").reward
        env.close()

    threads = [threading.Thread(target=play, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {place: pytest.approx(1.1) for place in range(6)}


def test_a_rollout_that_fails_raises():
    env, _ = started(kind="doubts")
    with pytest.raises(RuntimeError, match=r"the rollout failed: .*broken"):
        env.step("break")


def test_an_environment_that_rewrites_what_was_said_is_refused():
    env, _ = started(kind="rewrites")
    with pytest.raises(RuntimeError, match="the environment rewrote what was said before"):
        env.step("a")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "no-such-env-here",
            {},
            "environment 'verifiers:no-such-env-here' cannot be had: ValueError: Could not import",
        ),
        ("mlxrl-own-vf", {"kinds": "single"}, "cannot be had: RuntimeError: .*kinds"),
        ("mlxrl-own-vf", {"size": 0}, "cannot be had: ValueError: size must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_loaded_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        make_env(f"verifiers:{name}", **options)


def test_loading_leaves_ctrl_c_as_it_was():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    suite_of()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_running_loop_may_await_it():
    suite = suite_of()
    env: Any = suite.make(suite.tasks("train")[0], 0, 0)

    async def play():
        await env.reset()
        return await env.step("1")

    assert asyncio.run(play()).reward == pytest.approx(1.1)
