"""Learning rates by step, and what a step of each optimizer is."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxrl.policy import LoRAConfig, load_policy_with_lora, score
from mlxrl.policy.dora import LeanDoRALinear
from mlxrl.policy.testing import make_tiny_model
from mlxrl.train import ConfigError, make_config
from mlxrl.train.optimizers import OPTIONS, OptimizerConfig, learning_rate, make_optimizer


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


# Per optimizer a learning rate that suits a few steps.
RATES = {"adam": 0.02, "adamw": 0.02, "adafactor": 0.02, "lion": 0.005, "muon": 0.1}
SHAPES = {"vector": (12,), "wide": (3, 12), "tall": (12, 3), "experts": (4, 3, 12), "experts_b": (4, 12, 3)}


def test_every_optimizer_is_tried_here():
    assert RATES.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", RATES)
def test_every_optimizer_goes_down_a_bowl_from_zero_in_every_shape_of_an_adapter(name):
    mx.random.seed(1)
    targets = {kind: mx.random.normal(shape) for kind, shape in SHAPES.items()}
    weights = {kind: mx.zeros(shape) for kind, shape in SHAPES.items()}  # as lora_b starts
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=RATES[name]))
    before = {kind: mx.square(target).sum().item() for kind, target in targets.items()}
    for _ in range(40):
        gradients = {kind: 2 * (weights[kind] - target) for kind, target in targets.items()}
        weights = optimizer.apply_gradients(gradients, weights)
    for kind, target in targets.items():
        after: Any = mx.square(weights[kind] - target).sum().item()
        assert after < 0.8 * before[kind], kind


@pytest.mark.parametrize("name", RATES)
def test_an_array_without_a_gradient_stays_and_can_move_later(name):
    # lora_a at the first step, while lora_b is 0; experts that no token went to
    weights = {kind: mx.ones(shape) for kind, shape in SHAPES.items()}
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.01))
    still = optimizer.apply_gradients({kind: mx.zeros(shape) for kind, shape in SHAPES.items()}, weights)
    moved = optimizer.apply_gradients({kind: mx.ones(shape) for kind, shape in SHAPES.items()}, still)
    for kind in SHAPES:
        assert mx.array_equal(still[kind], weights[kind]), kind
        assert mx.isfinite(moved[kind]).all().item()
        assert (moved[kind] < still[kind]).all().item(), kind


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", RATES)
def test_every_optimizer_trains_a_language_model(tmp_path_factory, name, use_dora):
    folder = make_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_hidden_layers=1)
    lora = LoRAConfig(rank=2, use_dora=use_dora, targets=("self_attn",) if use_dora else ())
    model, _, _ = load_policy_with_lora(folder, lora)
    kinds = {type(module) for module in model.modules()}
    assert (LeanDoRALinear if use_dora else LoRASwitchLinear) in kinds
    tokens = np.random.default_rng(0).integers(5, 100, (4, 12))
    mask = np.arange(12) > 0
    loss = nn.value_and_grad(model, lambda: -score(model, tokens, np.broadcast_to(mask, tokens.shape)).logprobs.mean())
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=RATES[name]))
    start: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    losses = []
    for _ in range(10):
        value, gradient = loss()
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.2
    end: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    assert not [leaf for leaf, value in end.items() if mx.array_equal(value, start[leaf])]


def muon_step(gradient):
    """The step that muon takes from 0 along a gradient, at learning rate 1 and without momentum."""
    optimizer = make_optimizer(OptimizerConfig(name="muon", learning_rate=1.0, momentum=0.0))
    return -optimizer.apply_gradients({"w": gradient}, {"w": mx.zeros(gradient.shape)})["w"]


def test_muon_steps_along_the_nearest_orthogonal_matrix_of_each_expert():
    # With the gradient U S V, muon steps by about U V: its singular values are 0.7 to 1.2, the bounds of five
    # Newton-Schulz steps; times sqrt(outputs / inputs) where there are more outputs.
    mx.random.seed(2)
    gradient_E_O_I = mx.random.normal((3, 12, 4))
    step_E_O_I = np.array(muon_step(gradient_E_O_I))
    for gradient, step in zip(np.array(gradient_E_O_I), step_E_O_I, strict=True):
        u, _, v = np.linalg.svd(gradient, full_matrices=False)
        singular = np.diag(u.T @ step @ v.T) / 3**0.5
        assert ((singular > 0.6) & (singular < 1.3)).all()
        np.testing.assert_allclose(step, u @ np.diag(singular * 3**0.5) @ v, atol=1e-4)
    # an expert's step is its own, whatever the others do; a linear layer holds the same factor transposed
    other = mx.concatenate([100 * gradient_E_O_I[:2], gradient_E_O_I[2:]])
    np.testing.assert_allclose(muon_step(other)[2], step_E_O_I[2], atol=1e-5)
    np.testing.assert_allclose(muon_step(gradient_E_O_I[2].T), step_E_O_I[2].T, atol=1e-5)
    # a vector is a column: singular value |g|, step g / |g| * sqrt(12 / 1)
    column = gradient_E_O_I[0, :, 0]
    np.testing.assert_allclose(muon_step(column)[:, None], muon_step(column[None, :, None])[0], atol=1e-6)


def test_options_reach_their_optimizer():
    def moved(name, **options):
        optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.01, **options))
        weights = {"w": mx.ones((2, 3))}
        for turning in (1.0, 1.0, 1.0, 1.0, -0.1, -0.1):  # where the signs of lion's moments come apart
            weights = optimizer.apply_gradients({"w": mx.array([[1.0, -2.0, 0.5], [0.1, 0.2, turning]])}, weights)
        return weights["w"].tolist()

    for name, change in (
        ("adam", {"betas": (0.5, 0.9)}),
        ("adam", {"eps": 0.1}),
        ("adam", {"bias_correction": False}),
        ("adafactor", {"weight_decay": 0.1}),
        ("lion", {"betas": (0.1, 0.9)}),
        ("lion", {"weight_decay": 0.1}),
        ("muon", {"momentum": 0.1}),
        ("muon", {"weight_decay": 0.5}),
    ):
        assert moved(name, **change) != moved(name), (name, change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "muon", "betas": [0.9, 0.99]},
            "betas = [0.9, 0.99] has no effect on muon; leave it out, or set name = 'adam' or 'adamw' or 'lion'",
        ),
        (
            {"name": "lion", "eps": 1e-8},
            "eps = 1e-08 has no effect on lion; leave it out, or set name = 'adam' or 'adamw'",
        ),
        (
            {"momentum": 0.9},
            "momentum = 0.9 has no effect on adamw; leave it out, or set name = 'muon'",
        ),
        (
            {"name": "adafactor", "bias_correction": True},
            "bias_correction = True has no effect on adafactor; leave it out, or set name = 'adam' or 'adamw'",
        ),
        ({"name": "adam", "weight_decay": 0.1}, "weight_decay = 0.1 has no effect on adam; set name = 'adamw'"),
        ({"name": "sgd"}, "name: should be 'adam', 'adamw', 'adafactor', 'lion' or 'muon', got 'sgd' (str)"),
    ],
)
def test_an_option_that_the_optimizer_does_not_have_is_refused(fields, message):
    with pytest.raises(ConfigError) as refusal:
        make_config({"model_id": "m", "optimizer": fields})
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("config error: optimizer")


def test_each_optimizer_brings_its_own_defaults():
    assert OptimizerConfig().bias_correction is True
    assert OptimizerConfig(name="lion").betas == (0.9, 0.99)
    assert OptimizerConfig(name="muon").model_dump(exclude_none=True).keys() >= {"momentum", "weight_decay"}
    assert OptimizerConfig(name="muon").betas is None
