"""The gradient of a batch is that of its definition, however the batch is cut, padded or ordered."""

# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
# pyright: reportOptionalSubscript=false, reportOptionalCall=false, reportArgumentType=false

import math
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.algo import Correction, algorithm_names, make_algorithm
from mlxrl.policy import shares_prefixes, whole_rows
from mlxrl.rollout import Role
from mlxrl.train import Objective, batch_gradient, make_batch

ALGORITHMS = algorithm_names()
# On-policy without KL, and off-policy with a KL and the world-model term: the two ends of what a step can hold.
MODES = {"on-policy": (0.0, 0.0, False), "off-policy": (0.1, 0.05, True)}


def build(name, **options):
    """The algorithm, its constant length given where it needs one."""
    algorithm = make_algorithm(name, **options)
    if algorithm.reduction.name == "sequence_max_tokens" and algorithm.reduction.max_tokens is None:
        return make_algorithm(name, max_tokens=16, **options)
    return algorithm


@pytest.fixture
def episodes(episode):
    """Two groups of several lengths and turns, one episode failed, one truncated."""
    return [
        episode(0, (9, 2), reward=1.0, echo=True, turn_rewards=(0.25, 0.75)),
        episode(0, (1,), reward=0.0, seed=1),
        episode(0, (5, 3, 4), reward=0.4, echo=True, seed=2, turn_rewards=(0.1, 0.2, 0.1)),
        episode(1, (4,), reward=-0.5, truncated=True),
        episode(1, (7, 1), reward=2.0, echo=True, seed=1, turn_rewards=(2.0, 0.0)),
        episode(1, (6, 6), reward=9.0, echo=True, seed=2, failed=True),
        episode(1, (2, 2), reward=0.7, echo=True, seed=3, context="turn", turn_rewards=(0.7, 0.0)),
    ]


def batch_of(model, episodes, algorithm, *, beta=0.0, old=False, **options):
    batch = make_batch(
        model,
        episodes,
        algorithm,
        rewards=[[episode.reward] for episode in episodes],
        reward_weights=[1.0],
        temperature=0.7,
        reference=beta > 0,
        old=old,
        **options,
    )
    if not old:
        return batch
    # the policy was another when it was scored: each log-prob differs by up to 0.3 nats, by the tokens alone
    noise = [0.3 * math.sin(37.0 * float(x)) for x in batch.view.sampler_logprobs.flatten().tolist()]
    moved = batch.view.old_logprobs + mx.array(noise).reshape(batch.view.old_logprobs.shape)
    return replace(batch, view=replace(batch.view, old_logprobs=moved))


def flat(gradient):
    return np.concatenate([np.asarray(value, dtype=np.float64).ravel() for _, value in tree_flatten(gradient)])


def gradient_of(model, batch, algorithm, mode, **limits):
    beta, alpha, _ = MODES[mode]
    gradient, metrics = batch_gradient(model, batch, Objective(algorithm, beta=beta, echo_alpha=alpha), **limits)
    return flat(gradient), metrics


def without_passes(metrics):
    return {name: value for name, value in metrics.items() if name != "forwards/score"}


