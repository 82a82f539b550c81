"""Tasks come in an endless order that depends on the seed and the position alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.env import Task, make_env
from mlxrl.rollout import group_requests
from mlxrl.train.loader import TaskLoader

SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=12)


@given(tasks=st.integers(1, 12), seed=SEEDS, sizes=SIZES)
def test_every_epoch_has_every_task_once_whatever_the_batch_sizes_and_the_seed(tasks, seed, sizes):
    loader = TaskLoader(range(tasks), seed)
    drawn = [group for size in sizes for group in loader.next(size)]
    assert [group.id for group in drawn] == list(range(sum(sizes)))  # a task drawn twice makes two groups
    for start in range(0, len(drawn), tasks):
        epoch = Counter(group.task for group in drawn[start : start + tasks])
        assert epoch == Counter(range(tasks)) or (start + tasks > len(drawn) and max(epoch.values()) == 1)


@given(
    rows=st.lists(st.sampled_from("ab"), min_size=1, max_size=9), seed=SEEDS, sizes=SIZES, group_size=st.integers(1, 4)
)
def test_a_row_is_played_as_one_group_and_equal_rows_each_as_its_own(rows, seed, sizes, group_size):
    # two rows may be equal in all but their place
    tasks = [Task(prompt, {"answer": prompt}, f"tasks.jsonl:{line}") for line, prompt in enumerate(rows)]
    factory = make_env("arithmetic").make
    loader = TaskLoader(tasks, seed)
    played = []
    for step, size in enumerate(sizes):
        groups = loader.next(size)
        played += group_requests(
            [group.task for group in groups],
            factory,
            group_size=group_size,
            seed=seed,
            step=step,
            group_ids=[group.id for group in groups],
        )
    in_groups = {}
    for request in played:
        in_groups.setdefault(request.group_id, []).append((request.task.id, request.sample_index))
    for number, samples in in_groups.items():
        assert samples == [(samples[0][0], index) for index in range(group_size)], number
    order = [in_groups[number][0][0] for number in range(sum(sizes))]
    for start in range(0, len(order) - len(rows) + 1, len(rows)):
        assert sorted(order[start : start + len(rows)]) == sorted(task.id for task in tasks)


@given(tasks=st.integers(1, 9), seed=SEEDS, sizes=SIZES, data=st.data())
def test_a_loader_set_to_a_position_goes_on_where_the_other_stood(tasks, seed, sizes, data):
    broken_off = data.draw(st.integers(0, len(sizes)))
    unbroken = TaskLoader(range(tasks), seed)
    whole = [unbroken.next(size) for size in sizes]
    resumed = TaskLoader(range(tasks), seed)
    resumed.position = sum(sizes[:broken_off])
    assert [resumed.next(size) for size in sizes[broken_off:]] == whole[broken_off:]
    assert resumed.position == unbroken.position


@given(tasks=st.integers(1, 9), seed=SEEDS, sizes=SIZES, looks=st.integers(0, 20))
def test_looking_ahead_draws_nothing(tasks, seed, sizes, looks):
    loader, other = TaskLoader(range(tasks), seed), TaskLoader(range(tasks), seed)
    for size in sizes:
        ahead = loader.peek(looks)
        drawn = loader.next(size)
        assert drawn == other.next(size)
        assert ahead[:size] == drawn[:looks]


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        loader = TaskLoader(range(20), seed)
        loader.position = 20 * epoch
        return [group.task for group in loader.next(20)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_no_tasks_at_all_are_refused():
    with pytest.raises(ValueError, match="no tasks to train on"):
        TaskLoader([], 0)
