"""The optimizer step: what is skipped, what is clipped, which forward passes run."""

# pyright: reportOperatorIssue=false

import math
from dataclasses import replace

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.algo import algorithm_names, make_algorithm
from mlxrl.policy import shares_prefixes
from mlxrl.train import (
    Objective,
    batch_from_rollouts,
    batch_from_trajectories,
    batch_gradient,
    make_batch,
    optimizer_step,
    optimizer_step_trajectory,
)
from mlxrl.train.metrics import MEASURED
from mlxrl.train.scoring import score_micro_batch


def build(name, **options):
    algorithm = make_algorithm(name, **options)
    if algorithm.reduction.name == "sequence_max_tokens" and algorithm.reduction.max_tokens is None:
        return make_algorithm(name, max_tokens=16, **options)
    return algorithm


def adapter(model):
    return {name: np.array(value) for name, value in tree_flatten(model.trainable_parameters())}


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def flat(gradient):
    return np.concatenate([np.asarray(value, dtype=np.float64).ravel() for _, value in tree_flatten(gradient)])


def batch_of(model, episodes, algorithm, **options):
    rewards = [[episode.reward] for episode in episodes]
    return make_batch(model, episodes, algorithm, rewards=rewards, reward_weights=[1.0], **options)


@pytest.fixture
def count_forwards():
    """count_forwards(model) -> a list that grows by the shape of every pass through the trunk without a cache."""

    def wrap(model):
        shares_prefixes(model)  # what is compared once a model is compared here
        shapes = []
        trunk = model.model

        class Counting(type(trunk)):
            def __call__(self, inputs, cache=None, *args, **kwargs):
                if cache is None:
                    shapes.append(inputs.shape)
                return super().__call__(inputs, cache, *args, **kwargs)

        trunk.__class__ = Counting
        return shapes

    return wrap


@pytest.fixture
def four(episode):
    return [episode(0, (4, 3), reward=float(seed), seed=seed, turn_rewards=(float(seed), 0.0)) for seed in range(4)]


NO_SIGNAL = {
    "constant rewards": lambda e: [e(0, (4, 2), reward=0.1, seed=i) for i in range(8)],
    "a group of one": lambda e: [e(0, (4,), reward=0.7)],
    "a failed group": lambda e: [e(0, (4,), reward=float(i), seed=i, failed=True) for i in range(3)],
    "a truncated group": lambda e: [e(0, (4,), reward=float(i), seed=i, truncated=True) for i in range(3)],
    "all abstain": lambda e: [e(0, (4,), reward=None, seed=i) for i in range(3)],
}


@pytest.mark.parametrize("name", algorithm_names())
def test_a_batch_without_a_signal_takes_no_step_at_all(load, episode, count_forwards, name):
    model, algorithm = load(), build(name)
    shapes = count_forwards(model)
    optimizer = optim.AdamW(0.1, weight_decay=0.1)
    optimizer.init(model.trainable_parameters())
    before, state = adapter(model), dict(tree_flatten(optimizer.state))
    for case, make in NO_SIGNAL.items():
        batch = batch_of(model, make(episode), algorithm, mask_truncated_rows=case == "a truncated group")
        metrics = optimizer_step(model=model, optimizer=optimizer, batch=batch, algorithm=algorithm)
        assert (metrics["skipped"], metrics["grad_norm"], metrics["scored_rows"]) == (1, 0, 0), case
        # what is measured on rows is nothing, and all else a number
        assert {name for name, value in metrics.items() if not math.isfinite(value)} == {*MEASURED}, case
    assert same(adapter(model), before)
    assert all((state[k] == v).all() for k, v in dict(tree_flatten(optimizer.state)).items())
    assert shapes == []  # nothing was run either


@pytest.mark.parametrize("name", algorithm_names())
def test_a_fully_masked_micro_batch_beside_a_sound_one_is_finite(policy, episode, name):
    # with a KL every counted row is run; the truncated one is masked whole, and alone in its micro-batch
    model, algorithm = policy, build(name)
    episodes = [
        episode(0, (4,), reward=1.0, seed=1),
        episode(0, (3,), reward=0.0, seed=2),
        episode(0, (5,), reward=0.6, truncated=True, seed=3),
    ]
    batch = batch_of(model, episodes, algorithm, mask_truncated_rows=True, reference=True)
    gradient, metrics = batch_gradient(model, batch, Objective(algorithm, beta=0.1), max_rows=1)
    assert np.isfinite(flat(gradient)).all()
    assert metrics["scored_rows"] == 2
    assert not np.array(batch.weights[2]).any()


