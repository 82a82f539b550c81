"""Masked positions, padding and row order never matter, and no signal is exactly no gradient."""

# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# Tolist() and item() are typed as any list or scalar.

import math
import random
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.algo import (
    AlgorithmBatch,
    echo_loss,
    kl_penalty,
    make_algorithm,
    masked_weights,
    reduction_weights,
    sampler_ratio,
    truncated_weights,
)

ALGORITHMS = [
    ("grpo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("dr-grpo", {"max_tokens": 16}),
    ("dapo", {}),
    ("gspo", {}),
    ("gspo", {"importance": "token"}),
    ("rloo", {}),
    ("cispo", {}),
    ("sapo", {}),
    ("gmpo", {}),
    ("reinforce++", {}),
    ("reinforce++", {"baseline": True}),
    ("gigpo", {}),
]
IDS = [f"{name}{'-' if options else ''}{'-'.join(str(v) for v in options.values())}" for name, options in ALGORITHMS]
GARBAGE = [0.0, -7.5, 88.0, -1e30, math.nan, math.inf, -math.inf]


def example(rows=4, width=5, seed=0, dtype=mx.float32):
    """Return logp, old, ref, advantages and a mask whose rows have different lengths, the second none at all."""
    rng = random.Random(seed)
    lengths = [width - 1, 0, *(rng.randint(1, width) for _ in range(rows - 2))]
    mask = mx.array([[1] * n + [0] * (width - n) for n in lengths])

    def draw(low, high):
        return mx.array([[rng.uniform(low, high) for _ in range(width)] for _ in range(rows)], dtype=dtype)

    old = draw(-3, -0.1)
    advantages = mx.broadcast_to(mx.array([rng.choice([-1.5, 0.8]) for _ in range(rows)])[:, None], mask.shape)
    return old + draw(-0.4, 0.4), old, old + draw(-0.4, 0.4), advantages, mask


def compute(algorithm, logp, old, ref, advantages, mask):
    def loss(x):
        return algorithm.compute_loss(
            policy_logprobs=x,
            old_policy_logprobs=old,
            reference_logprobs=ref,
            advantages=advantages,
            completion_mask=mask,
            beta=0.1,
        )

    return loss(logp), mx.grad(lambda x: loss(x).loss)(logp)


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
@settings(max_examples=10)
@given(garbage=st.sampled_from(GARBAGE), on_policy=st.booleans(), seed=st.integers(0, 5))
def test_garbage_in_masked_positions_changes_nothing(name, options, garbage, on_policy, seed):
    algorithm = make_algorithm(name, **options)
    logp, old, ref, advantages, mask = example(seed=seed)
    clean = compute(algorithm, logp, None if on_policy else old, ref, advantages, mask)

    def spoil(array):
        return mx.where(mask == 1, array, garbage)

    dirty = compute(algorithm, spoil(logp), None if on_policy else spoil(old), spoil(ref), spoil(advantages), mask)
    assert [x.item() for x in dirty[0]] == [x.item() for x in clean[0]]
    assert dirty[1].tolist() == clean[1].tolist()
    assert all(math.isfinite(x) for row in dirty[1].tolist() for x in row)


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
@pytest.mark.parametrize("side", [(0, 3), (2, 0)], ids=["right", "left"])
def test_padding_on_either_side_changes_nothing(name, options, side):
    algorithm = make_algorithm(name, **options)
    arrays = example(seed=3)
    narrow, gradient = compute(algorithm, *arrays)
    wide, wide_gradient = compute(algorithm, *(mx.pad(array, [(0, 0), side]) for array in arrays))
    assert [x.item() for x in wide] == pytest.approx([x.item() for x in narrow], abs=1e-7)
    inside = wide_gradient[:, side[0] : side[0] + 5]
    assert mx.max(mx.abs(inside - gradient)).item() < 1e-7
    assert mx.sum(wide_gradient != 0).item() == mx.sum(gradient != 0).item()


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
@settings(max_examples=6)
@given(order=st.permutations(range(4)))
def test_permuting_rows_permutes_the_gradient(name, options, order):
    algorithm = make_algorithm(name, **options)
    arrays = example(seed=2)
    output, gradient = compute(algorithm, *arrays)
    index = mx.array(order)
    shuffled, shuffled_gradient = compute(algorithm, *(array[index] for array in arrays))
    assert shuffled.loss.item() == pytest.approx(output.loss.item(), abs=1e-6)
    assert mx.max(mx.abs(shuffled_gradient - gradient[index])).item() < 1e-7


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
@settings(max_examples=6)
@given(order=st.permutations(range(8)))
def test_permuting_a_batch_permutes_its_advantages(name, options, order):
    batch = AlgorithmBatch(
        rewards=[[1.0], [0.0], [0.5], [None], [2.0], [1.0], [1.0], [0.0]],
        reward_weights=[1.0],
        group_ids=["a", "a", "a", "a", "b", "b", "b", "b"],
        roles=mx.array([[1] * (1 + i % 3) + [0] * (3 - i % 3) for i in range(8)]),
        turns=mx.zeros((8, 4), dtype=mx.int32),
        turn_rewards=[[]] * 8,
        state_ids=[["s"]] * 8,
        valid=[True, True, True, True, True, False, True, True],
        truncated=[False] * 8,
    )
    algorithm = make_algorithm(name, **options)
    straight = algorithm.advantages(batch)
    assert mx.max(mx.abs(algorithm.advantages(batch.take(order)) - straight[mx.array(order)])).item() < 1e-6


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
def test_only_action_tokens_of_rows_that_count_have_an_advantage(name, options):
    roles = mx.array([[1, 2, 1, 0], [2, 1, 0, 0], [1, 1, 1, 1]])
    batch = replace(
        AlgorithmBatch.single_turn(
            rewards=[1.0, 0.0, 5.0], group_structure=3, action_mask=roles, valid=[True, True, False]
        ),
        roles=roles,
    )
    advantages = make_algorithm(name, **options).advantages(batch)
    assert advantages.dtype == mx.float32
    assert (advantages != 0).tolist() == [[True, False, True, False], [False, True, False, False], [False] * 4]


def zero_signal_batches():
    mask = mx.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]])
    constant = AlgorithmBatch.single_turn(rewards=[0.1] * 4, group_structure=4, action_mask=mask)
    return {
        "constant": constant,
        "masked": AlgorithmBatch.single_turn(rewards=[1, 0, 1, 0], group_structure=4, action_mask=mx.zeros((4, 3))),
        "failed": AlgorithmBatch.single_turn(
            rewards=[1, 0, 1, 0], group_structure=4, action_mask=mask, valid=[False] * 4
        ),
        "abstained": AlgorithmBatch.single_turn(rewards=[None] * 4, group_structure=4, action_mask=mask),
        "one valid": AlgorithmBatch.single_turn(
            rewards=[1, 0, None, 5], group_structure=4, action_mask=mask, valid=[True, False, True, False]
        ),
    }


