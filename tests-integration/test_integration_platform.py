"""Where MLX has no wheel: env and memory work, and the rest says so in one sentence."""

import subprocess
import sys

import pytest

# None in sys.modules is how Python marks a module that cannot be imported.
WITHOUT_MLX = "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = sys.modules['mlx_lm'] = None; "


def python(program):
    return subprocess.run([sys.executable, "-c", WITHOUT_MLX + program], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["algo", "policy", "rollout", "train"])
def test_importing_what_needs_mlx_says_in_one_sentence_where_mlx_exists(name):
    failed = python(f"import mlxrl.{name}")
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 1
    assert last.startswith("ImportError: mlxrl.")
    assert "macOS on Apple silicon" in last or "Apple silicon" in last
    assert "mlxrl.env and mlxrl.memory" in last


@pytest.mark.parametrize("name", ["env", "memory"])
def test_env_and_memory_work_without_mlx(name):
    assert python(f"import mlxrl.{name}").returncode == 0


def test_a_command_says_it_without_a_traceback():
    failed = python("sys.argv = ['mlxrl-cli', 'train']; from mlxrl.cli import main; main()")
    assert failed.returncode == 2
    assert len(failed.stderr.strip().splitlines()) == 1
    assert "mlxrl.env and mlxrl.memory work everywhere" in failed.stderr
