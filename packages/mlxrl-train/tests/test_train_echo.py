"""The world-model term: which rows are scored for it, and while it acts alone."""

# pyright: reportArgumentType=false

import numpy as np

from mlxrl.algo import make_algorithm
from mlxrl.train import make_batch, make_config, open_session, train_step

QUIET = """
from mlxrl.env import StepResult


class Quiet:
    max_turns = 3

    def reset(self):
        self.turn = 0
        return "say"

    def step(self, action):
        self.turn += 1
        return StepResult("more", 0.0, self.turn == 3)

    def state_id(self, observation):
        return observation


def quiet(task, seed, member):
    return Quiet()
"""


def test_rows_that_the_world_model_alone_moves_are_scored_only_where_it_acts(policy, episode):
    episodes = [episode(0, (4, 2), reward=0.1, seed=i, echo=True) for i in range(3)]  # no advantage
    options = {"rewards": [[0.1]] * 3, "reward_weights": [1.0], "old": True}
    for echo, forwards in ((True, 1), (False, 0)):
        batch = make_batch(policy, episodes, make_algorithm("grpo"), echo=echo, **options)
        assert batch.forwards == {"old": forwards, "reference": 0}
        assert np.array(batch.echo_weights).any()


def test_once_the_world_model_has_tapered_away_nothing_is_scored_for_it(rooms, tmp_path):
    (tmp_path / "quiet.py").write_text(QUIET)
    taper = {"echo_alpha": 0.1, "echo_schedule": "linear_taper_to_zero", "echo_taper_steps": 2}
    fields = {"update": {"updates_per_batch": 2}, "logging": {"full_score_every": 0}, "steps": 4}
    session = open_session(make_config(rooms(env_name=f"{tmp_path / 'quiet.py'}:quiet", **taper, **fields)))
    steps = [train_step(session, step).metrics for step in range(4)]
    assert [metrics["forwards/old"] for metrics in steps] == [1, 1, 0, 0]
    assert [metrics["forwards/score"] for metrics in steps] == [2, 2, 0, 0]
    assert [metrics["skipped"] for metrics in steps] == [0, 0, 2, 2]
