"""From segments to the loss's rows, to micro-batches, and to minibatches."""

# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.algo import algorithm_names, make_algorithm
from mlxrl.policy import adapters_disabled, plan_reading
from mlxrl.rollout import Role, Segment
from mlxrl.train import make_batch
from mlxrl.train.scoring import cut_micro_batches, score_micro_batch
from mlxrl.train.update import Objective, batch_gradient


def build(name):
    algorithm = make_algorithm(name)
    return make_algorithm(name, max_tokens=16) if algorithm.reduction.name == "sequence_max_tokens" else algorithm


def batch_of(model, episodes, algorithm, **options):
    rewards = [[episode.reward] for episode in episodes]
    return make_batch(model, episodes, algorithm, rewards=rewards, reward_weights=[1.0], **options)


def part(prompt, actions, key=0):
    """A segment of a prompt and as many sampled tokens, which no other key has."""
    ids = np.concatenate([prompt, 1000 * (key + 1) + np.arange(actions)]).astype(np.int32)
    roles = (np.arange(len(ids)) >= len(prompt)).astype(np.int8) * int(Role.ACTION)
    return Segment(ids, roles, np.zeros(len(ids), dtype=np.int32), np.zeros(len(ids), dtype=np.float32))


def test_a_row_holds_the_trained_tokens_of_all_segments_end_to_end(policy, episode):
    model = policy
    turns = episode(0, (2, 3), context="turn", reward=1.0)
    echoed = episode(0, (1, 2), echo=True, reward=0.0)
    batch = batch_of(model, [turns, echoed], make_algorithm("grpo"))
    assert len(turns.segments) == 2
    assert batch.view.roles.tolist() == [[1, 1, 1, 1, 1], [1, 2, 2, 1, 1]]  # no prompt, no padding of segments
    assert batch.view.turns.tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
    sampled = np.concatenate([s.sampler_logprobs[s.roles == Role.ACTION] for s in turns.segments])
    np.testing.assert_array_equal(np.array(batch.view.sampler_logprobs[0]), sampled)
    # token_mean over the 5 + 3 ACTION tokens; the world model's mean over the 2 ECHO tokens
    np.testing.assert_allclose(np.array(batch.weights), np.array([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]) / 8)
    np.testing.assert_allclose(np.array(batch.echo_weights), np.array([[0, 0, 0, 0, 0], [0, 1, 1, 0, 0]]) / 2)
    assert batch.advantages[1, 1:3].tolist() == [0, 0]


def test_the_scores_of_segments_are_those_of_each_alone(policy, episode):
    model = policy
    parts = [episode(0, (4, 2), context="turn"), episode(1, (1,)), episode(2, (3, 5), echo=True)]
    together = score_micro_batch(model, [p.segments for p in parts], 12, temperature=0.7, pad_token_id=0)
    for row, trajectory in enumerate(parts):
        expected = []
        for segment in trajectory.segments:
            logits = model(mx.array(segment.token_ids[None, :]))[0]
            for place in np.flatnonzero(segment.roles):
                # what the world model predicts is not sampled: it is scored at temperature 1
                scaled = logits[int(place) - 1] / (1.0 if segment.roles[place] == Role.ECHO else 0.7)
                expected.append((scaled - mx.logsumexp(scaled))[int(segment.token_ids[place])].item())
        got = together.logprobs[row].tolist()
        assert got[: len(expected)] == pytest.approx(expected, abs=1e-5)
        assert got[len(expected) :] == [0] * (12 - len(expected))


@pytest.mark.parametrize("name", algorithm_names())
def test_a_trajectory_of_many_segments_counts_as_one(policy, episode, name):
    """Advantages and weights depend on the trajectories' tokens and turns, never on how they are laid out."""
    model, algorithm = policy, build(name)
    batches = [
        batch_of(
            model,
            [
                episode(0, (2, 3, 1), reward=1.0, context=context, turn_rewards=(0.5, 0.5, 0.0)),
                episode(0, (4,), reward=0.0, context=context),
                episode(0, (1, 1), reward=0.25, context=context, turn_rewards=(0.25, 0.0)),
            ],
            algorithm,
        )
        for context in ("transcript", "turn")
    ]
    for field in ("advantages", "weights"):
        transcript, turn = (np.array(getattr(batch, field)) for batch in batches)
        np.testing.assert_array_equal(transcript, turn)
    assert [len(segments) for segments in batches[1].segments] == [3, 1, 2]


