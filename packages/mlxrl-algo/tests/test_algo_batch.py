import math

import mlx.core as mx
import pytest

from mlxrl.algo import AlgorithmBatch, Role, group_ids_of

FIELDS = {
    "rewards": [[1.0, 2.0], [None, 3.0], [None, None]],
    "reward_weights": [1.0, 0.5],
    "group_ids": ["a", "a", "b"],
    "roles": mx.array([[1, 2, 0], [1, 1, 1], [0, 0, 1]]),
    "turns": mx.zeros((3, 3), dtype=mx.int32),
    "turn_rewards": [[], [1.0], [2.0, 3.0]],
    "state_ids": [["s"], ["s"], ["s", "t"]],
    "valid": [True, False, True],
    "truncated": [False, False, True],
}


def make(**changes):
    return AlgorithmBatch(**{**FIELDS, **changes})


def test_masks_follow_the_roles():
    assert make().action_mask.tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 1]]
    assert make().echo_mask.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert make().action_mask.dtype == mx.float32
    assert [int(role) for role in (Role.MASKED, Role.ACTION, Role.ECHO)] == [0, 1, 2]


def test_the_total_reward_is_weighted_and_none_where_nothing_counts():
    # 1 * 1 + 0.5 * 2 = 2; the second failed, though its second function gave 3; in the third all abstain.
    assert make().total_rewards == [2.0, None, None]
    assert make().counted == [True, False, False]


def test_without_reward_functions_the_environment_pays():
    batch = make(rewards=[[], [], []], reward_weights=[], valid=[True] * 3)
    assert batch.total_rewards == [0.0, 1.0, 5.0]


def test_rows_are_taken_in_the_given_order():
    taken = make(sampler_logprobs=mx.array([[0.0] * 3, [1.0] * 3, [2.0] * 3])).take([2, 0])
    assert taken.group_ids == ["b", "a"]
    assert taken.truncated == [True, False]
    assert taken.roles.tolist() == [[0, 0, 1], [1, 2, 0]]
    assert taken.sampler_logprobs is not None
    assert taken.sampler_logprobs[:, 0].tolist() == [2.0, 0.0]
    assert taken.old_logprobs is None


def test_a_single_turn_batch_needs_rewards_groups_and_a_mask():
    batch = AlgorithmBatch.single_turn(rewards=[1, None], group_structure=2, action_mask=mx.array([[1.0, 0.0]] * 2))
    assert batch.rewards == [[1], [None]]
    assert batch.group_ids == [0, 0]
    assert batch.roles.tolist() == [[1, 0], [1, 0]]
    several = AlgorithmBatch.single_turn(
        rewards=[[1, 2], [3, 4]], group_structure=["x", "y"], action_mask=mx.ones((2, 1)), reward_weights=[1.0, 10.0]
    )
    assert several.total_rewards == [21.0, 43.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": mx.zeros(3)}, "roles must have rank 2, got rank 1"),
        ({"group_ids": ["a"]}, "group_ids must have one entry per row of roles, 3, got 1"),
        ({"rewards": [[1.0, 2.0]]}, "rewards must have one entry per row of roles, 3, got 1"),
        ({"valid": [True] * 4}, "valid must have one entry per row of roles, 3, got 4"),
        ({"turns": mx.zeros((3, 2))}, r"turns must have the shape of roles, \(3, 3\), got \(3, 2\)"),
        ({"old_logprobs": mx.zeros((1, 3))}, r"old_logprobs must have the shape of roles, \(3, 3\), got \(1, 3\)"),
        ({"reward_weights": [1.0]}, "rewards must have one entry per reward weight, 1, got 2 in row 0"),
        ({"rewards": [[1.0, math.nan]] * 3}, r"rewards must be finite \(None abstains\), got nan in row 0"),
        ({"turn_rewards": [[], [1.0], [2.0]]}, "turn_rewards and state_ids .* got 1 and 2 in row 2"),
        ({"turn_rewards": [[], [math.inf], [2.0, 3.0]]}, "turn_rewards must be finite .*, got inf in row 1"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_both_values(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_groups_are_a_size_or_ids():
    assert group_ids_of(2, 4) == [0, 0, 1, 1]
    assert group_ids_of(["x", "y"], 2) == ["x", "y"]
    with pytest.raises(ValueError, match="divides the 4 rows, got 0"):
        group_ids_of(0, 4)
