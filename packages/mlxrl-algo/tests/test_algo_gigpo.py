"""GiGPO on three trajectories of one task, with states before the action and rewards per turn.

1: (A, 0) (B, 1)        2: (A, 0) (A, 0) (C, 1)        3: (A, 0) (B, 0)
"""

# pyright: reportIndexIssue=false, reportOperatorIssue=false
# Tolist() and item() are typed as any list or scalar.

from collections import namedtuple
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.algo import (
    AlgorithmBatch,
    GiGPOAlgorithm,
    GRPOAlgorithm,
    TrajectoryAlgorithm,
    anchor_ids,
    anchor_metrics,
    discounted_returns,
    make_algorithm,
)

Turn = namedtuple("Turn", ["state_id", "reward"])
Trajectory = namedtuple("Trajectory", ["turns"])

STATES = [["A", "B"], ["A", "A", "C"], ["A", "B"]]
REWARDS = [[0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0]]


def trajectories(states=STATES, rewards=REWARDS):
    return [
        Trajectory([Turn(s, r) for s, r in zip(row_states, row_rewards, strict=True)])
        for row_states, row_rewards in zip(states, rewards, strict=True)
    ]


def batch_of(states=STATES, rewards=REWARDS, group_ids=None, tokens_per_turn=2, **changes):
    """Return the trajectories with two action tokens a turn, a masked token between turns and the return as reward."""
    width = max(len(row) for row in states) * (tokens_per_turn + 1)
    roles, turns = [], []
    for row in states:
        row_roles = ([1] * tokens_per_turn + [0]) * len(row)
        roles.append(row_roles + [0] * (width - len(row_roles)))
        turns.append([t // (tokens_per_turn + 1) for t in range(width)])
    count = len(states)
    fields = {
        "rewards": [[sum(row)] for row in rewards],
        "reward_weights": [1.0],
        "group_ids": group_ids or [0] * count,
        "roles": mx.array(roles),
        "turns": mx.array(turns),
        "turn_rewards": rewards,
        "state_ids": states,
        "valid": [True] * count,
        "truncated": [False] * count,
    }
    return AlgorithmBatch(**{**fields, **changes})


def per_turn(advantages, states=STATES, tokens_per_turn=2):
    """Return the value of the first action token of every turn."""
    rows = advantages.tolist()
    return [rows[i][k * (tokens_per_turn + 1)] for i, row in enumerate(states) for k in range(len(row))]


def approx(values, tolerance=1e-6):
    return pytest.approx(values, abs=tolerance)


def test_returns_to_go_are_discounted_per_turn():
    # 1: 0.95 * 1, 1. 2: 0.95^2 = 0.9025, 0.95, 1. 3: 0, 0.
    assert [discounted_returns(row, 0.95) for row in REWARDS] == [
        approx([0.95, 1.0]),
        approx([0.9025, 0.95, 1.0]),
        [0.0, 0.0],
    ]


def test_a_state_visited_twice_counts_twice_in_its_anchor_group():
    # State A: returns 0.95, 0.9025, 0.95 and 0, mean 0.700625; B: 1 and 0; C stands alone.
    # Episodes 1, 1, 0: A^E = 1/3, 1/3, -2/3.
    algorithm = GiGPOAlgorithm(gamma=0.95, normalization="center")
    step = [0.249375, 0.5, 0.201875, 0.249375, 0.0, -0.700625, -0.5]
    episode = [1 / 3] * 5 + [-2 / 3] * 2
    expected = [e + s for e, s in zip(episode, step, strict=True)]
    assert expected == approx(
        [0.582708333, 0.833333333, 0.535208333, 0.582708333, 0.333333333, -1.367291667, -1.166666667]
    )
    assert algorithm.compute_step_advantages(trajectories(), 3) == approx(expected)
    assert per_turn(algorithm.advantages(batch_of())) == approx(expected)


def test_omega_weighs_the_turn_against_the_episode():
    algorithm = GiGPOAlgorithm(gamma=0.95, normalization="center", omega=0.5)
    # The first turn: 1/3 + 0.5 * 0.249375 = 0.458021.
    assert algorithm.compute_step_advantages(trajectories(), 3)[0] == approx(0.458021)


def test_std_divides_both_levels_by_their_groups():
    algorithm = GiGPOAlgorithm(gamma=1.0, eps=0.0)
    # Episodes 1, 1, 0: mean 2/3, std sqrt(2/9) = 0.471405: 0.707107, 0.707107, -1.414214.
    # State A: returns 1, 1, 1, 0: mean 0.75, std 0.433013: 0.577350 and -1.732051; B: 1, 0: 1 and -1; C alone 0.
    expected = [1.284457, 1.707107, 1.284457, 1.284457, 0.707107, -3.146264, -2.414214]
    assert algorithm.compute_step_advantages(trajectories(), 3) == approx(expected)


def test_the_anchor_is_the_state_in_which_the_action_was_chosen():
    # From "start", "finish" ends with reward 1 and "loop" stays with 0. One trajectory finishes, one loops first: all
    # three turns were taken in "start" with a return of 1. Ids read after the step would split them.
    states, rewards = [["start"], ["start", "start"]], [[1.0], [0.0, 1.0]]
    algorithm = GiGPOAlgorithm(normalization="center")
    assert algorithm.compute_step_advantages(trajectories(states, rewards), 2) == (0.0, 0.0, 0.0)
    assert algorithm.step_metrics(batch_of(states, rewards)) == {"anchor_group_size": 3.0, "anchor_share": 1.0}


def test_equal_states_of_different_tasks_are_different_anchors():
    # Pooled over tasks, state S would have mean 0.5 and give +-0.5; within each task every turn stands alone.
    states, rewards = [["S"], ["X"], ["S"], ["Y"]], [[1.0], [1.0], [0.0], [0.0]]
    algorithm = GiGPOAlgorithm(normalization="center")
    assert algorithm.compute_step_advantages(trajectories(states, rewards), ["a", "a", "b", "b"]) == (0.0,) * 4


def test_a_long_trajectory_counts_once_in_the_episode_mean():
    # Lengths 1 and 10 with returns 1 and 0: mean 0.5, not 1/11, so A^E = 0.5 and -0.5.
    states = [["a0"], [f"b{k}" for k in range(10)]]
    rewards = [[1.0], [0.0] * 10]
    algorithm = GiGPOAlgorithm(normalization="center")
    assert algorithm.compute_step_advantages(trajectories(states, rewards), 2) == approx([0.5] + [-0.5] * 10)


def test_the_advantage_is_painted_on_the_tokens_of_its_turn_and_nothing_else():
    advantages = GiGPOAlgorithm(normalization="center").advantages(batch_of()).tolist()
    # Two tokens a turn, one masked between turns, padding after trajectory 1's two turns.
    assert advantages[0][0] == advantages[0][1] != advantages[0][3] == advantages[0][4]
    assert advantages[0][2] == advantages[0][5] == advantages[0][6] == 0.0


def test_omega_zero_is_grpo_over_episodes():
    batch = batch_of()
    assert GiGPOAlgorithm(omega=0.0).advantages(batch).tolist() == GRPOAlgorithm().advantages(batch).tolist()
    assert GiGPOAlgorithm(omega=1.0).advantages(batch).tolist() != GRPOAlgorithm().advantages(batch).tolist()


@pytest.mark.parametrize("omega", [0.0, 1.0])
def test_one_step_trajectories_without_states_are_grpo_in_loss_and_gradient(omega):
    batch = AlgorithmBatch.single_turn(
        rewards=[1, 0, 0, 1, 3, 2], group_structure=2, action_mask=mx.array([[1, 1, 0], [1, 0, 0]] * 3)
    )

    def loss_and_gradient(algorithm):
        advantages = algorithm.advantages(batch)

        def loss(x):
            return algorithm.compute_loss(
                policy_logprobs=x, old_policy_logprobs=None, advantages=advantages, action_mask=batch.action_mask
            ).loss

        value, gradient = mx.value_and_grad(loss)(mx.full((6, 3), -0.4))
        return value.item(), gradient.tolist()

    assert loss_and_gradient(GiGPOAlgorithm(omega=omega)) == loss_and_gradient(GRPOAlgorithm())


def test_what_the_total_holds_beyond_turn_rewards_is_earned_in_the_last_turn():
    # A judge adds 2 to trajectory 1 alone: episodes 3, 1, 0, mean 4/3. Returns of A: 3, 1, 1, 0, mean 1.25; of B: 3, 0.
    batch = replace(batch_of(), rewards=[[1.0, 2.0], [1.0, 0.0], [0.0, None]], reward_weights=[1.0, 1.0])
    step = [1.75, 1.5, -0.25, -0.25, 0.0, -1.25, -1.5]
    episode = [5 / 3] * 2 + [-1 / 3] * 3 + [-4 / 3] * 2
    got = per_turn(GiGPOAlgorithm(normalization="center").advantages(batch))
    assert got == approx([e + s for e, s in zip(episode, step, strict=True)])


def test_failed_trajectories_leave_episodes_and_anchors():
    states, rewards = [*STATES, ["A", "B"]], [*REWARDS, [0.0, 50.0]]
    batch = batch_of(states, rewards, valid=[True, True, True, False])
    algorithm = GiGPOAlgorithm(gamma=0.95, normalization="center")
    assert per_turn(algorithm.advantages(batch), states)[:7] == approx(per_turn(algorithm.advantages(batch_of())))
    assert algorithm.advantages(batch).tolist()[3] == [0.0] * 9
    assert algorithm.step_metrics(batch) == algorithm.step_metrics(batch_of())


@pytest.mark.parametrize("reward_beta", [0.0, 0.1])
def test_a_failed_trajectory_may_break_off_in_a_turn_it_never_finished(reward_beta):
    # The tokens of the last row say turn 3, but only one turn was recorded.
    zeros = mx.zeros((4, 9))
    whole = batch_of(
        [*STATES, ["A"]],
        [*REWARDS, [0.0]],
        valid=[True, True, True, False],
        old_logprobs=zeros,
        reference_logprobs=zeros,
    )
    broken = replace(whole, turns=mx.where(mx.arange(4)[:, None] == 3, 3, whole.turns))
    algorithm = GiGPOAlgorithm(reward_beta=reward_beta)
    assert algorithm.advantages(broken).tolist() == algorithm.advantages(whole).tolist()


def test_the_kl_in_the_reward_is_charged_to_its_turn():
    # One turn more likely than the reference by 1 nat on each of its two tokens: trajectory 1, turn 1 (state B).
    # At beta 0.1 the reward 1 becomes 0.8; returns of A: 0.8, 1, 1, 0, mean 0.7; B: 0.8, 0; episodes 0.8, 1, 0.
    old = mx.zeros((3, 9))
    ref = mx.array([[0.0, 0.0, 5.0, -1.0, -1.0, 5.0, 5.0, 5.0, 5.0], [0.0] * 9, [0.0] * 9])
    algorithm = GiGPOAlgorithm(normalization="center", reward_beta=0.1)
    got = per_turn(algorithm.advantages(batch_of(old_logprobs=old, reference_logprobs=ref)))
    step = [0.1, 0.4, 0.3, 0.3, 0.0, -0.7, -0.4]
    episode = [0.2, 0.2, 0.4, 0.4, 0.4, -0.6, -0.6]
    assert got == approx([e + s for e, s in zip(episode, step, strict=True)])


def test_repeats_within_a_trajectory_can_be_left_out():
    # Trajectory 2's second visit of A stands alone: A has 0.95, 0.9025 and 0, mean 0.6175.
    algorithm = GiGPOAlgorithm(gamma=0.95, normalization="center", exclude_repeats=True)
    step = [0.3325, 0.5, 0.285, 0.0, 0.0, -0.6175, -0.5]
    episode = [1 / 3] * 5 + [-2 / 3] * 2
    assert algorithm.compute_step_advantages(trajectories(), 3) == approx(
        [e + s for e, s in zip(episode, step, strict=True)]
    )


def test_similar_states_join_in_any_order_of_the_rows():
    # "room 1" and "room 2" share 5 of 6 letters: ratio 10 / 12 = 0.83; "cellar" is far from both.
    states = [["room 1"], ["room 2"], ["cellar"]]
    near, far = anchor_ids(states, [0, 0, 0], similarity=0.8), anchor_ids(states, [0, 0, 0], similarity=0.9)
    assert near[0] == near[1] != near[2]
    assert len({far[0][0], far[1][0], far[2][0]}) == 3
    assert anchor_ids(states[::-1], [0, 0, 0], similarity=0.8) == near[::-1]
    with pytest.raises(ValueError, match="state_ids must be text for similarity anchors, got 7"):
        anchor_ids([[7]], [0], similarity=0.8)


def test_an_unknown_state_stands_alone():
    assert anchor_metrics(anchor_ids([[None], [None]], [0, 0])) == {"anchor_group_size": 1.0, "anchor_share": 0.0}


def test_metrics_count_turns_that_share_their_state():
    # Anchors A (4 turns), B (2) and C (1): mean 7 / 3; 6 of the 7 turns share.
    metrics = GiGPOAlgorithm().step_metrics(batch_of())
    assert metrics == {"anchor_group_size": approx(7 / 3), "anchor_share": approx(6 / 7)}
    assert anchor_metrics([]) == {"anchor_group_size": 0.0, "anchor_share": 0.0}


@given(order=st.permutations(range(3)))
def test_permuting_trajectories_permutes_their_advantages(order):
    algorithm = GiGPOAlgorithm(gamma=0.9)
    straight = algorithm.advantages(batch_of())
    shuffled = algorithm.advantages(batch_of().take(order))
    assert mx.max(mx.abs(shuffled - straight[mx.array(order)])).item() < 1e-6


def test_an_action_in_a_turn_that_is_not_there_is_refused():
    batch = batch_of(turns=mx.full((3, 9), 4))
    with pytest.raises(ValueError, match=r"turns must lie in \[0, 2\) at the action tokens of row 0, .* got 4"):
        GiGPOAlgorithm().advantages(batch)


def test_only_gigpo_is_a_trajectory_algorithm():
    assert isinstance(make_algorithm("gigpo"), TrajectoryAlgorithm)
    assert not isinstance(make_algorithm("grpo"), TrajectoryAlgorithm)