def test_truncated_rows_stay_in_the_baseline_and_leave_the_loss_and_its_denominator(policy, episode):
    model, algorithm = policy, make_algorithm("grpo", advantage="centred")
    episodes = [
        episode(0, (4, 1), reward=1.0, echo=True),
        episode(0, (2,), reward=0.0, seed=1),
        episode(0, (7, 9), reward=2.0, truncated=True, echo=True),
    ]
    batch = batch_of(model, episodes, algorithm, mask_truncated_rows=True)
    assert batch.advantages[0, 0].item() == 0.0  # 1 less the mean of 1, 0 and 2
    assert batch.advantages[1, 0].item() == -1.0
    assert not np.array(batch.weights[2]).any()
    assert not np.array(batch.echo_weights[2]).any()
    assert np.array(batch.weights)[1, :2] == pytest.approx(1 / 7)  # 5 + 2 tokens
    # more masked tokens change nothing
    longer = batch_of(
        model, [*episodes[:2], episode(0, (30,), reward=2.0, truncated=True)], algorithm, mask_truncated_rows=True
    )
    np.testing.assert_array_equal(np.array(longer.weights[:2, :7]), np.array(batch.weights[:2, :7]))


def kl_of(model, trajectory):
    """log policy - log base of each sampled token of a trajectory with one segment, from plain passes."""
    (segment,) = trajectory.segments
    places = np.flatnonzero(segment.roles == Role.ACTION)

    def logprobs():
        logits_T_V = np.array(model(mx.array(segment.token_ids[None])))[0].astype(np.float64)
        logprobs_T_V = logits_T_V - np.log(np.exp(logits_T_V).sum(axis=-1, keepdims=True))
        return logprobs_T_V[places - 1, segment.token_ids[places]]

    with adapters_disabled(model):
        base = logprobs()
    return logprobs() - base


@pytest.fixture
def one_truncated(episode):
    """A group of three, the last of which is truncated; with its tokens, those that two of them train are 7."""
    return [
        episode(0, (4, 1), reward=1.0),
        episode(0, (2,), reward=0.0, seed=1),
        episode(0, (7, 9), reward=2.0, truncated=True),
    ]


def scored_rows(values):
    return np.flatnonzero(np.array(values).any(axis=1)).tolist()


def test_a_truncated_row_is_in_the_baseline_with_the_kl_that_its_reward_is_charged(policy, one_truncated):
    model, algorithm = policy, make_algorithm("rloo", reward_beta=0.5)
    batch = batch_of(model, one_truncated, algorithm, mask_truncated_rows=True)
    charged = [t.reward - 0.5 * kl_of(model, t).sum() for t in one_truncated]
    assert abs(charged[2] - 2.0) > 0.1  # the KL is seen
    assert batch.advantages[0, 0].item() == pytest.approx(charged[0] - (charged[1] + charged[2]) / 2, abs=1e-4)
    assert batch.advantages[1, 0].item() == pytest.approx(charged[1] - (charged[0] + charged[2]) / 2, abs=1e-4)
    # so it is scored, and that is all: it has no weight, and no update runs it
    assert scored_rows(batch.view.old_logprobs) == scored_rows(batch.view.reference_logprobs) == [0, 1, 2]
    assert scored_rows(batch.weights) == [0, 1]
    _, metrics = batch_gradient(model, batch, Objective(algorithm), max_rows=1)
    assert (metrics["scored_rows"], metrics["forwards/score"]) == (2, 2)
    # a KL in the loss is that of the rows with a weight
    in_loss = batch_of(model, one_truncated, make_algorithm("grpo"), mask_truncated_rows=True, reference=True, old=True)
    assert scored_rows(in_loss.view.old_logprobs) == scored_rows(in_loss.view.reference_logprobs) == [0, 1]


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_tokens_of_a_truncated_row_are_whitened_with_the_others(policy, one_truncated, beta):
    batch = batch_of(policy, one_truncated, make_algorithm("reinforce++", reward_beta=beta), mask_truncated_rows=True)
    # the return to go of a token: the reward less the KL of this token and all that follow
    returns = [t.reward - beta * np.cumsum(kl_of(policy, t)[::-1])[::-1] for t in one_truncated]
    pooled = np.concatenate(returns)
    assert len(pooled) == 5 + 2 + 16
    for row in (0, 1):
        trained = np.array(batch.view.action_mask[row]) == 1
        expected = (returns[row] - pooled.mean()) / (pooled.std() + 1e-6)
        np.testing.assert_allclose(np.array(batch.advantages[row])[trained], expected, atol=1e-4)
    assert scored_rows(batch.weights) == [0, 1]


