"""What a run will take, told before it starts: `plan`, `--dry-run` and `--auto-fit`."""

import re
import subprocess
import sys

import pytest

from mlxrl.policy.testing import make_tiny_model

from .command import PROGRAM, TINY, cli


def test_dry_run_shows_config_and_plan_and_writes_nothing(tmp_path):
    output = cli("train", "--dry-run", "--steps", 7, folder=tmp_path)
    assert "steps = 7" in output
    assert "peak" in output
    assert list(tmp_path.iterdir()) == []


def test_a_plan_tells_what_was_measured_from_what_was_not(tmp_path):
    dense, mixture = (make_tiny_model(tmp_path / name, name) for name in ("qwen3", "qwen3_moe"))
    measured, derived = (cli("plan", "--model", model, folder=tmp_path) for model in (dense, mixture))
    assert re.search(r"weights .* counted", measured)
    assert re.search(r"update activations .* measured on cpu", measured)
    assert "at least" not in measured
    assert re.search(r"update activations .* extrapolated", derived)
    assert re.search(r"peak +at least", derived)
    assert "expert layers are derived" in derived
    assert "the run needs at least" in " ".join(derived.split())


def test_auto_fit_turns_the_run_down_until_it_fits(tmp_path):
    wide = {"max_prompt_len": 512, "max_completion_len": 256, "update.max_tokens_per_micro_batch": 16384, "steps": 1}
    settings = [word for name, value in wide.items() for word in ("--set", f"{name}={value}")]
    refused = cli("train", *settings, "--available-memory-gb", 0.8, folder=tmp_path, expect=2)
    assert "gradient_checkpointing = true (was false)" in refused
    fitted = cli("train", *settings, "--dry-run", "--available-memory-gb", 0.8, "--auto-fit", folder=tmp_path)
    assert "gradient_checkpointing = true" in fitted
    assert "It fits" in fitted


def test_a_model_whose_memory_is_not_counted_is_trained_unless_a_plan_is_asked_for(tmp_path):
    model = make_tiny_model(tmp_path / "mixed", conv_window=4)
    command = ["train", "--model", model, "--steps", 1, "--output", "run", *TINY]
    why = "marks a convolution, which is not counted yet; measure a short run instead."
    for plan in (["--dry-run"], ["--auto-fit"], ["--available-memory-gb", 64]):
        assert why in cli(*command, *plan, folder=tmp_path, expect=2)
    arguments = [str(word) for word in command]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: whether this run fits the memory is not known: model_id = ")
    assert why in done.stderr
    assert (tmp_path / "run" / "adapters").is_dir()


WIDE = ["--set", "max_prompt_len=512", "--set", "max_completion_len=256", "--set", "gradient_checkpointing=false"]
WIDE += ["--set", "update.max_tokens_per_micro_batch=16384"]


def test_auto_fit_warns_of_what_it_turned_down_and_of_what_it_was(tmp_path):
    arguments = ["train", *WIDE, "--dry-run", "--available-memory-gb", "0.4", "--auto-fit"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert "update.max_tokens_per_micro_batch = 4096 (was 16384)" in warning
    assert "max_tokens_per_micro_batch = 4096" in done.stdout


def test_auto_fit_of_a_resumed_run_turns_down_that_run(tmp_path):
    cli("train", "--steps", 1, "--output", "run", *TINY, folder=tmp_path)
    resumed = ["train", "--resume", "--set", "output=run", "--steps", 3, *WIDE, "--dry-run"]
    assert "It fits" in cli(*resumed, folder=tmp_path)
    fitted = cli(*resumed, "--available-memory-gb", 0.2, "--auto-fit", folder=tmp_path)
    assert "max_tokens_per_micro_batch = 16384" not in fitted
    # the run has groups of 4, two a step; the embedded default other ones
    assert re.search(r"^group_size = 4$", fitted, flags=re.MULTILINE)
    assert re.search(r"^groups_per_step = 2$", fitted, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("gigabytes", "code", "said"), [("4", 0, "It fits"), ("0.4", 1, "(was 16384)"), ("0.1", 1, "the smallest shape")]
)
def test_a_script_can_tell_from_a_plan_whether_the_run_fits(gigabytes, code, said, tmp_path):
    arguments = ["plan", *WIDE, "--available-memory-gb", gigabytes]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code
    assert said in " ".join(done.stdout.split())
    assert done.stderr == ""
