"""Answers that a reward cannot read: those rows are left unscored, which is allowed, and told."""

from mlxrl.env import Task, answer_tag, numeric_match
from mlxrl.train.tasks import Curriculum


def unread_answers(curriculum: Curriculum) -> tuple[str, ...]:
    """One sentence for each reward that compares numbers where the answers of tasks hold none.

    Args:
        curriculum: what is learned.
    """
    tasks = [task for task in (*curriculum.train, *curriculum.held_out) if isinstance(task, Task)]
    answers, blank = [task.columns.get("answer") for task in tasks], [""] * len(tasks)
    told: list[str] = []
    for reward in curriculum.rewards:
        function = reward.function
        if function is None or function not in (numeric_match, answer_tag):
            continue
        values = function(blank, blank, answer=answers)  # None where there is nothing to compare with
        unread = [task for task, value in zip(tasks, values, strict=True) if value is None]
        if unread:
            told.append(
                f"rewards {reward.name!r} leaves {len(unread)} of {len(tasks)} tasks unscored, whose answer holds no "
                f"number; the first is {unread[0].id!r} with {unread[0].columns.get('answer')!r}."
            )
    return tuple(told)
