"""The README says only what is true: its commands and snippets run, its figures are those of the results files."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
QUICK = ["--steps", "2", "--set", "eval.tasks=4"]
BIN = Path(sys.executable).parent
QUESTIONS = [{"prompt": f"What is {a}+{b}+1?", "answer": str(a + b + 1)} for a in range(1, 6) for b in range(1, 5)]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands():
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def python_block(containing):
    (block,) = [block for block in blocks("python") if containing in block]
    return block


def run(command, folder, **environment):
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the files that the README's own config and commands speak of, over the embedded model."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, config in zip(("my.toml", "corridor.toml"), blocks("toml"), strict=True):
        config = config.replace("mlx-community/Qwen3-0.6B-4bit", "embedded").replace("steps = 200", "steps = 2")
        config = re.sub("max_completion_len = [0-9]+", "max_completion_len = 16", config)
        (folder / name).write_text(config.replace("tasks = 50", "tasks = 2"))
    (folder / "my_rewards.py").write_text(python_block("def short"))
    (folder / "my_env.py").write_text(python_block("def corridor"))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return folder


def test_every_command_of_the_readme_is_run_by_one_of_these_tests():
    # a new command must be met by a test: these are the ones below, in the order of the README
    kinds = [re.match(r"python3 -m venv|mlxrl-cli|uvx", command) for command in commands()]
    assert [kind and kind[0] for kind in kinds] == (
        ["python3 -m venv"] * 2 + ["mlxrl-cli"] * 5 + ["mlxrl-cli"] * 2 + ["mlxrl-cli"] * 5 + ["uvx"]
    )


def test_the_first_command_trains_the_embedded_default_in_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    run(["git", "clone", "--quiet", str(ROOT), str(clone)], tmp_path)
    command = f"{commands()[0]} {shlex.join(QUICK)}"
    output = run(["bash", "-c", command], clone, VIRTUAL_ENV="")
    assert "held-out accuracy before training" in output
    assert "step    2/2" in output
    assert (clone / "runs/arithmetic-grpo-001/adapters/adapters.safetensors").is_file()


def test_the_second_command_is_the_one_that_ci_runs():
    assert commands()[1] in (ROOT / ".ci/run").read_text()


def test_the_commands_for_a_run_of_ones_own_work_in_order(workplace):
    for command in commands()[2:7]:
        output = run(shlex.split(command), workplace)
        assert output.strip(), command
    rows = [json.loads(line) for line in (workplace / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all("rewards/my_rewards.py:short/mean" in row for row in rows)


def test_an_environment_of_ones_own_fits_on_a_page_and_is_trained_by_a_config_alone(workplace):
    assert len(python_block("def corridor").splitlines()) <= 25
    run(["mlxrl-cli", "train", "--config", "corridor.toml", "--output", "runs/corridor"], workplace)
    folder = workplace / "runs/corridor"
    metrics, rollouts = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "rollouts")
    )
    assert [(row["step"], row["failed"]) for row in metrics] == [(1, 0), (2, 0)]
    assert all("anchor_share" in row for row in metrics)  # of gigpo, from the states
    # 2 steps of 8 tasks, 8 episodes each
    assert len(rollouts) == 128
    assert {len(row["turns"]) for row in rollouts} <= {1, 2, 3, 4, 5, 6}
    assert all(row["reward"] == sum(turn["reward"] for turn in row["turns"]) for row in rollouts)
    assert (folder / "adapters/adapters.safetensors").is_file()


def test_the_races_are_run(tmp_path):
    for command in commands()[7:9]:
        output = run([*shlex.split(command), "--max-tokens", "8", "--prompt-len", "8"], tmp_path)
        assert re.search(r"^loop +[\d,]+ +\d+\.\d\dx", output, flags=re.MULTILINE), output


def test_the_gates_pass(tmp_path):
    quick = {"mlxrl-cli toy-gate": "mlxrl-cli toy-gate --steps 20"}
    for command in commands()[9:14]:
        assert "FAIL" not in run(shlex.split(quick.get(command, command)), tmp_path)


def test_uvx_runs_the_command_line_from_another_folder(tmp_path):
    (command,) = [command for command in commands() if command.startswith("uvx")]
    command = command.replace("packages/", f"{ROOT}/packages/")
    output = run([sys.executable, "-m", "uv", "tool", "run", *shlex.split(command)[1:]], tmp_path)
    assert "step    2/2" in output


def test_the_adapter_of_a_run_answers_in_stock_mlx_lm(tmp_path):
    run(["mlxrl-cli", "train", *QUICK], tmp_path)
    answer = run([sys.executable, "-c", python_block("mlx_lm.generate")], tmp_path)
    assert answer.strip()


def test_a_step_by_hand_runs(tmp_path):
    loss, norm = map(float, run([sys.executable, "-c", python_block("optimizer_step(")], tmp_path).split())
    # on policy, at ratio 1, the loss is minus the token-weighted mean advantage; only the gradient tells of learning
    assert abs(loss) < 2
    assert norm > 0


def test_the_loss_runs_with_the_mlxrl_algo_wheel_alone(tmp_path):
    (wheel,) = WheelBuilder(str(ROOT / "packages/mlxrl-algo")).build(directory=str(tmp_path), versions=["standard"])
    venv.create(tmp_path / "alone", with_pip=False)
    python = tmp_path / "alone/bin/python"
    run([sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), wheel], tmp_path)
    output = run([str(python), "-c", python_block("GRPOAlgorithm")], tmp_path, PYTHONPATH="")
    value, gradient = output.split(maxsplit=1)
    # every ratio is exp(0.1) = 1.1052, inside the clip of 0.2; the advantages are +1, -1, -1, +1 on 3, 2, 3, 2 tokens,
    # so the loss is -1.1052 * (3 - 2 - 3 + 2) / 10 = 0 and each gradient entry is -+1.1052 / 10
    assert float(value) == pytest.approx(0, abs=1e-6)
    assert json.loads(gradient)[0] == pytest.approx([-0.110517] * 3, abs=1e-5)
    assert json.loads(gradient)[1] == pytest.approx([0.110517, 0.110517, 0], abs=1e-5)


def script(name):
    """A script beside this file, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests-integration/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quoted(name):
    """What the README says between the marks of this name."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README, flags=re.DOTALL)
    assert found is not None
    return found[1]


def test_the_races_are_those_of_the_results_file():
    benchmarks = script("benchmarks")
    results = json.loads(benchmarks.RESULTS.read_text())
    assert quoted("bench") == benchmarks.table(results)
    assert list(results["races"]) == list(benchmarks.RACES)
    for report in results["races"].values():
        assert report["failed"] == {}
        assert report["settings"]["rounds"] == 3


def test_the_figures_are_those_of_the_results_file():
    learning = script("learning")
    results = json.loads(learning.RESULTS.read_text())
    assert quoted("learning") == learning.table(results)
    assert len(results["runs"]) >= 3
    for row in results["runs"]:
        assert row["reward_last"] - row["reward_first"] >= 0.3
        assert row["accuracy_after"] > row["accuracy_before"]
