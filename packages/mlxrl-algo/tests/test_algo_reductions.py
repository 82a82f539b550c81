# pyright: reportIndexIssue=false, reportOperatorIssue=false
# Tolist() and item() are typed as any list or scalar.

import random

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.algo import (
    REDUCTIONS,
    Reduction,
    ReductionTotals,
    Role,
    make_algorithm,
    reduction_totals,
    reduction_weights,
)

# Rows of 3, 1 and 0 action tokens (the second role 2 is ECHO); row 0 has turns of 2 and 1 tokens.
ROLES = mx.array([[1, 1, 1, 0], [2, 1, 0, 0], [0, 0, 2, 0]])
TURNS = mx.array([[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]])


def approx(values):
    return pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize(
    ("reduction", "first_row", "second_row"),
    [
        # N = 4 tokens.
        (Reduction("token_mean"), [1 / 4, 1 / 4, 1 / 4, 0], [0, 1 / 4, 0, 0]),
        # B = 2 trajectories with tokens, of 3 and 1.
        (Reduction("sequence_mean"), [1 / 6, 1 / 6, 1 / 6, 0], [0, 1 / 2, 0, 0]),
        # K = 3 turns, of 2, 1 and 1.
        (Reduction("step_mean"), [1 / 6, 1 / 6, 1 / 3, 0], [0, 1 / 3, 0, 0]),
        # B L = 2 * 8.
        (Reduction("sequence_max_tokens", 8), [1 / 16, 1 / 16, 1 / 16, 0], [0, 1 / 16, 0, 0]),
        (Reduction("sequence_sum"), [1 / 2, 1 / 2, 1 / 2, 0], [0, 1 / 2, 0, 0]),
    ],
    ids=lambda value: value.name if isinstance(value, Reduction) else "",
)
def test_weights_divide_by_counts_over_the_whole_batch(reduction, first_row, second_row):
    weights = reduction_weights(reduction, ROLES, TURNS)
    assert weights.dtype == mx.float32
    assert weights.tolist() == [approx(first_row), approx(second_row), [0.0] * 4]


@pytest.mark.parametrize("mask", [mx.array([[1.0, 0.0]]), mx.array([[True, False]]), mx.array([[1, 2]])])
def test_a_mask_of_any_kind_does_for_roles(mask):
    assert reduction_weights("token_mean", mask).tolist() == [[1.0, 0.0]]


