"""Every loss against a plain loop in Python floats, and its gradient against that loop's finite differences.

The loop takes the log-probs twice: `x` is differentiated, `frozen` stands for stop_gradient. The rows of the batch have
3, 1, 0 and 5 action tokens among 6 positions, one of them with a gap in the middle.
"""

# pyright: reportIndexIssue=false
# Tolist() and item() are typed as any list or scalar.

import math
import random

import mlx.core as mx
import pytest

from mlxrl.algo import echo_loss, kl_penalty, make_algorithm, reduction_weights

MASK = [
    [1, 1, 1, 0, 0, 0],
    [0, 1, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [1, 1, 0, 1, 1, 1],
]
TURNS = [
    [0, 0, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 1, 2],
]
ROW_ADVANTAGES = [1.3, -0.7, 2.0, -1.1]
ADVANTAGES = [[a * (1 + 0.3 * t) for t in range(6)] for a in ROW_ADVANTAGES]


def random_logprobs(seed, spread=0.6):
    rng = random.Random(seed)
    old = [[-rng.uniform(0.1, 3.0) for _ in range(6)] for _ in MASK]
    logp = [[value + rng.uniform(-spread, spread) for value in row] for row in old]
    ref = [[value + rng.uniform(-spread, spread) for value in row] for row in old]
    return logp, old, ref


def clip(value, low, high):
    return min(max(value, low), high)


def ppo(ratio, a, low, high):
    return -min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)


def row_mean_difference(x, old, i):
    tokens = [t for t in range(6) if MASK[i][t]]
    return sum(x[i][t] - old[i][t] for t in tokens) / max(1, len(tokens))


def plain(x, frozen, old, i, t):
    return -math.exp(x[i][t] - old[i][t]) * ADVANTAGES[i][t]


def clipped_by(low, high):
    return lambda x, frozen, old, i, t: ppo(math.exp(x[i][t] - old[i][t]), ADVANTAGES[i][t], low, high)


def gspo(x, frozen, old, i, t):
    return ppo(math.exp(row_mean_difference(x, old, i)), ADVANTAGES[i][t], 0.05, 0.1)


def gspo_token(x, frozen, old, i, t):
    ratio = math.exp(row_mean_difference(frozen, old, i)) * math.exp(x[i][t] - frozen[i][t])
    return ppo(ratio, ADVANTAGES[i][t], 0.05, 0.1)


def cispo(x, frozen, old, i, t):
    return -min(math.exp(frozen[i][t] - old[i][t]), 1.2) * ADVANTAGES[i][t] * x[i][t]


def sapo(x, frozen, old, i, t):
    a = ADVANTAGES[i][t]
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(x[i][t] - old[i][t]) - 1))) * a


def gmpo(x, frozen, old, i, t):
    sign = 1 if ROW_ADVANTAGES[i] > 0 else -1
    tokens = [s for s in range(6) if MASK[i][s]]
    clipped = [sign * min(sign * (x[i][s] - old[i][s]), 0.25) for s in tokens]
    return -ADVANTAGES[i][t] * math.exp(sum(clipped) / max(1, len(clipped)))


CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
LOSSES = [
    ("grpo", {}, plain),
    ("grpo", CLIPS, clipped_by(0.2, 0.3)),
    ("grpo", {"clip_high": 0.3}, clipped_by(math.inf, 0.3)),
    ("dr-grpo", {"max_tokens": 8, **CLIPS}, clipped_by(0.2, 0.3)),
    ("dapo", {}, clipped_by(0.2, 0.28)),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, gspo),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1, "importance": "token"}, gspo_token),
    ("rloo", {}, plain),
    ("cispo", {"cap": 1.2}, cispo),
    ("sapo", {}, sapo),
    ("gmpo", {"clip_low": 0.25, "clip_high": 0.25}, gmpo),
    ("reinforce++", {}, clipped_by(0.2, 0.2)),
    ("gigpo", CLIPS, clipped_by(0.2, 0.3)),
    ("gigpo", {"reduction": "step_mean"}, plain),
]
IDS = [f"{name}-{'-'.join(str(value) for value in options.values())}" for name, options, _ in LOSSES]


