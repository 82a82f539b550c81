"""Decode steps that a thread of their own launches: the tokens, the faults and the end are those of one thread."""

import threading

import mlx.core as mx
import pytest

from mlxrl.env import Task
from mlxrl.rollout import SamplingConfig, group_requests, play, single_turn_environment
from mlxrl.rollout.launcher import Launcher

from .comparing import assert_same, engine_of
from .environments import chatter

SAMPLING = SamplingConfig(temperature=0.8, max_tokens=7)


@pytest.fixture
def beside(monkeypatch):
    """Has engines launch beside the host, as they do on CUDA."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(play, "Launcher", lambda *, beside: Launcher(beside=on))

    return switch


def launchers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mlxrl-launcher")]


@pytest.mark.parametrize("deterministic", [True, False])
def test_episodes_are_bit_for_bit_the_same(lend, architecture, beside, deterministic):
    if not deterministic and architecture != "qwen3":
        pytest.skip("one architecture shows it")
    requests = group_requests([1, 3, 2], chatter, group_size=3, seed=5)
    played = []
    for on in (False, True):
        beside(on)
        engine = engine_of(lend(architecture), SAMPLING, width=5, deterministic=deterministic)
        played.append(engine.rollout(requests))
    assert_same(*played, tolerance=0 if deterministic else 1e-5)
    assert launchers() == []


def test_a_long_rollout_keeps_its_memory_and_its_tokens(lend, beside):
    requests = group_requests([Task("a"), Task("b c")], single_turn_environment, group_size=4)
    played, peaks = [], []
    for on in (False, True):
        beside(on)
        engine = engine_of(lend("qwen3_5"), SamplingConfig(temperature=1.0, max_tokens=300))
        mx.clear_cache()
        mx.reset_peak_memory()
        played.append(engine.rollout(requests))
        peaks.append(mx.get_peak_memory())
    assert_same(*played, tolerance=0)
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize("on", [False, True])
def test_what_a_launch_raises_ends_the_rollout_and_its_thread(lend, beside, monkeypatch, on):
    beside(on)
    launch, launches = mx.async_eval, []

    def breaks(*arrays):
        launches.append(arrays)
        if len(launches) == 5:
            raise RuntimeError("out of memory")
        launch(*arrays)

    monkeypatch.setattr(mx, "async_eval", breaks)
    engine = engine_of(lend("qwen3"), SAMPLING)
    requests = group_requests([Task("a")], single_turn_environment, group_size=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.rollout(requests)
    assert launchers() == []
    monkeypatch.undo()
    assert len(engine.rollout(requests)) == 2