def test_rows_without_an_advantage_cost_no_forward_but_stay_in_the_denominator(load, episode, count_forwards):
    # group 0 is constant: its two rows of 4 tokens count in N = 8 + 7, and are not run
    model, algorithm = load(), build("grpo")
    episodes = [
        episode(0, (4,), reward=1.0, seed=1),
        episode(0, (4,), reward=1.0, seed=2),
        episode(1, (3,), reward=0.0, seed=3),
        episode(1, (4,), reward=1.0, seed=4),
    ]
    batch = batch_of(model, episodes, algorithm)
    shapes = count_forwards(model)
    _, metrics = batch_gradient(model, batch, Objective(algorithm))
    assert shapes == [(2, 6)]  # two rows, of 3 + 4 tokens less the last
    assert (metrics["scored_rows"], metrics["scored_share"], metrics["forwards/score"]) == (2, 0.5, 1)
    assert np.array(batch.weights)[2, :3] == pytest.approx(1 / 15)


@pytest.fixture
def half_constant(episode):
    """Two groups of two and a failed row: the first group's rewards are equal, the second's are not."""
    return [
        episode(0, (4,), reward=1.0, seed=1),
        episode(0, (4,), reward=1.0, seed=2),
        episode(1, (3,), reward=0.0, seed=3),
        episode(1, (4,), reward=1.0, seed=4),
        episode(1, (6,), failed=True),
    ]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", sorted({*algorithm_names()} - {"reinforce++"}))  # which whitens over the whole batch
def test_a_full_score_measures_every_row_that_counts_and_leaves_the_gradient(
    load, half_constant, count_forwards, name, dropout
):
    model, algorithm = load(dropout=dropout), build(name)
    shapes = count_forwards(model)

    def update(**options):
        batch = batch_of(model, half_constant, algorithm, **options)
        shapes.clear()
        mx.random.seed(1)
        gradient, metrics = batch_gradient(model, batch, Objective(algorithm))
        return batch, gradient, metrics, mx.random.uniform().item()

    batch, gradient, metrics, drawn = update()
    assert shapes == [(2, 6)]
    assert (metrics["scored_rows"], metrics["scored_share"], metrics["forwards/score"]) == (2, 0.5, 1)
    full_batch, full_gradient, full_metrics, full_drawn = update(full_score=True)
    assert shapes == [(2, 6), (2, 6)]  # and the two rows of the constant group
    assert (full_metrics["scored_rows"], full_metrics["scored_share"], full_metrics["forwards/score"]) == (4, 1, 2)
    np.testing.assert_array_equal(flat(full_gradient), flat(gradient))
    assert (full_metrics["loss"], full_drawn) == (metrics["loss"], drawn)
    np.testing.assert_array_equal(np.array(full_batch.weights), np.array(batch.weights))
    if not dropout:
        scores = score_micro_batch(model, batch.segments[:4], batch.weights.shape[1], temperature=1.0, pad_token_id=0)
        mask, sampled = batch.view.action_mask[:4], batch.view.sampler_logprobs
        assert sampled is not None
        difference = mx.abs(scores.logprobs - sampled[:4]) * mask
        assert full_metrics["entropy"] == pytest.approx(((scores.entropy * mask).sum() / 15).item(), rel=1e-5)
        assert full_metrics["sampling_logp_difference/mean"] == pytest.approx(difference.sum().item() / 15, rel=1e-5)
        assert full_metrics["sampling_logp_difference/max"] == pytest.approx(difference.max().item(), rel=1e-5)
        assert abs(full_metrics["entropy"] - metrics["entropy"]) > 1e-4