def test_failed_rows_leave_baseline_loss_and_world_model(policy, episode):
    model, algorithm = policy, make_algorithm("grpo", advantage="centred")
    sound = [episode(0, (4, 1), reward=1.0, echo=True), episode(0, (2,), reward=0.0, seed=1)]
    plain = batch_of(model, sound, algorithm)
    with_failed = batch_of(model, [*sound, episode(0, (3, 2), echo=True, failed=True)], algorithm)
    for field in ("advantages", "weights", "echo_weights"):
        got = np.array(getattr(with_failed, field))
        np.testing.assert_array_equal(got[:2], np.array(getattr(plain, field)))
        assert not got[2].any()


def test_an_episode_that_failed_before_its_first_token_takes_no_place(policy, episode):
    model, algorithm = policy, make_algorithm("grpo")
    empty = replace(episode(0, (1,), failed=True), segments=(), turns=())
    batch = batch_of(model, [empty, episode(0, (2,), reward=1.0), episode(0, (2,), reward=0.0, seed=1)], algorithm)
    assert batch.view.roles.tolist() == [[0, 0], [1, 1], [1, 1]]
    scored = batch_of(model, [empty, episode(0, (2,), reward=1.0)], algorithm, old=True, reference=True)
    assert scored.view.old_logprobs[0].tolist() == [0, 0]
    # nothing but such episodes
    assert batch_of(model, [empty], algorithm, old=True).weights.tolist() == [[0]]


def test_the_share_of_a_minibatch_has_denominators_of_its_own_and_advantages_of_the_whole(policy, episode):
    model, algorithm = policy, make_algorithm("grpo", advantage="centred")
    episodes = [episode(0, (n, 1), reward=r, seed=n, echo=True) for n, r in ((1, 0.0), (2, 1.0), (5, 5.0), (3, 2.0))]
    batch = batch_of(model, episodes, algorithm, old=True)
    part = batch.optimizer_batch([2, 0], algorithm)
    assert part.size == 2
    assert part.advantages[:, 0].tolist() == [3.0, -2.0]  # 5 and 0 less the mean of all four, 2
    assert part.weights[1, 0].item() == pytest.approx(1 / 8)  # 6 and 2 ACTION tokens
    assert part.echo_weights.max().item() == pytest.approx(1 / 4)  # 2 ECHO tokens each
    np.testing.assert_array_equal(np.array(part.view.old_logprobs), np.array(batch.view.old_logprobs)[[2, 0]])


@given(
    lengths=st.lists(st.lists(st.integers(0, 39), min_size=0, max_size=4), min_size=1, max_size=12),
    max_tokens=st.none() | st.integers(1, 200),
    max_rows=st.none() | st.integers(1, 6),
)
def test_a_cut_has_every_row_once_and_keeps_to_its_budgets(lengths, max_tokens, max_rows):
    trajectories = [[part(np.arange(length), 1) for length in row] for row in lengths]
    rows = list(range(0, len(lengths), 2)) or [0]
    cuts = cut_micro_batches(trajectories, rows, max_tokens=max_tokens, max_rows=max_rows, share=False)
    assert sorted(row for cut in cuts for row in cut) == [row for row in rows if lengths[row]]
    for cut in cuts:
        segments = sum(len(lengths[row]) for row in cut)
        padded = segments * max(max(lengths[row]) for row in cut)
        assert len(cut) == 1 or ((max_tokens or padded) >= padded and (max_rows or segments) >= segments)
    widths = [max(lengths[row]) for cut in cuts for row in cut]
    assert widths == sorted(widths, reverse=True)  # neighbours are alike: little padding


