# pyright: reportArgumentType=false
# Values of wrong types are passed on purpose.

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import pytest

import mlxrl.algo
from mlxrl.algo import (
    Algorithm,
    AlgorithmBatch,
    CISPOAlgorithm,
    DAPOAlgorithm,
    DrGRPOAlgorithm,
    GiGPOAlgorithm,
    GMPOAlgorithm,
    GRPOAlgorithm,
    GSPOAlgorithm,
    PolicyGradientAlgorithm,
    Reduction,
    REINFORCEPPAlgorithm,
    RLOOAlgorithm,
    SAPOAlgorithm,
    algorithm_class,
    algorithm_names,
    algorithm_options,
    make_algorithm,
    register_algorithm,
    registry,
)

CLASSES = {
    "cispo": CISPOAlgorithm,
    "dapo": DAPOAlgorithm,
    "dr-grpo": DrGRPOAlgorithm,
    "gigpo": GiGPOAlgorithm,
    "gmpo": GMPOAlgorithm,
    "grpo": GRPOAlgorithm,
    "gspo": GSPOAlgorithm,
    "reinforce++": REINFORCEPPAlgorithm,
    "rloo": RLOOAlgorithm,
    "sapo": SAPOAlgorithm,
}


@pytest.fixture
def registered(monkeypatch):
    """Let a test register algorithms that are forgotten afterwards."""
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))


def test_every_name_makes_its_class_with_its_defaults():
    assert algorithm_names() == sorted(CLASSES)
    for name, cls in CLASSES.items():
        assert make_algorithm(name) == cls()
        assert cls.name == name
        assert isinstance(cls(), Algorithm)


@pytest.mark.parametrize(
    ("spelling", "cls"),
    [
        ("drgrpo", DrGRPOAlgorithm),
        ("dr_grpo", DrGRPOAlgorithm),
        ("dr-grpo", DrGRPOAlgorithm),
        ("Dr_GRPO", DrGRPOAlgorithm),
        ("GRPO", GRPOAlgorithm),
        ("reinforce++", REINFORCEPPAlgorithm),
        ("REINFORCE_PP", REINFORCEPPAlgorithm),
    ],
)
def test_case_dashes_and_underscores_do_not_matter(spelling, cls):
    assert algorithm_class(spelling) is cls


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("grpo", {"clip_low": None, "clip_high": None, "reduction": Reduction("token_mean")}),
        ("dr-grpo", {"normalize": False, "max_tokens": None, "reduction": Reduction("sequence_max_tokens")}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True, "reduction": Reduction("token_mean")}),
        (
            "gspo",
            {"clip_low": 3e-4, "clip_high": 4e-4, "importance": "sequence", "reduction": Reduction("sequence_mean")},
        ),
        ("rloo", {"clip_low": None, "reduction": Reduction("sequence_sum")}),
        ("cispo", {"cap": 5.0, "reduction": Reduction("token_mean")}),
        ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05, "reduction": Reduction("sequence_mean")}),
        ("gmpo", {"clip_low": 0.4, "clip_high": 0.4, "reduction": Reduction("sequence_mean")}),
        ("reinforce++", {"clip_low": 0.2, "clip_high": 0.2, "baseline": False, "reduction": Reduction("token_mean")}),
        ("gigpo", {"omega": 1.0, "gamma": 1.0, "normalization": "std", "reduction": Reduction("token_mean")}),
    ],
)
def test_defaults_are_those_of_the_papers(name, defaults):
    options = algorithm_options(name)
    assert {option: options[option] for option in defaults} == defaults


@pytest.mark.parametrize("name", ["cispo", "sapo"])
def test_algorithms_without_clips_have_no_clip_options(name):
    assert "clip_low" not in algorithm_options(name)
    with pytest.raises(ValueError, match=rf"{name}: clip_low must be one of its options, .*, got clip_low=0.2"):
        make_algorithm(name, clip_low=0.2)


def test_only_rloo_needs_groups_of_two():
    assert {name for name, cls in CLASSES.items() if cls.minimum_group_size > 1} == {"rloo"}


def test_rloo_and_reinforcepp_charge_their_kl_in_the_reward():
    assert {name for name, cls in CLASSES.items() if cls.kl_placement == "reward"} == {"rloo", "reinforce++"}
    assert {name for name, cls in CLASSES.items() if cls.kl_estimator != "k3"} == {"reinforce++"}