def test_a_full_score_of_a_batch_without_a_signal_measures_it_and_takes_no_step(load, episode, count_forwards):
    model, algorithm = load(), build("grpo")
    episodes = [episode(0, (4, 2), reward=0.1, seed=i) for i in range(3)]
    batch, before, shapes = batch_of(model, episodes, algorithm, full_score=True), adapter(model), count_forwards(model)
    optimizer = optim.AdamW(0.1, weight_decay=0.1)
    metrics = optimizer_step(model=model, optimizer=optimizer, batch=batch, algorithm=algorithm, micro_batch_size=2)
    assert (metrics["skipped"], metrics["grad_norm"], metrics["loss"]) == (1, 0, 0)
    assert (metrics["scored_share"], metrics["forwards/score"], len(shapes)) == (1, 2, 2)
    assert metrics["entropy"] > 1
    assert same(adapter(model), before)


def test_old_and_reference_log_probs_are_taken_of_the_rows_whose_loss_reads_them(load, half_constant, count_forwards):
    model, algorithm = load(), build("grpo")
    shapes = count_forwards(model)

    def scored(algorithm=algorithm, **options):
        shapes.clear()
        batch = batch_of(model, half_constant, algorithm, max_rows=1, **options)
        assert len(shapes) == sum(batch.forwards.values())
        taken = [batch.view.old_logprobs, batch.view.reference_logprobs]
        rows = [None if v is None else np.flatnonzero(np.array(v).any(axis=1)).tolist() for v in taken]
        assert [batch.forwards["old"], batch.forwards["reference"]] == [len(row or []) for row in rows]
        return rows

    counted, moving = [0, 1, 2, 3], [2, 3]  # the failed row counts nowhere
    assert scored() == [None, None]
    assert scored(old=True) == [moving, None]
    assert scored(old=True, full_score=True) == [counted, None]
    assert scored(reference=True) == [None, counted]
    assert scored(reference=True, old=True) == [counted, counted]  # a KL in the loss moves every token
    assert scored(make_algorithm("rloo", reward_beta=0.1)) == [counted, counted]  # a KL in the reward needs both
    assert scored(make_algorithm("reinforce++")) == [None, None]


def test_one_update_without_kl_runs_one_forward_and_each_option_adds_its_own(load, four, count_forwards):
    model = load()
    shapes = count_forwards(model)

    def passes(updates=1, **options):
        algorithm = build("grpo")
        batch = batch_of(model, four, algorithm, old=updates > 1, reference=options.get("beta", 0) > 0)
        shapes.clear()
        batch = batch_of(model, four, algorithm, old=updates > 1, reference=options.get("beta", 0) > 0)
        told: dict[str, float] = dict(batch.forwards)
        for _ in range(updates):
            metrics = optimizer_step(model=model, optimizer=optim.SGD(0.1), batch=batch, algorithm=algorithm, **options)
            told["score"] = told.get("score", 0) + metrics["forwards/score"]
        assert sum(told.values()) == len(shapes)
        return told

    assert passes() == {"old": 0, "reference": 0, "score": 1}
    assert passes(beta=0.1) == {"old": 0, "reference": 1, "score": 1}
    assert passes(updates=2) == {"old": 1, "reference": 0, "score": 2}
    assert passes(micro_batch_size=2) == {"old": 0, "reference": 0, "score": 2}
    assert passes(echo_alpha=0.1) == {"old": 0, "reference": 0, "score": 1}


@pytest.mark.parametrize("name", algorithm_names())
def test_options_that_are_off_leave_the_gradient_bit_for_bit(policy, four, name):
    model, algorithm = policy, build(name)
    plain = batch_of(model, four, algorithm)
    expected = flat(batch_gradient(model, plain, Objective(algorithm))[0])
    with_reference = batch_of(model, four, algorithm, reference=True)
    for batch in (plain, with_reference):
        off, metrics = batch_gradient(model, batch, Objective(algorithm, beta=0.0, kl_estimator="k2", echo_alpha=0.0))
        np.testing.assert_array_equal(flat(off), expected)
        assert not {"loss_echo", "echo_accuracy"} & metrics.keys()