def test_totals_count_tokens_trajectories_and_turns_with_action_tokens():
    assert reduction_totals(ROLES, TURNS) == ReductionTotals(tokens=4, sequences=2, steps=3)
    assert reduction_totals(ROLES, TURNS, [False, True, True]) == ReductionTotals(tokens=1, sequences=1, steps=1)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_failed_rows_leave_the_denominators_as_if_they_were_not_there(name):
    reduction = Reduction(name, 8 if name == "sequence_max_tokens" else None)
    without = reduction_weights(reduction, ROLES[:1], TURNS[:1])
    with_failed = reduction_weights(reduction, ROLES, TURNS, [True, False, True])
    assert with_failed.tolist() == [without.tolist()[0], [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_batch_without_trained_tokens_has_zero_weights(name):
    reduction = Reduction(name, 8 if name == "sequence_max_tokens" else None)
    assert reduction_weights(reduction, ROLES, TURNS, [False] * 3).tolist() == [[0.0] * 4] * 3


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_wider_padding_changes_no_weight(name):
    # A denominator taken from the padded width would change here.
    reduction = Reduction(name, 8 if name == "sequence_max_tokens" else None)
    wide = reduction_weights(reduction, mx.pad(ROLES, [(0, 0), (0, 7)]), mx.pad(TURNS, [(0, 0), (0, 7)]))
    assert wide[:, :4].tolist() == reduction_weights(reduction, ROLES, TURNS).tolist()
    assert mx.sum(mx.abs(wide[:, 4:])).item() == 0.0


@pytest.mark.parametrize("name", REDUCTIONS)
def test_totals_summed_over_ranks_give_the_weights_of_the_whole_batch(name):
    reduction = Reduction(name, 8 if name == "sequence_max_tokens" else None)
    whole = reduction_weights(reduction, ROLES, TURNS)
    ranks = [reduction_totals(ROLES[:1], TURNS[:1]), reduction_totals(ROLES[1:], TURNS[1:])]
    totals = ReductionTotals(*(sum(counts) for counts in zip(*ranks, strict=True)))
    parts = [reduction_weights(reduction, ROLES[i], TURNS[i], totals=totals) for i in (slice(0, 1), slice(1, 3))]
    assert mx.concatenate(parts).tolist() == whole.tolist()


def test_chunks_of_a_token_mean_weigh_by_their_tokens():
    # Chunk 1: 3 tokens of mean loss -0.6; chunk 2: 1 token of 0.2. -0.6 * 3/4 + 0.2 * 1/4 = -0.4.
    weights = reduction_weights("token_mean", mx.array([[1, 1, 1], [1, 0, 0]]))
    losses = mx.array([[-0.6, -0.6, -0.6], [0.2, 9.0, 9.0]])
    assert mx.sum(weights * losses).item() == approx(-0.4)


def test_chunks_of_a_sequence_mean_weigh_by_their_sequences():
    # Chunks of 2, 2 and 1 trajectories with mean losses -0.6, 0.2, 0.1: -0.6 * 2/5 + 0.2 * 2/5 + 0.1 / 5 = -0.14.
    weights = reduction_weights("sequence_mean", mx.array([[1, 1], [1, 0], [1, 1], [1, 1], [1, 0]]))
    losses = mx.array([-0.6, -0.6, 0.2, 0.2, 0.1])[:, None]
    assert mx.sum(weights * losses).item() == approx(-0.14)


@pytest.mark.parametrize("length", [1, 50])
def test_one_long_and_one_short_trajectory_share_a_token_mean_by_tokens(length):
    # 1 + 50 tokens: each weighs 1/51 in whichever micro-batch it is; means of micro-batch means would give 1/2, 1/100.
    roles = mx.array([[1] + [0] * 49, [1] * 50])
    weights = reduction_weights("token_mean", roles)
    assert mx.sum(weights, axis=1).tolist() == approx([1 / 51, 50 / 51])
    assert weights[1, length - 1].item() == approx(1 / 51)


ALGORITHMS = [
    ("grpo", {}),
    ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "reduction": "sequence_mean"}),
    ("dr-grpo", {"max_tokens": 16}),
    ("dapo", {}),
    ("gspo", {}),
    ("gspo", {"importance": "token"}),
    ("rloo", {}),
    ("cispo", {}),
    ("sapo", {}),
    ("gmpo", {}),
    ("reinforce++", {}),
    ("gigpo", {}),
    ("gigpo", {"reduction": "step_mean"}),
]


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("name", "options"), ALGORITHMS)
def test_any_split_in_any_order_has_the_gradient_of_the_whole_batch(name, options, on_policy):
    rng = random.Random(11)
    rows, width = 6, 9
    roles = mx.array([[rng.choice([0, 1, 1, 2]) if t < 1 + 2 * i else 0 for t in range(width)] for i in range(rows)])
    turns = mx.array([[t // 3 for t in range(width)]] * rows)
    old = mx.array([[-rng.random() for _ in range(width)] for _ in range(rows)], dtype=mx.float64)
    logp = old + mx.array([[rng.uniform(-0.5, 0.5) for _ in range(width)] for _ in range(rows)], dtype=mx.float64)
    advantages = mx.array([[rng.choice([-1.0, 0.5])] * width for _ in range(rows)], dtype=mx.float64)
    reference = old + 0.1
    algorithm = make_algorithm(name, **options)
    valid = [True, True, False, True, True, True]
    weights = reduction_weights(algorithm.reduction, roles, turns, valid, dtype=mx.float64)

    def gradient(index):
        def loss(x):
            return algorithm.compute_loss(
                policy_logprobs=x,
                old_policy_logprobs=None if on_policy else old[index],
                reference_logprobs=reference[index],
                advantages=advantages[index],
                action_mask=roles[index] == int(Role.ACTION),
                beta=0.1,
                weights=weights[index],
            ).loss

        return mx.grad(loss)(logp[index])

    whole = gradient(mx.arange(rows))
    assert mx.max(mx.abs(whole)).item() > 1e-3
    for size in (1, 2, 3, rows):
        order = rng.sample(range(rows), rows)
        for start in range(0, rows, size):
            part = mx.array(order[start : start + size])
            assert mx.max(mx.abs(gradient(part) - whole[part])).item() < 1e-14


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_mean_reductions_have_weights_that_sum_to_one(lengths):
    roles = mx.array([[1] * n + [0] * (7 - n) for n in lengths])
    turns = mx.array([[t // 2 for t in range(7)]] * len(lengths))
    for name in ("token_mean", "sequence_mean", "step_mean"):
        total = mx.sum(reduction_weights(name, roles, turns)).item()
        assert total == approx(1.0 if any(lengths) else 0.0)


def test_a_constant_reduction_needs_its_constant():
    with pytest.raises(ValueError, match="max_tokens must be set for reduction 'sequence_max_tokens', got None"):
        reduction_weights("sequence_max_tokens", ROLES)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Reduction("sequence_max_tokens", 0)
    with pytest.raises(ValueError, match="max_tokens has no effect on reduction 'token_mean', got 8"):
        Reduction("token_mean", 8)


def test_step_mean_needs_turns():
    with pytest.raises(ValueError, match="turns must be given for reduction 'step_mean'"):
        reduction_weights("step_mean", ROLES)


def test_an_unknown_reduction_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"one of token_mean, sequence_mean, .*, got 'mean'"):
        Reduction("mean")


def test_shapes_that_differ_are_refused_with_both():
    with pytest.raises(ValueError, match=r"turns must have the shape of roles, \(3, 4\), got \(3, 3\)"):
        reduction_weights("step_mean", ROLES, TURNS[:, :3])
    with pytest.raises(ValueError, match="valid must have one entry per row of roles, 3, got 1"):
        reduction_weights("token_mean", ROLES, valid=[True])