@pytest.mark.parametrize("case", ["constant", "masked", "failed", "abstained", "one valid"])
@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
def test_without_a_signal_the_gradient_is_exactly_zero(name, options, case):
    algorithm = make_algorithm(name, **options)
    batch = zero_signal_batches()[case]
    advantages = algorithm.advantages(batch)
    weights = reduction_weights(algorithm.reduction, batch.roles, batch.turns, batch.counted)

    def loss(x):
        return mx.sum(weights * algorithm.token_loss(x, None, None, advantages, batch.action_mask))

    value, gradient = mx.value_and_grad(loss)(mx.full((4, 3), -0.7))
    assert advantages.tolist() == [[0.0] * 3] * 4
    assert value.item() == 0.0
    assert gradient.tolist() == [[0.0] * 3] * 4


@pytest.mark.parametrize(("name", "options"), [case for case in ALGORITHMS if case[0] != "reinforce++"])
def test_a_group_of_one_task_gets_zero_beside_groups_with_a_signal(name, options):
    # REINFORCE++ whitens over the batch instead, where a single row can differ from the others.
    batch = AlgorithmBatch.single_turn(rewards=[1, 0, 7], group_structure=["a", "a", "b"], action_mask=mx.ones((3, 2)))
    advantages = make_algorithm(name, **options).advantages(batch).tolist()
    assert advantages[2] == [0.0, 0.0]
    assert advantages[0][0] > 0 > advantages[1][0]


