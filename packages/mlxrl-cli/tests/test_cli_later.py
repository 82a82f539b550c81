"""What is done with a run later: `eval` of its newest adapter, and going on with less memory."""

import shutil

import pytest

from mlxrl.train import load_config, make_plan

from .command import TINY, cli


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of two steps in it."""
    folder = tmp_path_factory.mktemp("trained")
    cli("train", "--steps", 2, "--output", "run", "--set", "checkpoint.every=1", *TINY, folder=folder)
    return folder


@pytest.mark.parametrize("change", ["moved", "of another rank"])
def test_eval_does_not_ask_for_the_adapter_that_the_run_started_from(trained, tmp_path, change):
    start = shutil.copytree((trained / "run/adapters").resolve(), tmp_path / "start")
    # "initial_adapter" needs the field adapter
    fields = ["--set", f'adapter="{start}"', "--set", "reference=initial_adapter", "--set", "kl_beta=0.1"]
    cli("train", "--steps", 1, "--output", "run", *TINY, *fields, folder=tmp_path)
    before = cli("eval", "run", "--tasks", 4, folder=tmp_path)
    shutil.rmtree(start)
    if change == "of another rank":
        cli("train", "--steps", 1, "--output", "other", *TINY, "--set", "rank=2", folder=tmp_path)
        shutil.copytree((tmp_path / "other/adapters").resolve(), start)
    assert cli("eval", "run", "--tasks", 4, folder=tmp_path) == before


def test_eval_of_a_run_without_a_checkpoint_says_so(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    (tmp_path / "run/adapters").unlink()
    assert "run has no checkpoint yet; go on with train --resume." in cli("eval", "run", folder=tmp_path, expect=2)


def test_a_run_that_is_resumed_may_be_fitted_to_less_memory(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run/checkpoints/step-000002")
    needed = make_plan(load_config(tmp_path / "run/config.toml")).estimate.peak
    fit = ["--auto-fit", "--available-memory-gb", (needed - 10_000) / 2**30]
    output = cli("train", "--resume", "--output", "run", *fit, folder=tmp_path)
    assert "resumed from step 1" in output
    written = load_config(tmp_path / "run/config.toml")
    assert written.gradient_checkpointing or written.update.max_tokens_per_micro_batch < 16384