@pytest.mark.parametrize("name", algorithm_names())
def test_the_first_update_on_a_batch_is_the_plain_policy_gradient(policy, episode, name):
    """d/dtheta of -sum w A log pi: every algorithm's gradient where the policy is still the one that was scored."""
    model, algorithm = policy, build(name)
    episodes = [episode(0, (4, 3), reward=r, seed=i, turn_rewards=(r, 0.0)) for i, r in enumerate((0.0, 1.0, 0.3))]
    scored = batch_of(model, episodes, algorithm, old=True)
    exact = batch_of(model, episodes, algorithm)
    (first, metrics), (on_policy, plain_metrics) = (
        batch_gradient(model, batch, Objective(algorithm)) for batch in (scored, exact)
    )
    assert metrics["ratio"] == plain_metrics["ratio"] == 1.0
    assert metrics["clip_ratio"] == plain_metrics["clip_ratio"] == 0.0
    # the same loss as an echo term: -sum (w A) log pi
    reinforce = replace(
        exact, advantages=mx.zeros_like(exact.advantages), echo_weights=exact.weights * exact.advantages
    )
    expected, _ = batch_gradient(model, reinforce, Objective(algorithm, echo_alpha=1.0))
    scale = np.linalg.norm(flat(expected))
    assert scale > 1e-3
    assert np.linalg.norm(flat(on_policy) - flat(expected)) < 5e-6 * scale
    assert np.linalg.norm(flat(first) - flat(expected)) < 5e-6 * scale


def test_the_second_update_on_a_batch_sees_another_ratio_and_clips(load, four):
    model, algorithm = load(), build("grpo", clip_low=0.02, clip_high=0.02)
    batch = batch_of(model, four, algorithm, old=True)
    steps = [optimizer_step(model=model, optimizer=optim.SGD(1.0), batch=batch, algorithm=algorithm) for _ in range(2)]
    assert (steps[0]["ratio"], steps[0]["clip_ratio"]) == (1.0, 0.0)
    assert abs(steps[1]["ratio"] - 1) > 1e-3
    assert steps[1]["clip_ratio"] > 0.1


def test_the_kl_is_zero_at_the_base_and_pulls_back_once_the_policy_has_moved(load, four):
    model, algorithm = load(), build("grpo")
    moved = {name: mx.array(value) for name, value in adapter(model).items()}
    model.update(tree_unflatten([(n, mx.zeros_like(v)) for n, v in moved.items() if n.endswith("lora_b")]))
    constant = [replace(e, reward=1.0) for e in four]  # no advantage: the KL alone
    batch = batch_of(model, constant, algorithm, reference=True)
    gradient, metrics = batch_gradient(model, batch, Objective(algorithm, beta=1.0))
    assert metrics["kl"] == 0.0
    assert np.abs(flat(gradient)).max() == 0.0

    model.update(tree_unflatten(list(moved.items())))
    again = batch_of(model, constant, algorithm, reference=True)
    # the base is the base, whatever the adapter
    np.testing.assert_array_equal(np.array(again.view.reference_logprobs), np.array(batch.view.reference_logprobs))
    for estimator in ("k2", "k3"):
        objective = Objective(algorithm, beta=1.0, kl_estimator=estimator)
        gradient, metrics = batch_gradient(model, again, objective)
        assert metrics["kl"] > 1e-3
        step = {n: moved[n] - 0.01 * g for n, g in tree_flatten(gradient)}
        model.update(tree_unflatten(list(step.items())))
        assert batch_gradient(model, again, objective)[1]["kl"] < metrics["kl"]
        model.update(tree_unflatten(list(moved.items())))


def test_a_kl_in_the_loss_without_reference_log_probs_says_what_to_do(policy, four):
    model, algorithm = policy, build("grpo")
    batch = batch_of(model, four, algorithm)
    with pytest.raises(ValueError, match=r"beta = 0\.1 needs reference log-probs; make the batch with compute_ref"):
        batch_gradient(model, batch, Objective(algorithm, beta=0.1))


