"""Anchor groups: the turns of one task's trajectories that were taken in the same state."""

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

from mlxrl.algo.advantages import mean
from mlxrl.algo.groups import group_members


def anchor_ids(
    state_ids: Sequence[Sequence[Hashable]],
    group_ids: Sequence[Hashable],
    *,
    similarity: float | None = None,
    exclude_repeats: bool = False,
) -> list[list[Hashable]]:
    """Return an id for each turn; turns with equal ids form one anchor group.

    Turns of different task groups never meet, and a turn whose state is None stands alone.
    Source: GiGPO, arXiv 2505.10978, section 4.2; similar states, appendix.

    Args:
        state_ids: [B][turns], the state before each action.
        group_ids: [B].
        similarity: states (text) whose `difflib` ratio reaches this are joined, chains included; None compares exactly.
        exclude_repeats: a turn in a state that its own trajectory has been in before stands alone.

    Returns:
        [B][turns].

    Raises:
        ValueError: similarity is asked for and a state id is not text.
    """
    anchors: list[list[Hashable]] = [[] for _ in state_ids]
    for group, rows in group_members(group_ids).items():
        states = sorted({state for row in rows for state in state_ids[row] if state is not None}, key=repr)
        joined = {state: state for state in states} if similarity is None else _join_similar(states, similarity)
        for row in rows:
            seen: set[Hashable] = set()
            for turn, state in enumerate(state_ids[row]):
                anchor = joined.get(state)
                alone = state is None or (exclude_repeats and anchor in seen)
                seen.add(anchor)
                anchors[row].append((row, turn, "alone") if alone else (group, anchor))
    return anchors


def anchor_metrics(anchors: Sequence[Sequence[Hashable]]) -> dict[str, float]:
    """Return how many turns share their state with another.

    Args:
        anchors: [B][turns], of `anchor_ids`.

    Returns:
        anchor_group_size, the mean number of turns of an anchor group, and anchor_share, the share of turns whose
        anchor group has another turn; both 0 without turns.
    """
    sizes = [len(turns) for turns in group_members([anchor for row in anchors for anchor in row]).values()]
    if not sizes:
        return {"anchor_group_size": 0.0, "anchor_share": 0.0}
    shared = sum(size for size in sizes if size > 1)
    return {"anchor_group_size": mean(sizes), "anchor_share": shared / sum(sizes)}


def _join_similar(states: Sequence[Hashable], threshold: float) -> dict[Hashable, Hashable]:
    """Map each state to the first of the states it is linked to; independent of the order of the trajectories."""
    texts: list[str] = []
    for state in states:
        if not isinstance(state, str):
            raise ValueError(f"state_ids must be text for similarity anchors, got {state!r}")
        texts.append(state)
    first: dict[Hashable, Hashable] = {text: text for text in texts}
    for i, text in enumerate(texts):
        for earlier in texts[:i]:
            if first[earlier] != first[text] and SequenceMatcher(None, earlier, text).ratio() >= threshold:
                kept, dropped = first[earlier], first[text]
                first = {state: kept if root == dropped else root for state, root in first.items()}
    return first
