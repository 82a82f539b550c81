"""What went wrong in a step, and when enough of it ends a run."""

import math
from collections.abc import Sequence
from typing import Any

from mlxrl.env import Message, as_messages
from mlxrl.rollout import Trajectory
from mlxrl.train.config import TrainConfig
from mlxrl.train.errors import DynamicSamplingError, RewardError, RunError
from mlxrl.train.metrics import Metrics
from mlxrl.train.rewards import RewardFault, RewardLog
from mlxrl.train.run_folder import RunFolder, RunState
from mlxrl.train.step import Step

# Consecutive steps with numbers that are not finite, after which a run stops: the policy is beyond repair by then.
MAX_NONFINITE_STEPS = 5
# Consecutive steps in which a filter keeps no group, after which a run stops, where the config does not say.
MAX_SKIPPED_STEPS = 10
# Consecutive steps in which no trajectory had a reward, after which a run stops: environment or reward is broken.
MAX_UNSCORED_STEPS = 3
# Consecutive steps in which a reward function failed on every row, after which a run stops: it will not mend itself.
MAX_FAILING_STEPS = 3
# Characters of a prompt that a warning shows.
MOST_SHOWN = 80


def count_faults(state: RunState, step: Step) -> None:
    """Count the steps in a row that were not finite, that kept no group, that scored nothing, that a reward failed."""
    finite = _why_not_finite(step.metrics) is None
    state.nonfinite_in_a_row = 0 if finite else state.nonfinite_in_a_row + 1
    state.uninformative_in_a_row = 0 if step.groups.kept else state.uninformative_in_a_row + 1
    scored = any(trajectory.reward is not None for trajectory in step.groups.sampled)
    state.unscored_in_a_row = 0 if scored else state.unscored_in_a_row + 1
    log = step.groups.reward_log
    if log.asked:  # a step whose every episode failed says nothing about its rewards
        failing = {fault.reward for fault in log.faults if log.failed(fault.reward) == log.asked}
        state.failing_rewards = {name: state.failing_rewards.get(name, 0) + 1 for name in sorted(failing)}


def ending_fault(state: RunState, step: Step, config: TrainConfig, folder: RunFolder) -> RunError | None:
    """The error that ends the run, where too many steps in a row came to nothing."""
    if state.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
        # the update of the last finite step may be what broke the policy; those before it led to a finite step
        sound = folder.saved_before(state.step - state.nonfinite_in_a_row)
        start = "" if sound is None else f", from adapter = '{sound}', the last checkpoint known to be sound"
        return RunError(
            f"the policy or its gradient was not finite in {state.nonfinite_in_a_row} steps in a row; start a new run "
            f"with a lower optimizer.learning_rate{start}."
        )
    for fault in step.groups.reward_log.faults:
        steps = state.failing_rewards.get(fault.reward, 0)
        if steps >= MAX_FAILING_STEPS:
            return RewardError(
                f"reward {fault.reward!r} failed on every row in {steps} steps in a row; "
                f"it {fault}; mend it and resume."
            )
    if state.unscored_in_a_row >= MAX_UNSCORED_STEPS:
        reasons = [trajectory.error for trajectory in step.groups.sampled if trajectory.error is not None]
        why = f"the first failed with: {reasons[0]}" if reasons else "every reward function abstained"
        return RunError(f"no trajectory had a reward in {state.unscored_in_a_row} steps in a row; {why}.")
    if state.uninformative_in_a_row >= (config.algorithm.max_skipped_steps or MAX_SKIPPED_STEPS):
        return DynamicSamplingError(
            f"no group had rewards that differ in {state.uninformative_in_a_row} steps in a row; the tasks are too "
            "easy or too hard for the policy: choose others, raise group_size, or turn algorithm.dynamic_sampling off."
        )
    return None