@pytest.mark.parametrize(
    ("name", "option", "value", "must"),
    [
        ("grpo", "clip_low", math.nan, r"a finite number in \(0, 1\] or None"),
        ("grpo", "clip_high", math.inf, r"a finite number in \(0, inf\) or None"),
        ("grpo", "clip_low", 1.5, r"a finite number in \(0, 1\] or None"),
        ("grpo", "clip_low", "0.2", r"a finite number in \(0, 1\] or None"),
        ("grpo", "clip_low", True, r"a finite number in \(0, 1\] or None"),
        ("grpo", "eps", None, r"a finite number in \[0, inf\)"),
        ("grpo", "ddof", 2, "0 or 1"),
        ("grpo", "advantage", "mean", "standardised or centred or leave_one_out or maxrl or gdpo"),
        ("grpo", "reduction", "mean", "one of token_mean, sequence_mean, .*"),
        ("grpo", "reduction", 3, "Reduction"),
        ("grpo", "max_tokens", 8, r"left out unless reduction is sequence_max_tokens \(it is token_mean\)"),
        ("grpo", "reward_beta", -0.1, r"a finite number in \[0, inf\)"),
        ("dr-grpo", "max_tokens", 0, r"an integer in \[1, inf\) or None"),
        ("dr-grpo", "max_tokens", 8.0, r"an integer in \[1, inf\) or None"),
        ("dr-grpo", "normalize", 1, "true or false"),
        ("dapo", "dynamic_sampling", "yes", "true or false"),
        ("gspo", "importance", "word", "sequence or token"),
        ("cispo", "cap", 0, r"a finite number in \(0, inf\)"),
        ("sapo", "tau_negative", 0.0, r"a finite number in \(0, inf\)"),
        ("gmpo", "clip_low", None, r"a finite number in \(0, inf\)"),
        ("gigpo", "gamma", 1.1, r"a finite number in \[0, 1\]"),
        ("gigpo", "omega", -1, r"a finite number in \[0, inf\)"),
        ("gigpo", "normalization", "none", "std or center"),
        ("gigpo", "similarity", 0, r"a finite number in \(0, 1\] or None"),
    ],
)
def test_impossible_options_are_refused_by_name_and_class(name, option, value, must):
    shown = repr(value).replace("(", r"\(")
    message = rf"{name}: {option} must be {must}, got {shown}.*; its options are .*{option}"
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, **{option: value})
    with pytest.raises(ValueError, match=message):
        CLASSES[name](**{option: value})


def test_gdpo_refuses_a_kl_in_the_reward():
    with pytest.raises(ValueError, match=r"grpo: reward_beta must be 0 with advantage gdpo, .*, got 0.1"):
        make_algorithm("grpo", advantage="gdpo", reward_beta=0.1)


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"algorithm must be one of cispo, dapo, .*, sapo, got 'ppo'"):
        make_algorithm("ppo")


def test_a_reduction_can_be_named_or_given_with_its_constant():
    by_name = GRPOAlgorithm(reduction="sequence_max_tokens", max_tokens=8)
    assert by_name.reduction == Reduction("sequence_max_tokens", 8)
    assert GRPOAlgorithm(reduction=Reduction("sequence_max_tokens", 8)) == by_name
    assert dataclasses.replace(by_name, clip_high=0.3).reduction == Reduction("sequence_max_tokens", 8)


def test_algorithms_are_values():
    algorithm = GiGPOAlgorithm(omega=0.5)
    assert dataclasses.replace(algorithm, omega=1.0) == GiGPOAlgorithm(omega=1.0, gamma=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.omega = 2.0  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, kw_only=True)
class Constant(PolicyGradientAlgorithm):
    """An algorithm with advantages and a token loss of its own, and no groups at all."""

    name: ClassVar[str] = "constant"
    level: float = 1.0

    def advantages(self, batch):
        return self.level * batch.action_mask

    def token_loss(self, logp, old, ref, adv, mask):
        return -adv * logp


def test_an_algorithm_from_outside_is_made_by_its_name(registered):
    register_algorithm("my-constant", Constant)
    assert "my-constant" in algorithm_names()
    assert algorithm_options("MyConstant")["level"] == 1.0
    algorithm = make_algorithm("my_constant", level=2.0)
    with pytest.raises(ValueError, match="constant: level must be a finite number, got nan"):
        make_algorithm("my_constant", level=math.nan)
    batch = AlgorithmBatch.single_turn(rewards=[1, 0], group_structure=2, action_mask=mx.array([[1, 0], [1, 1]]))
    assert isinstance(algorithm, Algorithm)
    assert algorithm.advantages(batch).tolist() == [[2.0, 0.0], [2.0, 2.0]]


def test_registering_refuses_a_taken_name_and_a_class_without_options(registered):
    with pytest.raises(
        ValueError, match="name must not be taken by another algorithm, got 'DR_GRPO', which is 'dr-grpo'"
    ):
        register_algorithm("DR_GRPO", Constant)
    with pytest.raises(
        ValueError, match="algorithm must be a dataclass whose fields are its options, got <class 'object'>"
    ):
        register_algorithm("thing", object)


def test_the_public_names_are_sorted_and_there():
    capitals = [name for name in mlxrl.algo.__all__ if name.isupper()]
    classes = [name for name in mlxrl.algo.__all__ if name[0].isupper() and not name.isupper()]
    others = [name for name in mlxrl.algo.__all__ if name[0].islower()]
    assert mlxrl.algo.__all__ == [*sorted(capitals), *sorted(classes), *sorted(others)]
    assert all(hasattr(mlxrl.algo, name) for name in mlxrl.algo.__all__)
