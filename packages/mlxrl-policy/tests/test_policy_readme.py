"""The README's code block runs as it is printed, and the public names are those that it and its users count on."""

import re
from pathlib import Path

from mlx.utils import tree_flatten

import mlxrl.policy

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_the_readme_scores_an_answer_and_its_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(BLOCKS[0], names)
    # a fresh adapter is zero: policy and reference agree, and the loss is minus the answer's log-probability
    assert names["value"].item() == -names["reference"].sum().item() > 0
    slopes = dict(tree_flatten(names["gradient"]))
    assert any(abs(value).max() > 0 for name, value in slopes.items() if name.endswith("lora_b"))


def test_every_public_name_is_there_and_documented():
    assert mlxrl.policy.__all__ == sorted(mlxrl.policy.__all__)
    assert all(getattr(mlxrl.policy, name).__doc__ for name in mlxrl.policy.__all__)
    assert {
        "LoRAConfig",
        "load_policy_with_lora",
        "adapters_disabled",
        "score",
        "save_adapter",
        "load_adapter",
        "MergedPolicy",
        "flatten_quantized_rows",
    } <= set(mlxrl.policy.__all__)
