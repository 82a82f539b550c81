"""Learning rates by step, and the first step of Adam."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrl.train import make_config
from mlxrl.train.config import OptimizerConfig
from mlxrl.train.optimizers import learning_rate, make_optimizer


def rates(steps, **options):
    config = OptimizerConfig(learning_rate=1.0, **options)
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        # three steps up to the value: 1/4, 2/4, 3/4
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        # from 1 to 0 in four equal steps
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "linear", "end_learning_rate": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        # half a cosine: (1 + cos(pi k / 4)) / 2, cos(pi / 4) = 0.70711
        ({"schedule": "cosine"}, [1, 0.853553, 0.5, 0.146447, 0]),
        # one step of warm-up, the value, then thirds of the way down
        ({"schedule": "linear", "warmup_steps": 1}, [0.5, 1, 2 / 3, 1 / 3, 0]),
        # a warm-up longer than the run never gets there
        ({"warmup_steps": 9}, [0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_the_learning_rate_follows_its_schedule(options, expected):
    assert rates(5, **options) == pytest.approx(expected, abs=1e-6)


def test_a_run_of_one_step_has_the_full_rate():
    assert rates(1, schedule="cosine") == [1.0]


def first_step(**options):
    model = nn.Linear(1, 1, bias=False)
    model.weight = mx.array([[1.0]])
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.01, **options))
    optimizer.update(model, {"weight": mx.array([[0.5]])})
    return 1.0 - model.weight.item()


def test_the_first_step_of_adam_has_the_size_of_the_learning_rate():
    # corrected moments are g and g^2: the step is 0.01 g / |g|
    assert first_step() == pytest.approx(0.01, rel=1e-4)
    # uncorrected: 0.1 g / sqrt(0.001 g^2) = 3.1623 times as large at betas (0.9, 0.999), 0.1 / sqrt(0.05) at 0.95
    assert first_step(bias_correction=False) == pytest.approx(0.0316228, rel=1e-3)
    assert first_step(bias_correction=False, betas=(0.9, 0.95)) == pytest.approx(0.00447214, rel=1e-3)


def test_weight_decay_is_decoupled_and_eps_damps():
    # 0.01 * 0.1 of the weight 1 besides the step
    assert first_step(weight_decay=0.1) == pytest.approx(0.011, rel=1e-3)
    # 0.01 * 0.5 / (0.5 + 0.5)
    assert first_step(eps=0.5) == pytest.approx(0.005, rel=1e-4)
    assert first_step(name="adam") == pytest.approx(0.01, rel=1e-4)


def test_the_run_hands_its_schedule_to_the_optimizer():
    config = make_config({"model_id": "m", "steps": 5, "optimizer": {"schedule": "linear", "learning_rate": 2.0}})
    assert [learning_rate(config.optimizer, step, config.steps) for step in (0, 4)] == [2.0, 0.0]
