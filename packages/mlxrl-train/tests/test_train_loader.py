"""Tasks come in an endless order that depends on the seed and the position alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.train.loader import TaskLoader


@given(tasks=st.integers(1, 12), seed=st.integers(0, 2**40), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_every_epoch_has_every_task_once_whatever_the_batch_sizes_and_the_seed(tasks, seed, sizes):
    loader = TaskLoader(range(tasks), seed)
    drawn = [group for size in sizes for group in loader.next(size)]
    assert [group.id for group in drawn] == list(range(sum(sizes)))  # a task drawn twice makes two groups
    for start in range(0, len(drawn) - tasks + 1, tasks):
        assert Counter(group.task for group in drawn[start : start + tasks]) == Counter(range(tasks))


@given(tasks=st.integers(1, 9), before=st.integers(0, 30), after=st.integers(1, 30))
def test_a_loader_set_to_a_position_goes_on_where_the_other_stood(tasks, before, after):
    unbroken = TaskLoader(range(tasks), 3)
    unbroken.next(before)
    resumed = TaskLoader(range(tasks), 3)
    resumed.position = before
    assert resumed.next(after) == unbroken.next(after)


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        loader = TaskLoader(range(20), seed)
        loader.position = 20 * epoch
        return [group.task for group in loader.next(20)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_tasks_that_do_not_fit_are_passed_over_and_counted():
    loader = TaskLoader(range(6), 0, fits=lambda task: task % 2 == 0)
    drawn = [group.task for group in loader.next(6)]  # two epochs of three that fit
    assert Counter(drawn) == Counter([0, 2, 4] * 2)
    # the three odd tasks of the first epoch, and those of the second up to the last that fits
    assert loader.passed_over == loader.position - 6
    assert 3 <= loader.passed_over <= 6


@pytest.mark.parametrize("seed", range(20))
def test_one_task_that_fits_is_found_in_every_epoch_wherever_it_stands(seed):
    # first in one epoch and last in the next, it has 2 (n - 1) others in between
    loader = TaskLoader(range(4), seed, fits=lambda task: task == 1)
    assert [group.task for group in loader.next(10)] == [1] * 10


def test_tasks_none_of_which_fits_end_in_an_error():
    loader = TaskLoader(range(5), 0, fits=lambda task: False)
    with pytest.raises(ValueError, match="every prompt is longer than max_prompt_len; raise it or shorten"):
        loader.next(1)


def test_no_tasks_at_all_are_refused():
    with pytest.raises(ValueError, match="no tasks to train on"):
        TaskLoader([], 0)
