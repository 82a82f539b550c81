"""What `from mlxrl.NAME import` offers: the promised names, and `__init__.py` files that only pass names on."""

import ast
import importlib
from pathlib import Path

import pytest

import mlxrl.algo

ROOT = Path(__file__).parents[1]

# Names that others write against; a front door may offer more.
PROMISED = {
    "algo": """
        Algorithm TrajectoryAlgorithm make_algorithm algorithm_names EchoSchedule echo_loss
        GRPOAlgorithm DrGRPOAlgorithm DAPOAlgorithm GSPOAlgorithm RLOOAlgorithm GiGPOAlgorithm
        CISPOAlgorithm SAPOAlgorithm GMPOAlgorithm REINFORCEPPAlgorithm
    """,
    "env": """
        Environment EnvFactory StepResult StopReason make_env env_names register_env
        RecurringStateTextEnv GuessNumberEnv exact_match numeric_match math_match
    """,
    "memory": "ModelShape RunShape estimate fit",
    "policy": "LoRAConfig load_policy_with_lora adapters_disabled score save_adapter load_adapter",
    "rollout": "SamplingConfig Trajectory Turn Engine generate_groups generate_agentic_trajectories",
    "train": """
        TrainConfig load_config train resume evaluate
        batch_from_rollouts optimizer_step batch_from_trajectories optimizer_step_trajectory
    """,
    "cli": "main",
}


def sources(name):
    return sorted((ROOT / f"packages/mlxrl-{name}/src/mlxrl/{name}").rglob("*.py"))


@pytest.mark.parametrize("name", PROMISED)
def test_a_front_door_offers_the_promised_names_each_once(name):
    door = importlib.import_module(f"mlxrl.{name}")
    assert set(PROMISED[name].split()) - set(door.__all__) == set()
    assert len(set(door.__all__)) == len(door.__all__)
    assert [public for public in door.__all__ if not hasattr(door, public)] == []


@pytest.mark.parametrize("name", PROMISED)
def test_an_init_only_passes_names_on(name):
    for path in sources(name):
        if path.name == "__init__.py":
            docstring, *statements = ast.parse(path.read_text()).body
            assert isinstance(docstring, ast.Expr)
            for statement in statements:
                passes_on = isinstance(statement, ast.ImportFrom)
                assert passes_on or ast.unparse(statement).startswith("__all__ = ["), ast.unparse(statement)


@pytest.mark.parametrize("name", ["train", "cli"])
def test_train_and_cli_name_no_algorithm_class(name):
    # The import contracts stop a way into mlxrl.algo's modules; its front door offers the classes as well.
    protocols = {"Algorithm", "TrajectoryAlgorithm"}
    concrete = {public for public in mlxrl.algo.__all__ if public.endswith("Algorithm")} - protocols
    for path in sources(name):
        if path.name == "peer_child.py":  # it runs beside another package, and the class is that package's
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
            assert word not in concrete, f"{path.name}:{getattr(node, 'lineno', '?')} names {word}"