def oracle_weight(reduction, i, t):
    """Return the weight of an action token, by counting over the whole batch."""
    if not MASK[i][t]:
        return 0.0
    lengths = [sum(row) for row in MASK]
    sequences = sum(length > 0 for length in lengths)
    turns = {}
    for j, row in enumerate(MASK):
        for s, flag in enumerate(row):
            if flag:
                turns[j, TURNS[j][s]] = turns.get((j, TURNS[j][s]), 0) + 1
    return {
        "token_mean": 1 / sum(lengths),
        "sequence_mean": 1 / (sequences * lengths[i]),
        "step_mean": 1 / (len(turns) * turns[i, TURNS[i][t]]),
        "sequence_max_tokens": 1 / (sequences * (reduction.max_tokens or 1)),
        "sequence_sum": 1 / sequences,
    }[reduction.name]


def oracle(algorithm, token_loss, x, frozen, old, penalty=lambda x, i, t: 0.0):
    return math.fsum(
        oracle_weight(algorithm.reduction, i, t) * (token_loss(x, frozen, old, i, t) + penalty(x, i, t))
        for i in range(4)
        for t in range(6)
        if MASK[i][t]
    )


def finite_differences(function, x, step=1e-6):
    gradient = [[0.0] * len(row) for row in x]
    for i, row in enumerate(x):
        for t in range(len(row)):
            up, down = [list(r) for r in x], [list(r) for r in x]
            up[i][t] += step
            down[i][t] -= step
            gradient[i][t] = (function(up) - function(down)) / (2 * step)
    return gradient


def f64(values):
    return mx.array(values, dtype=mx.float64)


def flat(rows):
    return [value for row in rows for value in row]


def compute(algorithm, logp, old, **kwargs):
    """Return the loss and its gradient in float64 with whole-batch weights."""
    mask = mx.array(MASK)
    weights = reduction_weights(algorithm.reduction, mask, mx.array(TURNS), dtype=mx.float64)

    def loss(x):
        return algorithm.compute_loss(
            policy_logprobs=x,
            old_policy_logprobs=None if old is None else f64(old),
            advantages=f64(ADVANTAGES),
            action_mask=mask,
            weights=weights,
            **kwargs,
        ).loss

    value, gradient = mx.value_and_grad(loss)(f64(logp))
    assert value.dtype == gradient.dtype == mx.float64
    return value.item(), flat(gradient.tolist())


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("name", "options", "token_loss"), LOSSES, ids=IDS)
def test_loss_and_gradient_equal_the_loop_and_its_finite_differences(name, options, token_loss, seed):
    algorithm = make_algorithm(name, **options)
    logp, old, _ = random_logprobs(seed)
    value, gradient = compute(algorithm, logp, old)
    assert value == pytest.approx(oracle(algorithm, token_loss, logp, logp, old), abs=1e-12)
    expected = finite_differences(lambda x: oracle(algorithm, token_loss, x, logp, old), logp)
    assert gradient == pytest.approx(flat(expected), abs=1e-8)


@pytest.mark.parametrize(("name", "options", "token_loss"), LOSSES, ids=IDS)
def test_on_policy_the_old_policy_is_the_current_one_without_its_gradient(name, options, token_loss):
    algorithm = make_algorithm(name, **options)
    logp, _, _ = random_logprobs(4)
    value, gradient = compute(algorithm, logp, None)
    assert value == pytest.approx(oracle(algorithm, token_loss, logp, logp, logp), abs=1e-12)
    # On policy every surrogate has the REINFORCE gradient -A w at its ratio of 1; where the ratio belongs to the whole
    # trajectory a token gets the mean of the trajectory's advantages instead of its own.
    expected = finite_differences(lambda x: oracle(algorithm, token_loss, x, logp, logp), logp)
    assert gradient == pytest.approx(flat(expected), abs=1e-8)
    assert compute(algorithm, logp, logp) == (value, gradient)


KLS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
}


@pytest.mark.parametrize("estimator", KLS)
@pytest.mark.parametrize(("name", "options", "token_loss"), LOSSES, ids=IDS)
def test_the_kl_in_the_loss_equals_the_loop_and_its_finite_differences(name, options, token_loss, estimator):
    algorithm = make_algorithm(name, **options)
    logp, old, ref = random_logprobs(5)
    value, gradient = compute(algorithm, logp, old, reference_logprobs=f64(ref), beta=0.3, kl_estimator=estimator)

    def penalty(x, i, t):
        return 0.3 * KLS[estimator](x[i][t] - ref[i][t])

    assert value == pytest.approx(oracle(algorithm, token_loss, logp, logp, old, penalty), abs=1e-12)
    expected = finite_differences(lambda x: oracle(algorithm, token_loss, x, logp, old, penalty), logp)
    assert gradient == pytest.approx(flat(expected), abs=1e-8)


