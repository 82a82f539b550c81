"""The README's code block runs as it is printed, and the public names are those that it and its users count on."""

import re
from pathlib import Path

import mlxrl.rollout

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_the_readme_plays_two_groups_of_four(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(BLOCKS[0], names)
    trajectories = names["trajectories"]
    assert [(t.group_id, t.sample_index) for t in trajectories] == [(group, i) for group in (0, 1) for i in range(4)]
    assert all(len(t.turns) == 3 and not t.failed for t in trajectories)  # a random model never arrives
    assert 1 <= len(names["sampled"]) <= 3 * 16


def test_every_public_name_is_there_and_documented():
    assert mlxrl.rollout.__all__ == sorted(mlxrl.rollout.__all__)
    assert all(getattr(mlxrl.rollout, name).__doc__ for name in mlxrl.rollout.__all__)
    promised = {"SamplingConfig", "Trajectory", "Turn", "Engine", "generate_groups", "generate_agentic_trajectories"}
    assert promised <= set(mlxrl.rollout.__all__)