def distance(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


LIMITS = [{"max_rows": 1}, {"max_rows": 2}, {"max_rows": 3}, {"max_tokens": 40}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_the_same_for_every_cut_and_order(policy, episodes, name, mode):
    model, algorithm = policy, build(name)
    beta, _, old = MODES[mode]
    whole = batch_of(model, episodes, algorithm, beta=beta, old=old)
    expected, metrics = gradient_of(model, whole, algorithm, mode)
    assert np.linalg.norm(expected) > 1e-3
    for limits in LIMITS if old else LIMITS[:1]:
        got, cut_metrics = gradient_of(model, whole, algorithm, mode, **limits)
        assert distance(got, expected) < 5e-6, limits
        assert cut_metrics.pop("forwards/score") > metrics["forwards/score"]
        assert cut_metrics == pytest.approx(without_passes(metrics), rel=1e-4, abs=1e-5), limits
    order = [3, 6, 0, 5, 2, 4, 1]
    shuffled = batch_of(model, [episodes[i] for i in order], algorithm, beta=beta, old=old)
    got, _ = gradient_of(model, shuffled, algorithm, mode, max_rows=2)
    assert distance(got, expected) < 5e-6
    # advantages go with their rows, exactly
    np.testing.assert_array_equal(np.array(shuffled.advantages), np.array(whole.advantages)[order])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_float64_the_cuts_agree_to_ten_digits(load, episodes, name):
    model, algorithm = load(), build(name)
    model.set_dtype(mx.float64)
    batch = batch_of(model, episodes, algorithm, beta=0.1, old=True)
    expected, _ = gradient_of(model, batch, algorithm, "off-policy")
    got, _ = gradient_of(model, batch, algorithm, "off-policy", max_rows=1)
    assert distance(got, expected) < 1e-10


@pytest.mark.parametrize("name", ALGORITHMS)
def test_padding_changes_nothing(policy, episode, episodes, name):
    model, algorithm = policy, build(name)
    batch = batch_of(model, episodes, algorithm, beta=0.1, old=True)
    expected, _ = gradient_of(model, batch, algorithm, "off-policy")
    other_pad, _ = gradient_of(model, batch, algorithm, "off-policy", pad_token_id=42)
    np.testing.assert_array_equal(other_pad, expected)  # padding stands behind the row: it is never attended to
    # a failed episode counts nowhere; it only makes every row 60 tokens wider
    wider = batch_of(model, [*episodes, episode(1, (60,), failed=True)], algorithm, beta=0.1, old=True)
    assert wider.weights.shape[1] == 60
    got, _ = gradient_of(model, wider, algorithm, "off-policy")
    assert distance(got, expected) < 5e-6


class Probed(nn.Module):
    """A model whose logits get zeros added; the zeros' gradient is that of the logits."""

    def __init__(self, inner, rows, length, vocabulary):
        super().__init__()
        object.__setattr__(self, "_inner", inner)  # no child: only the probe is trainable
        self.probe = mx.zeros((rows, length, vocabulary))

    @property
    def layers(self):
        return self._inner.layers

    def __call__(self, tokens):
        return self._inner(tokens) + self.probe


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_sits_exactly_at_the_tokens_that_are_trained(policy, episode, name, mode):
    episodes = [  # widths fall, so that a micro-batch has the rows in this order
        episode(0, (9, 2), reward=1.0, echo=True, turn_rewards=(0.3, 0.7)),
        episode(0, (5, 3), reward=0.0, echo=True, seed=1, turn_rewards=(0.0, 0.0)),
        episode(0, (4, 3), reward=5.0, echo=True, seed=2, failed=True),
        episode(0, (1,), reward=0.7, seed=3, prompt=2),
    ]
    plain, algorithm = policy, build(name)
    beta, alpha, old = MODES[mode]
    batch = batch_of(plain, episodes, algorithm, beta=beta, old=old)
    sound = [episodes[0], episodes[1], episodes[3]]  # the failed one is not run: nothing of it is trained
    length = len(sound[0].segments[0].token_ids)
    probed = Probed(plain, len(sound), length - 1, 101)
    gradient, metrics = batch_gradient(probed, batch, Objective(algorithm, beta=beta, echo_alpha=alpha))
    assert metrics["scored_rows"] == 3
    moved = np.abs(np.array(gradient["probe"])).sum(axis=-1) > 0
    trained = np.zeros_like(moved)
    for row, trajectory in enumerate(sound):
        roles = trajectory.segments[0].roles
        assert roles[-1] == Role.ACTION  # the sampled end of sequence
        # the logits at a place predict the token after it
        trained[row, : len(roles) - 1] = (roles[1:] == Role.ACTION) | ((roles[1:] == Role.ECHO) & (alpha > 0))
    np.testing.assert_array_equal(moved, trained)


def test_an_environment_token_is_read_by_the_actions_after_it_and_by_none_before(policy, episode):
    model, algorithm = policy, build("grpo")
    one = episode(0, (4, 5), reward=1.0)
    segment = one.segments[0]
    (place,) = np.flatnonzero((segment.turns == 1) & (segment.roles == Role.MASKED))[:1]
    other_ids = segment.token_ids.copy()
    other_ids[place] += 1
    other = replace(one, segments=(replace(segment, token_ids=other_ids),))
    batch = make_batch(model, [one, other], algorithm, rewards=[[1.0], [0.0]], reward_weights=[1.0], old=True)
    difference = np.abs(np.array(batch.view.old_logprobs[0] - batch.view.old_logprobs[1]))
    assert (difference[:4] == 0).all()  # the first turn's four tokens stand before it
    assert (difference[4:9] > 1e-4).all()  # the second turn's five behind it


# Algorithms whose loss holds a constant that is really a function of the policy: fixed here, so that differences see
# what the gradient sees.
DIFFERENTIABLE = {"cispo": {"cap": 1e-3}}  # min(rho, cap) = cap everywhere


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_that_of_finite_differences(load, episodes, name):
    model, algorithm = load(), build(name, **DIFFERENTIABLE.get(name, {}))
    model.set_dtype(mx.float64)
    batch = batch_of(model, episodes, algorithm, beta=0.1, old=True)
    objective = Objective(algorithm, beta=0.1, echo_alpha=0.05)
    gradient, _ = batch_gradient(model, batch, objective)
    # the largest entry of each kind of factor, once at the first and once at the last projection
    leaves = dict(tree_flatten(gradient))
    names = sorted(leaves)
    for leaf in (names[0], names[1], names[-2], names[-1]):
        values = np.array(leaves[leaf])
        place = np.unravel_index(np.abs(values).argmax(), values.shape)
        start = dict(tree_flatten(model.trainable_parameters()))[leaf]
        losses = []
        for sign in (1, -1):
            shifted = np.array(start)
            shifted[place] += sign * 1e-2
            model.update(tree_unflatten([(leaf, mx.array(shifted, dtype=mx.float64))]))
            losses.append(batch_gradient(model, batch, objective)[1]["loss"])
        model.update(tree_unflatten([(leaf, start)]))
        # central differences err by the square of the step; losses near 1 are rounded at 1e-7, over 2e-2
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(values[place], rel=2e-2, abs=2e-5), leaf


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rewards_that_are_shifted_or_stretched_give_the_same_advantages(policy, episode, name):
    def advantages(change):
        episodes = [episode(g, (2, 3), reward=change(r), seed=i) for i, (g, r) in enumerate(rewards)]
        return np.array(batch_of(model, episodes, algorithm).advantages)

    rewards = [(0, 0.0), (0, 1.0), (0, 0.25), (1, 0.5), (1, 2.0), (1, 1.0)]
    model, algorithm = policy, build(name)
    plain = advantages(lambda r: r)
    assert np.abs(plain).max() > 0.3
    np.testing.assert_allclose(advantages(lambda r: r + 7), plain, atol=1e-5)
    stretched = advantages(lambda r: 3 * r)
    same, thrice = (np.allclose(stretched, factor * plain, atol=1e-4) for factor in (1, 3))
    assert same != thrice  # normalised, or only centred


def test_gigpo_without_step_advantages_is_episode_grpo_in_loss_and_adapter_gradient(policy, episodes):
    # omega 0 leaves the advantage of the whole episode, standardised over its group: GRPO's own
    same_step(policy, episodes, make_algorithm("gigpo", omega=0.0), make_algorithm("grpo"))


def test_gigpo_on_episodes_of_one_turn_is_grpo_in_loss_and_adapter_gradient(policy, episode):
    single = [
        episode(0, (4,), reward=1.0),
        episode(0, (2,), reward=0.0, seed=1),
        episode(1, (5,), reward=0.5),
        episode(1, (3,), reward=2.0, seed=1),
    ]
    same_step(policy, single, make_algorithm("gigpo", omega=0.0), make_algorithm("grpo"))


def test_gigpo_with_step_advantages_is_another_objective(policy, episodes):
    gigpo, grpo = make_algorithm("gigpo"), make_algorithm("grpo")
    assert distance(step_of(policy, episodes, gigpo)[0], step_of(policy, episodes, grpo)[0]) > 0.01


def step_of(policy, episodes, algorithm):
    gradient, metrics = gradient_of(policy, batch_of(policy, episodes, algorithm), algorithm, "on-policy")
    return gradient, metrics["loss"]


def same_step(policy, episodes, one, other):
    (first, loss), (second, other_loss) = step_of(policy, episodes, one), step_of(policy, episodes, other)
    assert loss == pytest.approx(other_loss, abs=1e-6)
    assert distance(first, second) < 1e-6


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_corrected_gradient_is_the_same_for_every_cut(policy, episodes, level):
    algorithm = make_algorithm("grpo")
    batch = batch_of(policy, episodes, algorithm)
    objective = Objective(algorithm, correction=Correction("tis", level, cap=5.0))
    whole, _ = batch_gradient(policy, batch, objective)
    for rows in (1, 2, 3):
        cut, _ = batch_gradient(policy, batch, objective, max_rows=rows)
        assert distance(flat(cut), flat(whole)) < 5e-6


@pytest.fixture
def alike(episode):
    """Two groups of four, each with a prompt of its own of 14 or 17 tokens, in several turns and lengths."""
    rows = []
    for group, prompt in enumerate((14, 17)):
        for seed, lengths in enumerate(((9, 2), (3,), (1, 4), (6,))):
            row = episode(group, lengths, reward=seed / 3 + group, echo=True, seed=seed, prompt=prompt)
            first = row.segments[0]
            ids = first.token_ids.copy()
            ids[:prompt] = np.arange(prompt) + 10 + 40 * group
            rows.append(replace(row, segments=(replace(first, token_ids=ids), *row.segments[1:])))
    return rows


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["grpo", "gspo", "gigpo"])
def test_prompts_that_are_shared_leave_the_gradient_of_rows_read_alone(load, alike, name, mode, recompute):
    model, algorithm = load(grad_checkpoint=recompute), build(name)
    beta, _, old = MODES[mode]
    assert shares_prefixes(model)
    batch = batch_of(model, alike, algorithm, beta=beta, old=old)
    together, metrics = gradient_of(model, batch, algorithm, mode)
    with whole_rows(model):
        alone_batch = batch_of(model, alike, algorithm, beta=beta, old=old)
        alone, alone_metrics = gradient_of(model, alone_batch, algorithm, mode, max_rows=1)
    assert distance(together, alone) < 5e-6
    assert without_passes(metrics) == pytest.approx(without_passes(alone_metrics), rel=1e-4, abs=1e-5)
    for limits in ({"max_rows": 4}, {"max_rows": 3}, {"max_tokens": 60}):
        assert distance(gradient_of(model, batch, algorithm, mode, **limits)[0], alone) < 5e-6, limits


def test_a_micro_batch_reads_the_prompt_of_a_group_once(load, alike):
    model, algorithm = load(), build("grpo")
    shares_prefixes(model)
    read = []

    class Counting(type(model.model)):
        def __call__(self, inputs, *args, **kwargs):
            read.append(inputs.shape)
            return super().__call__(inputs, *args, **kwargs)

    model.model.__class__ = Counting
    batch_gradient(model, batch_of(model, alike, algorithm), Objective(algorithm), max_rows=4)
    # a group is a micro-batch, the longer prompt first; behind it come at most 9 + 2 + 2 tokens, the last unread
    assert read == [(1, 17), (4, 12), (1, 14), (4, 12)]