def test_the_gradient_is_clipped_to_its_norm_and_reported_before(load, four):
    model, algorithm = load(), build("grpo")
    batch = batch_of(model, four, algorithm)
    gradient, _ = batch_gradient(model, batch, Objective(algorithm))
    norm = np.linalg.norm(flat(gradient))

    def moved(limit):
        start = {name: mx.array(value) for name, value in adapter(model).items()}
        metrics = optimizer_step(
            model=model, optimizer=optim.SGD(1.0), batch=batch, algorithm=algorithm, max_grad_norm=limit
        )
        change = np.concatenate([(start[n] - v).reshape(-1) for n, v in tree_flatten(model.trainable_parameters())])
        model.update(tree_unflatten(list(start.items())))
        return metrics["grad_norm"], np.linalg.norm(change)

    # SGD with rate 1 moves by the clipped gradient itself
    assert moved(None) == pytest.approx((norm, norm), rel=1e-3)
    assert moved(norm / 4) == pytest.approx((norm, norm / 4), rel=1e-3)
    assert moved(norm * 4) == pytest.approx((norm, norm), rel=1e-3)


def test_a_gradient_that_is_not_finite_leaves_policy_and_optimizer_as_they_were(load, four):
    model, algorithm = load(), build("grpo")
    optimizer = optim.Adam(0.1)
    optimizer.init(model.trainable_parameters())
    batch = batch_of(model, four, algorithm)
    optimizer_step(model=model, optimizer=optimizer, batch=batch, algorithm=algorithm)
    before, state = adapter(model), {k: np.array(v) for k, v in tree_flatten(optimizer.state)}
    for value in (math.nan, math.inf):
        broken = replace(batch, advantages=mx.where(batch.advantages > 0, value, batch.advantages))
        metrics = optimizer_step(model=model, optimizer=optimizer, batch=broken, algorithm=algorithm)
        assert (metrics["skipped"], metrics["nonfinite"]) == (1, 1)
        assert not math.isfinite(metrics["grad_norm"])
    assert same(adapter(model), before)
    assert same({k: np.array(v) for k, v in tree_flatten(optimizer.state)}, state)


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_recomputing_activations_changes_no_gradient(load, four, use_checkpoint):
    plain, other, algorithm = load(), load(grad_checkpoint=not use_checkpoint), build("grpo")
    batch = batch_of(plain, four, algorithm)
    for model, options in ((plain, {}), (other, {"use_checkpoint": use_checkpoint})):
        optimizer_step(model=model, optimizer=optim.SGD(1.0), batch=batch, algorithm=algorithm, **options)
    for name, value in adapter(plain).items():
        np.testing.assert_allclose(adapter(other)[name], value, atol=1e-6)
    assert ("Recomputing" in type(other.layers[0]).__name__) == use_checkpoint


def test_both_doors_of_a_batch_and_of_a_step_lead_to_the_same_gradient(load, episode):
    episodes = [episode(0, (4, 2), turn_rewards=(float(i), 0.0), reward=None, seed=i) for i in range(3)]
    algorithm = build("grpo")
    changed = []
    for door, step in (("trajectories", optimizer_step_trajectory), ("rollouts", optimizer_step)):
        model = load()
        given = {"model": model, "group_size": 3, "pad_token_id": 0, "algorithm": algorithm, "compute_reference": True}
        if door == "trajectories":
            batch = batch_from_trajectories(trajectories=episodes, **given)
        else:  # the returns of the turns: 0, 1, 2
            batch = batch_from_rollouts(completions=episodes, rewards=[0.0, 1.0, 2.0], **given)
        metrics = step(
            model=model, optimizer=optim.SGD(1.0), batch=batch, beta=0.1, pad_token_id=0, algorithm=algorithm
        )
        assert metrics["kl"] > 0
        changed.append(adapter(model))
    assert same(*changed)


def test_groups_and_rewards_that_do_not_fit_are_refused(policy, episode):
    model, algorithm = policy, build("grpo")
    episodes = [episode(0, (2,)), episode(0, (2,), seed=1), episode(1, (2,))]
    given = {"model": model, "pad_token_id": 0, "algorithm": algorithm, "completions": episodes}
    with pytest.raises(ValueError, match="one entry a completion, got 2 for 3"):
        batch_from_rollouts(rewards=[1.0, 2.0], group_size=3, **given)
    with pytest.raises(ValueError, match="group_size = 2 trajectories, group 1 has 1"):
        batch_from_rollouts(rewards=[1.0, 2.0, 3.0], group_size=2, **given)
