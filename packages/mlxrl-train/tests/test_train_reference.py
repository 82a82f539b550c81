"""The reference of the KL: the base, or the adapter that a run started from, whatever has become of its folder."""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlxrl.policy import LoRAConfig, adapters_disabled, load_adapter, load_policy_with_lora
from mlxrl.train import RunError, make_config, open_session, resume, train, train_step
from mlxrl.train.scoring import score_trajectories

VOLATILE = ("time/", "tokens_per_second", "peak_memory_gb")


@pytest.fixture(scope="module")
def learned(quick, tmp_path_factory):
    """Folder of an adapter that two steps at a high rate have moved."""
    folder = tmp_path_factory.mktemp("learned") / "run"
    train(make_config(quick | {"output": str(folder), "optimizer": {"learning_rate": 0.1}}))
    return folder / "adapters"


@pytest.fixture
def going_on(values, learned, tmp_path):
    """going_on(**fields) -> the fields of a run from a copy of that adapter, with a KL to it."""
    adapter = shutil.copytree(learned.resolve(), tmp_path / "adapter")
    start = {"adapter": str(adapter), "reference": "initial_adapter", "kl_beta": 0.5, "steps": 4}
    return lambda **fields: values(**start | fields)


def rows(path):
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(VOLATILE)}
        for line in path.read_text().splitlines()
    ]


def adapter_of(folder):
    return {name: value.tolist() for name, value in mx.load(str(folder / "adapters/adapters.safetensors")).items()}


def scored(model, batch):
    options = {"rows": range(batch.size), "temperature": batch.temperature, "pad_token_id": 0}
    return np.array(score_trajectories(model, batch.segments, batch.view.roles, **options)[0])


@pytest.mark.parametrize("reference", ["base", "initial_adapter"])
def test_the_reference_is_the_base_or_the_adapter_at_the_start_in_every_step(going_on, tiny, learned, reference):
    session = open_session(make_config(going_on(reference=reference)))
    other, _, _ = load_policy_with_lora(tiny, LoRAConfig(rank=2))
    load_adapter(other, learned)
    for step in range(3):
        batch = train_step(session, step).batch
        found = np.array(batch.view.reference_logprobs)
        if reference == "base":
            with adapters_disabled(other):
                expected = scored(other, batch)
        else:
            expected = scored(other, batch)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        # the policy has its own adapter back, and it moves away
        assert np.abs(scored(session.model, batch) - expected).max() > 1e-3


def test_a_run_starts_without_a_distance_to_the_adapter_it_started_from(going_on, tmp_path):
    distances = {}
    for reference in ("base", "initial_adapter"):
        train(make_config(going_on(reference=reference, steps=2, output=str(tmp_path / reference))))
        distances[reference] = [row["kl"] for row in rows(tmp_path / reference / "metrics.jsonl")]
    assert distances["initial_adapter"][0] == pytest.approx(0, abs=1e-6)
    assert distances["initial_adapter"][1] > 1e-5
    assert distances["base"][0] > 1e-3


@pytest.mark.parametrize("broken_at", [0, 2])
def test_a_resumed_run_keeps_its_reference_when_the_adapter_it_came_from_has_changed(going_on, tmp_path, broken_at):
    train(make_config(going_on(checkpoint={"every": 2}, output=str(tmp_path / "whole"))))
    shutil.copytree(tmp_path / "whole", tmp_path / "run", symlinks=True)
    for saved in (tmp_path / "run").glob("checkpoints/step-*"):
        if int(saved.name[5:]) > broken_at:
            shutil.rmtree(saved)
    # the folder that the run started from now holds what the run learned
    shutil.copy(tmp_path / "whole/adapters/adapters.safetensors", tmp_path / "adapter/adapters.safetensors")
    assert [row["step"] for row in resume(tmp_path / "run").metrics] == list(range(broken_at + 1, 5))
    assert rows(tmp_path / "run/metrics.jsonl") == rows(tmp_path / "whole/metrics.jsonl")
    assert adapter_of(tmp_path / "run") == adapter_of(tmp_path / "whole")
    shutil.rmtree(tmp_path / "adapter")
    assert resume(tmp_path / "run").metrics == ()


def test_a_run_may_go_on_from_the_run_it_replaces(values, tmp_path):
    train(make_config(values()))
    fields = values(adapter=str(tmp_path / "run" / "adapters"), reference="initial_adapter", kl_beta=0.1)
    first = adapter_of(tmp_path / "run")
    train(make_config(fields | {"steps": 1}), force=True)
    kept = mx.load(str(tmp_path / "run" / "initial_adapter" / "adapters.safetensors"))
    assert {name: value.tolist() for name, value in kept.items()} == first
    assert resume(tmp_path / "run", {"steps": 2}).metrics[0]["kl"] > 0
    # a run that starts from no adapter keeps none
    train(make_config(values(steps=1)), force=True)
    assert not (tmp_path / "run" / "initial_adapter").exists()


def test_an_adapter_of_16_bits_is_trained_in_32(going_on, tmp_path):
    file = str(tmp_path / "adapter" / "adapters.safetensors")
    fields = going_on(steps=2, optimizer={"learning_rate": 1e-5})  # steps far below the rounding of 16 bits
    halved = {name: value.astype(mx.bfloat16) for name, value in mx.load(file).items()}
    found = []
    for dtype in (mx.bfloat16, mx.float32):
        mx.save_safetensors(file, {name: value.astype(dtype) for name, value in halved.items()})
        train(make_config(fields | {"output": str(tmp_path / str(dtype))}))
        found.append(adapter_of(tmp_path / str(dtype)))
    assert found[0] == found[1] != {name: value.tolist() for name, value in halved.items()}
    kept = mx.load(str(tmp_path / str(mx.bfloat16) / "adapters/adapters.safetensors"))
    assert {value.dtype for value in kept.values()} == {mx.float32}


DAMAGE = {
    "a flipped bit": lambda folder: flip(folder / "adapters.safetensors"),
    "an edited scale": lambda folder: edit(folder / "adapter_config.json", '"scale": 2.0', '"scale": 3.0'),
    "a missing file": lambda folder: (folder / "adapter_config.json").unlink(),
    "no folder": shutil.rmtree,
    "digests that are none": lambda folder: (folder / "sha256.json").write_text("[1]"),
}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("case", DAMAGE)
def test_a_copy_of_the_adapter_that_is_not_what_was_saved_is_refused(going_on, tmp_path, case):
    train(make_config(going_on(steps=1)))
    DAMAGE[case](tmp_path / "run" / "initial_adapter")
    with pytest.raises(RunError, match=r"initial_adapter, which the run started from, cannot be used \(.*; start a"):
        resume(tmp_path / "run", {"steps": 2})


def test_a_reference_that_cannot_act_is_told(going_on):
    inactive = open_session(make_config(going_on(kl_beta=0.0))).inactive
    assert inactive == ("reference acts on a KL term only; set kl_beta above 0.",)
    assert open_session(make_config(going_on())).inactive == ()