def broken_end(state: RunState, config: TrainConfig, folder: RunFolder) -> list[dict[str, Any]]:
    """A line for events.jsonl where the run is over and its last steps were not finite."""
    if state.step < config.steps or not state.nonfinite_in_a_row:
        return []
    sound = folder.saved_before(state.step - state.nonfinite_in_a_row)
    known = "" if sound is None else f"; {sound} is the last checkpoint known to be sound"
    reason = f"the run ends with {state.nonfinite_in_a_row} steps that were not finite: its policy may be broken{known}"
    return [{"step": state.step, "event": "broken", "reason": reason}]


def fault_events(step: Step) -> list[dict[str, Any]]:
    """Lines for events.jsonl: what failed, and updates that were skipped."""
    number, metrics = int(step.metrics["step"]), step.metrics
    events = failure_events(number, step.groups.sampled, step.groups.reward_log)
    if metrics["skipped"]:
        reason = _why_not_finite(metrics) or ("no row had anything to teach" if step.batch else "no group was kept")
        skipped = {"updates": metrics["skipped"], "grad_norm": metrics["grad_norm"], "reason": reason}
        events.append({"step": number, "event": "skipped", **skipped})
    return events


def failure_events(step: int, trajectories: Sequence[Trajectory], log: RewardLog) -> list[dict[str, Any]]:
    """A line for each way in which a reward function, an episode, or the end of an environment failed.

    Args:
        step: steps taken.
        trajectories: what was played.
        log: what went wrong with their rewards.
    """
    unrewarded = {row for fault in log.faults for row in fault.rows}
    failed: dict[str, list[tuple[int, int]]] = {}
    unclosed: dict[str, list[tuple[int, int]]] = {}
    for t in trajectories:
        row = (t.group_id, t.sample_index)
        if t.error is not None and row not in unrewarded:
            failed.setdefault(t.error, []).append(row)
        if t.close_error is not None:
            unclosed.setdefault(t.close_error, []).append(row)
    rewards = [("reward", fault.reason, list(fault.rows), _as_fields(fault)) for fault in log.faults]
    others = [
        (event, reason, rows, {})
        for event, by in (("failed", failed), ("close", unclosed))
        for reason, rows in by.items()
    ]
    return [
        {"step": step, "event": event, **more, "reason": reason, "count": len(rows), "rows": rows}
        for event, reason, rows, more in (*rewards, *others)
    ]


def _as_fields(fault: RewardFault) -> dict[str, str]:
    """What an event tells of a fault besides its reason and rows."""
    return {"reward": fault.reward} | ({"example": fault.example} if fault.example else {})


def watch_groups(state: RunState, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """A line for events.jsonl, once a run, when members of a group did not begin with the same words.

    Args:
        state: where the run stands; remembers that it was said.
        trajectories: those of the step just taken.
    """
    if state.group_warned:
        return []
    begun: dict[int, Trajectory] = {}
    for trajectory in trajectories:
        if not trajectory.turns:
            continue
        first = begun.setdefault(trajectory.group_id, trajectory)
        ours, theirs = (as_messages(t.turns[0].observation) for t in (trajectory, first))
        if _words(ours) == _words(theirs):
            continue
        state.group_warned = True
        reason = (
            f"samples {first.sample_index} and {trajectory.sample_index} of group {trajectory.group_id} begin with "
            f"different prompts, {_shown(theirs)} and {_shown(ours)}, though their rewards are compared with one "
            "another; draw a start from the factory's arguments task and seed alone, not from global random state"
        )
        return [{"step": state.step, "event": "group_differs", "group": trajectory.group_id, "reason": reason}]
    return []


def _words(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Who says what; what else a message carries may be anything."""
    return [(message["role"], message["content"]) for message in messages]


def _shown(messages: Sequence[Message]) -> str:
    """The beginning of a prompt, in quotes."""
    text = " ".join(message["content"] for message in messages)
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ...")


def _why_not_finite(metrics: Metrics) -> str | None:
    # a policy that is no number draws one token for ever: its rewards are constant, and it has no gradient at all
    if metrics["nonfinite_samples"]:
        return f"{metrics['nonfinite_samples']:.0f} trajectories have log-probs that are not finite"
    if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
        return "the loss or its gradient is not finite"
    return None
