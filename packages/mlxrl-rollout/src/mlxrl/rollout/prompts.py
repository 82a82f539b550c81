"""Rows that wait to be read from their start, by what they start with: each prompt is read once for all of them."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from mlxrl.rollout.caches import all_arrays
from mlxrl.rollout.decoder import DeviceClock, Prefilled, Row

Prompt = tuple[int, ...]


class PromptQueue:
    """The rows in the order in which they are read, and the prompts that are kept for those who wait.

    Rows of one prompt stand together, and a prompt that is kept comes before those to be read, so that few are kept.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._lines: OrderedDict[Prompt, deque[Row]] = OrderedDict()
        self._kept: dict[Prompt, tuple[Prefilled, int]] = {}  # and the place there

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._lines.values())

    @property
    def kept(self) -> Sequence[Prefilled]:
        """The prompts that were read and are kept for rows that wait."""
        return [prefilled for prefilled, _ in self._kept.values()]

    def add(self, rows: Sequence[Row], *, ahead: bool = False) -> None:
        """Rows that wait from now on, ahead of the others or behind them."""
        for row in reversed(rows) if ahead else rows:
            prompt = tuple(row.episode.token_ids)
            line = self._lines.setdefault(prompt, deque())
            if ahead:
                line.appendleft(row)
                self._lines.move_to_end(prompt, last=False)
            else:
                line.append(row)
        for prompt in self._kept:
            self._lines.move_to_end(prompt, last=False)

    def take(self, num_rows: int) -> list[Row]:
        """The rows that are next; they wait no longer."""
        rows: list[Row] = []
        while len(rows) < num_rows:
            prompt, line = next(iter(self._lines.items()))
            rows.append(line.popleft())
            if not line:
                del self._lines[prompt]
        return rows

    def bytes_kept(self, joining: Sequence[Row], row_bytes: Callable[[int], int]) -> Iterator[int]:
        """Bytes of the prompts that are kept for others, as one after the other of these rows joins.

        Args:
            joining: rows that go on from their cache, and rows that wait here.
            row_bytes: bytes that a row of so many tokens keeps.
        """
        kept = {prompt: row_bytes(len(prompt)) for prompt in self._kept}
        readers: Counter[Prompt] = Counter()
        for row in joining:
            if row.num_read == 0:
                prompt = tuple(row.episode.token_ids)
                readers[prompt] += 1
                others_wait = readers[prompt] < len(self._lines[prompt])
                kept[prompt] = row_bytes(len(prompt)) if others_wait else 0
            yield sum(kept.values())

    def read(
        self, rows: Sequence[Row], reading: Callable[[Sequence[Prompt]], Iterator[tuple[Sequence[Prompt], Prefilled]]]
    ) -> Iterator[tuple[list[Row], Prefilled]]:
        """Give rows that were taken copies of what they start with.

        Args:
            rows: what `take` gave.
            reading: reads prompts, several together.

        Yields:
            Rows and their copies, those from one reading together.
        """
        prompts = [tuple(row.episode.token_ids) for row in rows]
        for read, prefilled in reading([prompt for prompt in dict.fromkeys(prompts) if prompt not in self._kept]):
            self._kept.update({prompt: (prefilled, place) for place, prompt in enumerate(read)})
        rows_of: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            rows_of.setdefault(id(self._kept[prompt][0]), []).append(i)
        for group in rows_of.values():
            prefilled = self._kept[prompts[group[0]]][0]
            places = [self._kept[prompts[i]][1] for i in group]
            for i in group:
                rows[i].num_read = len(prompts[i])
            yield [rows[i] for i in group], prefilled.select(places)
        for prompt in dict.fromkeys(prompts):
            prefilled, place = self._kept.pop(prompt)
            if prompt in self._lines:  # alone, so that it does not hold those that were read with it
                alone = prefilled.select([place])
                self._clock.launch(alone.logits, all_arrays(alone.cache))
                self._kept[prompt] = alone, 0
