"""The run is warned once before memory runs out, or where it takes more than was planned."""

import mlx.core as mx
import pytest

from mlxrl.memory import human_bytes
from mlxrl.train import Observer, make_config, train
from mlxrl.train.files import read_lines
from mlxrl.train.memory_watch import plan_to_watch, planned_memory, watch_memory
from mlxrl.train.run_folder import RunState
from mlxrl.train.step import train_step

GB = 2**30


class Hearing(Observer):
    def __init__(self):
        self.warnings = []

    def on_warning(self, reason):
        self.warnings.append(reason)


def plan(budget):
    config = make_config({"model_id": "mlx-community/Qwen3-0.6B-4bit", "rollout": {"weights": "shared"}})
    found = plan_to_watch(config, max_turns=1, available_bytes=int(budget))
    assert found is not None
    return found


def peak(total, planned):
    """MLX's peak in bytes of what takes so much, that which MLX does not count included."""
    return int(total - planned.estimate.runtime)


def test_a_step_near_the_limit_is_told_once():
    limit = plan(GB).estimate.peak  # a run that just fits
    planned, state = plan(limit), RunState(step=7)
    assert watch_memory(state, "step 7", peak(0.89 * limit, planned), planned) == []
    (event,) = watch_memory(state, "step 7", peak(0.91 * limit, planned), planned)
    assert (event["step"], event["event"], event["limit"], event["planned"]) == (7, "memory", limit, limit)
    assert event["peak"] == pytest.approx(0.91 * limit, abs=2)
    assert f"step 7 took {human_bytes(event['peak'])} of the {human_bytes(limit)}" in event["reason"]
    assert state.memory_warned
    assert watch_memory(state, "step 7", peak(0.99 * limit, planned), planned) == []


def test_a_step_beyond_the_plan_is_told_where_it_takes_half_of_the_memory():
    needed = plan(GB).estimate.peak
    # 1.1 and 1.2 times what was planned, of half and of a third of the memory
    for times, budget, told in ((1.1, 2, False), (1.2, 2, True), (1.2, 3, False)):
        planned = plan(budget * needed)
        events = watch_memory(RunState(step=1), "step 1", peak(times * needed, planned), planned)
        assert bool(events) == told
        if told:
            assert f"and {human_bytes(needed)} were planned" in events[0]["reason"]


def test_a_model_without_a_plan_is_not_watched():
    config = make_config({"model_id": "no-model"})
    assert plan_to_watch(config, max_turns=1, available_bytes=GB) is None
    assert watch_memory(RunState(step=1), "step 1", 1000 * GB, None) == []


def test_an_evaluation_is_watched_as_steps_are(values):
    data = {**values()["data"], "eval_fraction": 0.5}
    config = make_config(values(data=data, steps=1, eval={"tasks": 4}))
    few = plan_to_watch(config, max_turns=1, available_bytes=GB)
    assert few is not None
    hearing = Hearing()
    train(config, observer=hearing, available_bytes=few.estimate.runtime)
    assert len(hearing.warnings) == 1
    assert hearing.warnings[0].startswith("the evaluation at step 0 took ")


def test_a_run_with_little_memory_is_warned_and_goes_on(values):
    config = make_config(values(steps=3))
    few = plan_to_watch(config, max_turns=1, available_bytes=GB)
    assert few is not None
    hearing = Hearing()
    result = train(config, observer=hearing, available_bytes=few.estimate.runtime)
    events = [row for row in read_lines(result.folder / "events.jsonl") if row["event"] == "memory"]
    assert [event["reason"] for event in events] == hearing.warnings
    assert [event["step"] for event in events] == [1]
    assert len(result.metrics) == 3


def test_a_run_with_enough_memory_is_not_warned(values):
    hearing = Hearing()
    train(make_config(values(steps=2)), observer=hearing, available_bytes=64 * GB)
    assert hearing.warnings == []


def limit_now():
    limit = mx.set_memory_limit(GB)
    mx.set_memory_limit(limit)
    return limit


def test_mlx_keeps_to_the_plan_where_memory_is_scarce_and_is_free_again_afterwards():
    before, ample = limit_now(), plan(1000 * GB)
    needed = ample.estimate.mlx_peak
    scarce, too_little = plan(1.5 * needed), plan(0.5 * needed)
    with planned_memory(scarce):
        assert limit_now() == int(1.1 * needed)
    with planned_memory(too_little):
        assert limit_now() == int(0.5 * needed)
    with planned_memory(ample):
        assert limit_now() == 500 * GB
    with pytest.raises(KeyError), planned_memory(scarce):
        raise KeyError
    with planned_memory(None):
        assert limit_now() == before
    assert limit_now() == before


def test_every_step_of_a_run_keeps_to_its_plan(values, monkeypatch):
    limits = []

    def step(session, number):
        limits.append(limit_now())
        return train_step(session, number)

    monkeypatch.setattr("mlxrl.train.loop.train_step", step)
    before = limit_now()
    train(make_config(values(steps=2)), available_bytes=64 * GB)
    assert limits == [32 * GB] * 2
    assert limit_now() == before