def test_a_kl_weighted_by_the_ratio_differentiates_through_the_ratio():
    logp, old, ref = random_logprobs(6)

    def term(x, i, t):
        d = x[i][t] - ref[i][t]
        return math.exp(x[i][t] - old[i][t]) * (math.exp(-d) + d - 1)

    def total(x):
        return mx.sum(kl_penalty(x, f64(ref), ratio=mx.expm1(x - f64(old)) + 1))

    value, gradient = mx.value_and_grad(total)(f64(logp))
    assert value.item() == pytest.approx(sum(term(logp, i, t) for i in range(4) for t in range(6)), abs=1e-10)
    expected = finite_differences(lambda x: sum(term(x, i, t) for i in range(4) for t in range(6)), logp)
    assert flat(gradient.tolist()) == pytest.approx(flat(expected), abs=1e-7)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_echo_loss_equals_the_loop_and_its_finite_differences(per_sequence):
    logp, _, _ = random_logprobs(7)
    counts = [sum(row) for row in MASK]

    def loop(x):
        if not per_sequence:
            return -sum(x[i][t] for i in range(4) for t in range(6) if MASK[i][t]) / sum(counts)
        means = [-sum(v for v, m in zip(x[i], MASK[i], strict=True) if m) / n for i, n in enumerate(counts) if n]
        return sum(means) / len(means)

    value, gradient = mx.value_and_grad(lambda x: echo_loss(x, mx.array(MASK), per_sequence))(f64(logp))
    assert value.item() == pytest.approx(loop(logp), abs=1e-12)
    assert flat(gradient.tolist()) == pytest.approx(flat(finite_differences(loop, logp)), abs=1e-8)


TOKEN_MEAN_FAMILY = [("grpo", {}), ("grpo", CLIPS), ("dapo", {}), ("cispo", {}), ("reinforce++", {}), ("gigpo", {})]
SEQUENCE_MEAN_FAMILY = [("gspo", {}), ("gspo", {"importance": "token"}), ("sapo", {}), ("gmpo", {})]


@pytest.mark.parametrize("family", [TOKEN_MEAN_FAMILY, SEQUENCE_MEAN_FAMILY], ids=["token_mean", "sequence_mean"])
def test_with_one_update_algorithms_of_one_reduction_have_one_gradient(family):
    logp, _, _ = random_logprobs(8)
    mask = mx.array(MASK)

    def gradient(name, options):
        algorithm = make_algorithm(name, **options)

        def loss(x):
            return algorithm.compute_loss(
                policy_logprobs=x, old_policy_logprobs=None, advantages=f64(ROW_ADVANTAGES), action_mask=mask
            ).loss

        return flat(mx.grad(loss)(f64(logp)).tolist())

    first = gradient(*family[0])
    assert any(first)
    for name, options in family[1:]:
        assert gradient(name, options) == pytest.approx(first, abs=1e-7), name


def test_off_policy_no_two_surrogates_have_the_same_gradient():
    logp, old, _ = random_logprobs(9)
    tight, wide = {"clip_low": 0.05, "clip_high": 0.05}, {"clip_low": 0.9, "clip_high": 9.0}
    cases = [
        ("grpo", {}),
        ("grpo", tight),
        ("dapo", {}),
        ("cispo", {"cap": 1.1}),
        ("gspo", {}),
        ("gspo", wide),
        ("gspo", {**wide, "importance": "token"}),  # another gradient than the line above: advantages differ by token
        ("sapo", {}),
        ("gmpo", {}),
    ]
    gradients = [compute(make_algorithm(n, **{**o, "reduction": "token_mean"}), logp, old)[1] for n, o in cases]
    for i, first in enumerate(gradients):
        for j in range(i):
            assert first != pytest.approx(gradients[j], abs=1e-4), (cases[i], cases[j])


def test_bf16_log_probs_are_promoted_before_any_arithmetic():
    algorithm = make_algorithm("grpo")
    logp = mx.array([[-1.0, -2.0]], dtype=mx.bfloat16)
    old = mx.array([[-1.0078125, -2.0]], dtype=mx.bfloat16)
    loss = algorithm.token_loss(logp, old, None, mx.ones((1, 2)), mx.ones((1, 2)))
    # d = 0.0078125 exactly; exp(d) = 1.00784, which bf16 would round to 1.0078125.
    assert loss.dtype == mx.float32
    assert loss.tolist()[0] == pytest.approx([-1.0078431, -1.0], abs=1e-7)
