"""Two steps of training in an environment of each other library that is installed; `nox -s adapters` has them all."""

import importlib.util
import json
import socket
import threading

import pytest

from mlxrl.cli.embedded import embedded_model_path
from mlxrl.train import TrainConfig, train

VERIFIERS = """
import verifiers as vf
from datasets import Dataset


def digits(completion):
    return sum(character.isdigit() for message in completion for character in message["content"]) / 100


class Doubts(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Sure?")]


def load_environment(turns=1):
    rows = Dataset.from_list([{"question": f"What is {i}+1?", "answer": str(i + 1)} for i in range(4)])
    rubric = vf.Rubric(funcs=[digits])
    if turns == 1:
        return vf.SingleTurnEnv(dataset=rows, rubric=rubric)
    return Doubts(dataset=rows, rubric=rubric, max_turns=turns)
"""

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{i}+1?"}],
        "reward_spec": {"method": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"max_turns": 2},
    }
    for i in range(4)
]

RUNS = {
    "reasoning-gym:chain_sum": {"instruction": "Answer as <answer>5</answer>.", "max_terms": 3, "max_digits": 1},
    "gymnasium:FrozenLake-v1": {"is_slippery": False, "invalid_penalty": 0.1, "max_turns": 3},
    "gymnasium:Blackjack-v1": {},
    "gem:game:GuessTheNumber-v0-easy": {},
    "textarena:Secretary-v0": {},
    "textarena:TowerOfHanoi-v0": {},
    "verifiers:mlxrl-doubts": {},
    "verifiers:mlxrl_doubts": {"turns": 3},
    "skyrl-gym:gsm8k_multi_turn": {"path": "rows.jsonl"},
    "openenv:http://127.0.0.1": {"observation_field": "text"},
}


@pytest.fixture
def server():
    """The port of a server of OpenEnv that counts the characters said to it; it hears loopback connections alone."""
    import uvicorn  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server import http_server, interfaces, types  # pyright: ignore[reportMissingImports]

    class Say(types.Action):
        message: str

    class Told(types.Observation):
        text: str

    class Counter(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = types.State()

        def reset(self, seed=None, episode_id=None, **options):
            return Told(text=f"Say {seed}.")

        def step(self, action, timeout_s=None, **options):
            return Told(text="Go on.", reward=len(action.message) / 100)

    app = http_server.create_app(Counter, Say, Told, env_name="counter", max_concurrent_envs=16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        running.should_exit = True
        thread.join()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_another_librarys_environment_rewards_every_row(name, tmp_path, monkeypatch, request):
    library = name.partition(":")[0]
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        pytest.skip(f'needs pip install "mlxrl-env[{library}]"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mlxrl_doubts.py").write_text(VERIFIERS)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    address = f":{request.getfixturevalue('server')}" if library == "openenv" else ""
    sizes = {} if library == "skyrl-gym" else {"size": 4}
    config = TrainConfig.model_validate(
        {
            "model_id": str(embedded_model_path()),
            "env_name": name + address,
            "environment": sizes | RUNS[name],
            "output": str(tmp_path / "run"),
            "steps": 2,
            "group_size": 2,
            "groups_per_step": 2,
            "max_turns": 3,
            "max_prompt_len": 1024,
            "max_completion_len": 8,
            "rank": 4,
            "rollout": {"context": "turn", "max_context": 2048},
        }
    )

    result = train(config)

    assert len(result.metrics) == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 4
    assert [row["error"] for row in rows] == [None] * 8
    assert [row for row in rows if not isinstance(row["reward"], float)] == []
    assert all(row["turns"] and row["turns"][0]["state"] for row in rows)
    openings = {(row["step"], row["group"]): set() for row in rows}
    for row in rows:
        openings[row["step"], row["group"]].add(json.dumps(row["turns"][0]["observation"]))
    assert [len(seen) for seen in openings.values()] == [1] * 4  # a group starts alike