@given(
    prompts=st.lists(st.integers(0, 2), min_size=1, max_size=10),
    completions=st.lists(st.integers(1, 12), min_size=10, max_size=10),
    max_tokens=st.none() | st.integers(1, 200),
    max_rows=st.none() | st.integers(1, 6),
)
def test_a_cut_of_rows_that_share_keeps_to_its_budgets_after_sharing(prompts, completions, max_tokens, max_rows):
    trajectories = [
        [part(np.full(5 + 6 * prompt, prompt), completion, key)]
        for key, (prompt, completion) in enumerate(zip(prompts, completions, strict=False))
    ]
    limits = {"max_tokens": max_tokens, "max_rows": max_rows}
    cuts = cut_micro_batches(trajectories, range(len(prompts)), **limits, share=True)
    assert sorted(row for cut in cuts for row in cut) == list(range(len(prompts)))

    def tokens(cut):
        return plan_reading([trajectories[row][0].token_ids[:-1] for row in cut]).tokens

    for cut in cuts:
        assert len(cut) == 1 or ((max_tokens or tokens(cut)) >= tokens(cut) and (max_rows or len(cut)) >= len(cut))


def test_rows_of_a_prompt_stand_together_where_that_saves_tokens_and_by_length_where_not():
    # two prompts of 20 tokens; completions of 1 to 4 tokens, the lengths dealt out in turn
    trajectories = [[part(np.full(20, row % 2), 1 + row // 2, row)] for row in range(8)]
    cuts = cut_micro_batches(trajectories, range(8), max_tokens=None, max_rows=4, share=True)
    assert [sorted(cut) for cut in cuts] == [[1, 3, 5, 7], [0, 2, 4, 6]]
    assert cuts[0] == [7, 5, 3, 1]  # the longest first
    # prompts of one token and completions of 3 and 30: what counts is padding
    trajectories = [[part(np.full(1, row % 2), 30 if row < 4 else 3, row)] for row in range(8)]
    cuts = cut_micro_batches(trajectories, range(8), max_tokens=None, max_rows=4, share=True)
    assert [sorted(cut) for cut in cuts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # prompts of 600 and of 100 tokens have micro-batches of their own, though no limit asks for it: 600 + 4 x 2 and
    # 100 + 4 x 2 tokens; together, 102 of the one prompt and of the four short rows, then 500 of the four long ones
    trajectories = [[part(np.full(600 if row < 4 else 100, row // 4), 3, row)] for row in range(8)]
    cuts = cut_micro_batches(trajectories, range(8), max_tokens=None, max_rows=None, share=True)
    assert cuts == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # prompts of nearly one length do not, and neither do a few tokens
    for first, second in ((120, 100), (60, 10)):
        trajectories = [[part(np.full(first if row < 4 else second, row // 4), 3, row)] for row in range(8)]
        cuts = cut_micro_batches(trajectories, range(8), max_tokens=None, max_rows=None, share=True)
        assert cuts == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # what has no trained token is not read
    untrained = part(np.full(50, 1), 0)
    assert cut_micro_batches(
        [[untrained], [part([1], 3), untrained]], [0, 1], max_tokens=3, max_rows=1, share=True
    ) == [[1, 0]]
    # a budget of tokens counts a prompt once: 20 + 4 x 3 tokens are read of the first prompt's rows
    trajectories = [[part(np.full(20, 0), 4, row)] for row in range(4)]
    assert len(cut_micro_batches(trajectories, range(4), max_tokens=32, max_rows=None, share=True)) == 1
    assert len(cut_micro_batches(trajectories, range(4), max_tokens=32, max_rows=None, share=False)) == 4
