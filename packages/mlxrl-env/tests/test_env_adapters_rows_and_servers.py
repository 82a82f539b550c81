"""SkyRL-Gym on rows of a file and OpenEnv on a server in this process, with the real packages."""

import json
import socket
import threading
import time
from typing import Any

import pytest

from mlxrl.env import Environment, SyncEnv, make_env

PLAYED: list[SyncEnv] = []  # of the present test; closed after it, as rollouts do


@pytest.fixture(autouse=True)
def closed():
    yield
    while PLAYED:
        PLAYED.pop().close()


@pytest.fixture
def rows(tmp_path):
    """Rows as SkyRL's own scripts write them."""
    pytest.importorskip("skyrl_gym", reason='needs pip install "mlxrl-env[skyrl-gym]"')
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "prompt": [{"role": "user", "content": f"{i} + 1?"}],
                    "reward_spec": {"method": "rule", "ground_truth": str(i + 1)},
                    "extra_info": {"max_turns": 3},
                }
            )
            for i in range(4)
        )
    )
    return str(path)


def started(suite, *, task=0) -> tuple[Any, Any]:
    env = suite.make(suite.tasks("train")[task], 0, 0)
    assert isinstance(env, Environment)
    PLAYED.append(SyncEnv(env))
    return PLAYED[-1], PLAYED[-1].reset()


def test_a_row_of_skyrl_gym_is_asked_and_scored(rows):
    suite = make_env("skyrl-gym:gsm8k", path=rows, eval_fraction=0.25)
    assert (len(suite.tasks("train")), len(suite.tasks("eval"))) == (3, 1)
    suite = make_env("skyrl-gym:gsm8k", path=rows)
    env, opening = started(suite)
    assert (env.max_turns, opening) == (1, ({"role": "user", "content": "0 + 1?"},))
    result = env.step("One more: #### 1")
    assert (result.reward, result.terminated, result.observation) == (1.0, True, "")
    assert started(suite, task=1)[0].step("#### 1").reward == 0


def test_several_turns_of_skyrl_gym_are_rewarded_each(rows):
    env, opening = started(make_env("skyrl-gym:gsm8k_multi_turn", path=rows))
    assert env.max_turns == 3  # of the row
    assert env.state_id(opening) == ("0 + 1?",)
    first = env.step("#### 5")
    assert first.reward == pytest.approx(0.2 / 3)  # the form is right: 0.2 shared by the turns
    (asked,) = first.observation
    assert asked["role"] == "user"
    assert env.state_id(first.observation) == ("0 + 1?", "#### 5", asked["content"])
    assert env.step("#### 1").terminated


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gsm9k", {}, "unknown environment of SkyRL-Gym 'gsm9k'; did you mean 'gsm8k'"),
        (
            "gsm8k",
            {"formt": "jsonl"},
            "unknown option of environment 'skyrl-gym:gsm8k': 'formt'; did you mean 'format'",
        ),
        ("text2sql", {}, "environment 'skyrl-gym:text2sql' cannot be had: "),  # the rows are no questions to a database
    ],
)
def test_what_skyrl_gym_cannot_play_is_refused(rows, name, options, words):
    with pytest.raises(ValueError, match=words):
        make_env(f"skyrl-gym:{name}", path=rows, **options)


def test_skyrl_gym_needs_rows():
    with pytest.raises(ValueError, match="environment 'skyrl-gym:gsm8k' needs the option 'path'"):
        make_env("skyrl-gym:gsm8k")


@pytest.fixture(scope="module")
def server():
    """The address of a server of OpenEnv with a game of counting down; it hears loopback connections alone."""
    pytest.importorskip("openenv", reason='needs pip install "mlxrl-env[openenv]"')
    import uvicorn  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server import http_server, interfaces, types  # pyright: ignore[reportMissingImports]

    class Say(types.Action):
        message: str
        loud: bool = False

    class Told(types.Observation):
        text: str = ""

    class Countdown(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **options):
            self.left = 3 + (seed or 0) % 5
            return Told(text=f"{self.left} left")

        def step(self, action, timeout_s=None, **options):
            self.left -= int(action.message) * (2 if action.loud else 1)
            return Told(text=f"{self.left} left", done=self.left <= 0, reward=float(self.left == 0))

        @property
        def state(self):
            return types.State()

    app = http_server.create_app(Countdown, Say, Told, env_name="countdown", max_concurrent_envs=16)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join()


def test_a_game_on_a_server_is_played_to_its_end(server):
    suite = make_env(f"openenv:{server}", observation_field="text")
    number: Any = suite.tasks("train")[0].columns["number"]
    left = 3 + number % 5
    env, opening = started(suite)
    assert (opening, env.state_id(opening)) == (f"{left} left", f"{left} left")
    first, last = env.step("1"), env.step(str(left - 1))
    assert (first.observation, first.reward, first.terminated) == (f"{left - 1} left", 0.0, False)
    assert (last.observation, last.reward, last.terminated) == ("0 left", 1.0, True)


def test_more_episodes_than_the_server_has_sessions_follow_one_another(server):
    suite = make_env(f"openenv:{server}", observation_field="text", max_turns=1)
    for task in range(40):  # of 16 sessions; each is given back when its episode is over, wherever that ended
        env, _ = started(suite, task=task)
        if task % 2:
            env.step("1")
        env.close()


def test_an_observation_is_shown_whole_and_an_action_may_have_more_fields(server):
    suite = make_env(f"openenv:{server}", action={"loud": True})
    number: Any = suite.tasks("train")[1].columns["number"]
    env, opening = started(suite, task=1)
    assert json.loads(opening)["text"] == f"{3 + number % 5} left"
    assert json.loads(env.step("1").observation)["text"] == f"{1 + number % 5} left"


def test_what_the_server_refuses_raises(server):
    env, _ = started(make_env(f"openenv:{server}", action_field="massage"))
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        env.step("1")
    with pytest.raises(ValueError, match=r"observation_field 'txt' is no field of the observation \(fields: .*text"):
        started(make_env(f"openenv:{server}", observation_field="txt"))
    with pytest.raises(ValueError, match="action_field must be text, and not empty, got ''"):
        make_env(f"openenv:{server}", action_field="")