@pytest.mark.parametrize("ratio", [1e3, -1e3])
@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
def test_absurd_log_ratios_stay_finite(name, options, ratio):
    # exp(1000) overflows; the argument is clamped to 20 nats first.
    algorithm = make_algorithm(name, **options)
    output, gradient = compute(
        algorithm, mx.array([[ratio]]), mx.array([[0.0]]), mx.array([[0.0]]), mx.array([1.0]), mx.array([[1]])
    )
    assert all(math.isfinite(x.item()) for x in (*output, gradient))


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=IDS)
def test_beta_zero_is_bit_identical_to_no_reference(name, options):
    algorithm = make_algorithm(name, **options)
    logp, old, ref, advantages, mask = example(seed=5)
    kwargs = {"old_policy_logprobs": old, "advantages": advantages, "completion_mask": mask}

    def run(**more):
        def loss(x):
            return algorithm.compute_loss(policy_logprobs=x, **kwargs, **more).loss

        value, gradient = mx.value_and_grad(loss)(logp)
        return value.item(), gradient.tolist()

    assert run(beta=0.0, reference_logprobs=ref) == run()
    assert run(beta=0.1, reference_logprobs=ref) != run()
    assert algorithm.needs_logprobs == frozenset()


def test_the_kl_to_oneself_is_zero_with_zero_gradient():
    logp = mx.array([[-0.3, -1.7]])
    for estimator in ("k2", "k3"):
        value, gradient = mx.value_and_grad(lambda x, e=estimator: mx.sum(kl_penalty(x, logp, e)))(logp)
        assert (value.item(), gradient.tolist()) == (0.0, [[0.0, 0.0]])


@given(garbage=st.sampled_from(GARBAGE))
def test_garbage_never_reaches_the_other_terms(garbage):
    mask = mx.array([[1, 0]])
    dirty = mx.array([[-0.5, garbage]])
    assert kl_penalty(dirty, dirty, mask=mask).tolist() == [[0.0, 0.0]]
    assert echo_loss(dirty, mask).item() == 0.5
    for level in ("token", "sequence", "geometric"):
        ratio = sampler_ratio(dirty, mx.array([[-0.5, -0.5]]), mask, level)
        assert ratio.tolist() == [[1.0, 1.0]]
        assert truncated_weights(ratio).tolist() == masked_weights(ratio).tolist() == [[1.0, 1.0]]


def test_a_loss_with_given_weights_can_be_compiled():
    algorithm = make_algorithm("gspo")
    logp, old, _, advantages, mask = example(seed=6)
    weights = reduction_weights(algorithm.reduction, mask)

    def loss(x):
        return algorithm.compute_loss(
            policy_logprobs=x, old_policy_logprobs=old, advantages=advantages, completion_mask=mask, weights=weights
        ).loss

    assert mx.compile(loss)(logp).item() == pytest.approx(loss(logp).item(), abs=1e-6)


def test_the_metrics_count_action_tokens_only():
    algorithm = make_algorithm("dapo")
    logp = mx.log(mx.array([[1.5, 1.0, 9.0], [0.5, 9.0, 9.0]]))
    output = algorithm.compute_loss(
        policy_logprobs=logp,
        old_policy_logprobs=mx.zeros((2, 3)),
        advantages=mx.array([1.0, -1.0]),
        completion_mask=mx.array([[1, 1, 0], [1, 0, 0]]),
    )
    # Ratios 1.5, 1 and 0.5: mean 1; 1.5 at +1 and 0.5 at -1 are past the clips: 2 of 3 tokens.
    assert output.mean_ratio.item() == pytest.approx(1.0, abs=1e-6)
    assert output.clip_fraction.item() == pytest.approx(2 / 3, abs=1e-6)
