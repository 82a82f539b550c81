"""What rollouts sample from where the config leaves it open, and whether the merged copy still is the policy."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from mlxrl.env import Environment, Message, StepResult, SyncEnv
from mlxrl.policy import ModelError
from mlxrl.rollout import RolloutRequest, group_requests
from mlxrl.train.memory_watch import plan_to_watch
from mlxrl.train.metrics import Metrics
from mlxrl.train.run_folder import CHOICE, RunState
from mlxrl.train.session import Session

Weights = Literal["shared", "merged"]

# A rollout is timed at these tokens an action; longer ones cost as much more a token as the second does over the first,
# whose time is that of reading prompts and of merging. The fastest of a few counts: the rest is noise.
FEW_TOKENS, SOME_TOKENS = 2, 34
REPEATS = 3
# The share of a rollout's time that a merged copy must save to be worth its memory and its rounding.
LEAST_GAIN = 0.1
# Mean difference of log-probs above which a merged copy no longer counts as the policy. A healthy one is off by the
# rounding of the policy that it is compared with: a random bfloat16 model of 28 layers was 0.05 from its float16 copy,
# which was 0.006 from the same weights in float32. Twice that is more than rounding, and half of the usual clip.
MAX_MISMATCH = 0.1


class Choice(NamedTuple):
    """What rollouts sample from, and why.

    Args:
        weights: the choice.
        reason: why, in a sentence.
        seconds: predicted time of a rollout with each; empty where nothing was measured.
    """

    weights: Weights
    reason: str
    seconds: dict[str, float]


def choose_weights(session: Session, *, available_bytes: int | None = None) -> Choice:
    """Time rollouts of the first step's prompts from both, and take the merged copy if it saves more than a tenth.

    The run goes on as if nothing had been played: tasks stay to be drawn, environments are built and asked for their
    first words but never act, and no random state is used up.

    Args:
        session: the run's live objects; `session.engine.weights` is left for the caller to set.
        available_bytes: the budget; by default what this machine has.
    """
    turns = session.curriculum.max_turns
    plan = plan_to_watch(session.config, max_turns=turns, available_bytes=available_bytes)
    if plan is None:
        return Choice("shared", "whether a merged copy fits into the memory cannot be predicted for this model", {})
    if not plan.run.has_merged_copy:
        return Choice("shared", "a merged copy does not fit into the memory that was planned with", {})
    requests = _openings(session)
    opened = [not trajectory.failed for trajectory in session.engine.rollout(requests)]
    requests = [request for request, is_open in zip(requests, opened, strict=True) if is_open]
    if not requests:
        return Choice("shared", "every environment of the first step failed, so there was nothing to measure", {})
    try:
        seconds = {weights: _seconds(session, weights, requests) for weights in ("shared", "merged")}
    except ModelError as error:
        return Choice("shared", str(error), {})
    finally:
        mx.clear_cache()
    saved = 1 - seconds["merged"] / seconds["shared"]
    reason = f"a rollout from the merged copy takes {abs(saved):.0%} {'less' if saved > 0 else 'more'} time"
    return Choice("merged" if saved > LEAST_GAIN else "shared", reason, seconds)


def watch_mismatch(session: Session, state: RunState, metrics: Metrics) -> list[dict[str, Any]]:
    """Lines for events.jsonl where a merged copy has become another policy than the one that is trained.

    A run that chose the copy itself goes on without it; one that was told to use it goes on. Nothing is judged where
    the sampler differs from the scorer anyway: filters keep part of the vocabulary, or dropout acts in the update; nor
    where no row was scored.

    Args:
        session: the run's live objects.
        state: where the run stands; remembers what was found.
        metrics: those of the step just taken.
    """
    engine, config = session.engine, session.config
    if engine.weights == "shared" or not engine.sampling.full_support or config.dropout or not metrics["scored_rows"]:
        return []
    mismatch = metrics["rollout/mismatch"]
    known, state.mismatched = state.mismatched, not mismatch <= MAX_MISMATCH  # which NaN is not either
    if known or not state.mismatched:
        return []
    reason = (
        f"log-probs from the merged copy differ from the policy's by {mismatch:.3g} on average, "
        f"more than {MAX_MISMATCH}"
    )
    if config.rollout.weights == "merged":
        advice = "set rollout.weights = 'shared' to sample from the policy itself"
        return [{"step": state.step, "event": "mismatch", "reason": f"{reason}; {advice}"}]
    engine.weights = state.rollout_weights = "shared"
    return [{"step": state.step, "event": CHOICE, **Choice("shared", reason, {})._asdict()}]


class _Opening:
    """The first words of an environment, which any answer ends."""

    max_turns = 1

    def __init__(self, first_words: Callable[[], str | Sequence[Message]]):
        self.reset = first_words

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, terminated=True)

    def state_id(self, observation: str | Sequence[Message]) -> str:
        return ""


def _first_words(make: Callable[[], Environment]) -> str | Sequence[Message]:
    with closing(SyncEnv(make())) as environment:
        return environment.reset()


def _openings(session: Session) -> list[RolloutRequest]:
    """As many of the first step's rows as decode at once."""
    config = session.config
    groups = session.loader.peek(config.groups_per_step)
    requests = group_requests(
        [group.task for group in groups],
        session.curriculum.suite.make,
        group_size=config.group_size,
        seed=config.seed,
        group_ids=[group.id for group in groups],
    )

    def opening(make: Callable[[], Environment]) -> Callable[[], Environment]:
        return partial(_Opening, cache(partial(_first_words, make)))  # built once, however often it is played

    sampling = replace(session.engine.sampling, max_tokens=1)
    rows = requests[: session.engine.width]
    return [replace(request, make=opening(request.make), sampling=sampling) for request in rows]


def _seconds(session: Session, weights: Weights, requests: Sequence[RolloutRequest]) -> float:
    """How long a rollout of these rows takes, if all of them go on to max_completion_len."""
    engine, longest = session.engine, session.config.max_completion_len
    engine.weights = weights

    def play(num_tokens: int) -> float:
        sampling = replace(engine.sampling, max_tokens=num_tokens, stop=())
        rows = [replace(request, sampling=sampling) for request in requests]
        start = time.perf_counter()
        engine.rollout(rows)
        return time.perf_counter() - start

    play(min(SOME_TOKENS, longest))  # kernels are compiled, the copy is made
    lengths = (FEW_TOKENS, SOME_TOKENS) if longest > SOME_TOKENS else (longest,)
    times = [min(play(num_tokens) for _ in range(REPEATS)) for num_tokens in lengths]
    if len(times) == 1:
        return times[0]
    few, some = times
    return few + max(0.0, some - few) * (longest - FEW_TOKENS) / (SOME_TOKENS - FEW_TOKENS)
