"""A reward function that hangs costs the rows that it hangs on, and the time of a few of them."""

import threading

from mlxrl.train import NamedReward, RewardFault, RewardLog, score_rewards


def test_a_row_that_hangs_fails_and_its_thread_is_left_behind(episode):
    episodes, log, release = [episode(0, (n + 1,), seed=n) for n in range(3)], RewardLog(), threading.Event()

    def slow(completion_ids):
        if any(len(ids) == 2 for ids in completion_ids):
            release.wait()
        return [1.0 for _ in completion_ids]

    before = set(threading.enumerate())
    scored = score_rewards(episodes, [NamedReward("slow", 1.0, slow, timeout=0.2)], log)
    left = set(threading.enumerate()) - before
    assert {thread.name for thread in left} == {"mlxrl-reward"}
    assert [t.error for t in scored] == [None, "reward 'slow' took longer than 0.2 s", None]
    assert log.faults == [RewardFault("slow", "took longer than 0.2 s", ((0, 1),))]
    assert len(left) == 2  # the call with all rows, and that with the row that hangs
    assert all(thread.daemon for thread in left)
    release.set()
    for thread in left:
        thread.join()


def ask_hanging(episode, groups, hangs):
    """The rows that a function was asked for one by one, and what went wrong; it hangs where `hangs(group, sample)`."""
    release, asked, log = threading.Event(), [], RewardLog()

    def hanging(trajectories):
        asked.append([(t.group_id, t.sample_index) for t in trajectories])
        if any(hangs(*row) for row in asked[-1]):
            release.wait()
        return [1.0 for _ in trajectories]

    rows = [episode(group, (2,), seed=sample) for group in range(groups) for sample in range(4)]
    scored = score_rewards(rows, [NamedReward("f", 1.0, hanging, timeout=0.05)], log)
    release.set()
    assert len(asked[0]) == len(rows)
    return [row for (row,) in asked[1:]], log.faults, [t.reward for t in scored]


def test_a_group_that_hangs_costs_its_own_rows_alone(episode):
    asked, faults, rewards = ask_hanging(episode, 3, lambda group, sample: group == 1)
    # of group 1 two rows hang, and two are not asked for
    assert asked == [*((0, n) for n in range(4)), (1, 0), (1, 1), *((2, n) for n in range(4))]
    assert rewards == [1.0] * 4 + [None] * 4 + [1.0] * 4
    assert [fault.rows for fault in faults] == [((1, 0), (1, 1)), ((1, 2), (1, 3))]
    assert faults[1].reason == "was not asked for this row after 2 of its group took longer than their time"


def test_after_six_rows_that_hang_the_others_fail_unasked(episode):
    asked, faults, _ = ask_hanging(episode, 5, lambda group, sample: sample != 1)
    # of each group samples 0 and 2; the last group is not asked, and neither are samples 3 of those before
    assert asked == [(group, sample) for group in range(3) for sample in range(3)]
    reasons = [fault.reason for fault in faults]
    assert reasons[2] == "was not asked for this row after 6 others took longer than their time"
    # sample 3 of group 2, and groups 3 and 4
    assert [len(fault.rows) for fault in faults] == [6, 2, 9]
