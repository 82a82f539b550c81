"""One rollout from its first prompt to its last row: who reads, who decodes, who waits for an environment.

The host runs one step behind the device: while a step is under way it reads the tokens of the one before, ends the rows
that are over and hands their actions to the environments. Rows change places only between steps, at points that the
tokens alone decide (`deterministic`), or as soon as environments answer.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import mlx.nn as nn

from mlxrl.rollout.caches import Cache, all_arrays, join, new_cache, num_bytes, select
from mlxrl.rollout.decoder import DecodeBatch, DeviceClock, Draws, Prefilled, Reader, Row, reading_plan
from mlxrl.rollout.environment_calls import EnvironmentFailedError
from mlxrl.rollout.episode import Episode
from mlxrl.rollout.prompts import Prompt, PromptQueue
from mlxrl.rollout.stage import OverrunError, Stage, Ticket


@dataclass
class RolloutStats:
    """What a rollout cost.

    Args:
        decode_forwards: forward passes that read one token a row.
        prefill_forwards: forward passes that read prompts and observations, a long one in several.
        prefill_tokens: tokens that these read, padding not counted.
        sampled_tokens: tokens of the trajectories' actions.
        peak_rows: most rows whose cache existed at one time.
        peak_cache_bytes: most bytes of such caches, the room that they grow into included.
        seconds: how long it took.
        launch_seconds: of these, handing work to the device: encoding and launching, and where the device is the
            host's own processor mostly computing.
        device_seconds: of these, waiting for the device's results.
        environment_seconds: of these, waiting for environments.
    """

    decode_forwards: int = 0
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    sampled_tokens: int = 0
    peak_rows: int = 0
    peak_cache_bytes: int = 0
    seconds: float = 0.0
    launch_seconds: float = 0.0
    device_seconds: float = 0.0
    environment_seconds: float = 0.0


@dataclass(frozen=True)
class Room:
    """How many rows there is room for, and when they change places.

    Args:
        width: most rows that hold a cache.
        ragged: whether texts of different length may be read together.
        regroup_share: rows join once they are this share of the batch, and rows that have ended leave without others
            taking their places once they are twice as many; 0: at once.
        cache_bytes: most bytes of the caches; None: no bound.
        row_bytes: bytes that a row of so many tokens keeps.
    """

    width: int
    ragged: bool
    row_bytes: Callable[[int], int]
    regroup_share: float = 0.0
    cache_bytes: int | None = None

    def how_many_fit(self, held: Sequence[Row], joining: Sequence[Row], prompt_bytes: Iterable[int]) -> int:
        """How many of those who would join fit beside the rows whose caches are held.

        A batch is as long as its longest row, so every row is counted at that length.

        Args:
            held: rows that hold a cache.
            joining: those who would join, in their order.
            prompt_bytes: per joining row, bytes of the prompts that are kept for others once it has joined.
        """
        if self.cache_bytes is None:
            return len(joining)
        longest = max((row.episode.most_tokens for row in held), default=0)
        for fitting, (row, kept) in enumerate(zip(joining, prompt_bytes, strict=True)):
            longest = max(longest, row.episode.most_tokens)
            if (len(held) + fitting + 1) * self.row_bytes(longest) + kept > self.cache_bytes:
                return fitting
        return len(joining)


@dataclass(frozen=True)
class _Seat:
    """A row's place in a cache that it may share with others."""

    row: Row
    cache: Cache
    place: int


@dataclass(frozen=True)
class _Parked:
    """A row that waits for its environment; without a seat where its next turn is read from the start."""

    row: Row
    ticket: Ticket
    since: int
    seat: _Seat | None


class Play:
    """Plays episodes to their end. `Engine` says what is promised, this class shows how it is kept.

    Args:
        model: the weights to sample from.
        episodes: what to play.
        room: how many rows at a time.
        deterministic: whether rows wait for their environments at points that the tokens alone decide.
        env_timeout: seconds an environment has for an answer; None: as long as it takes, in this thread.
    """

    def __init__(
        self,
        model: nn.Module,
        episodes: Sequence[Episode],
        room: Room,
        *,
        deterministic: bool = True,
        env_timeout: float | None = None,
    ):
        self.model, self.episodes, self.room, self.deterministic = model, episodes, room, deterministic
        self.stats = RolloutStats()
        self._stage = Stage(env_timeout, len(episodes))
        self._owners = {id(episode): owner for owner, episode in enumerate(episodes)}
        self._clock = DeviceClock()
        self._reader = Reader(model, self._clock)
        self._batch = DecodeBatch(model, clock=self._clock)
        self._unread: deque[Draws] = deque()
        self._waiting = PromptQueue(self._clock)
        self._is_full = False  # those who wait do not fit before a row has ended
        self._parked: list[_Parked] = []
        self._last_words: list[tuple[Episode, Ticket]] = []
        self._closings: dict[int, Ticket] = {}

    def run(self) -> None:
        """Play until every episode is finished."""
        begin = time.perf_counter()
        try:
            self._open()
            while self._waiting or self._parked or self._unread or self._num_live:
                if self._regrouping_is_due():
                    self._regroup()
                launched = any(row.goes_on for row in self._batch.rows)
                if launched:
                    self._unread.append(self._batch.step())
                while len(self._unread) > launched:  # what was launched last is still under way
                    self._read(self._unread.popleft())
            for episode, ticket in self._last_words:
                self._hear(episode, ticket)
            for owner, ticket in self._closings.items():
                self._see_closed(self.episodes[owner], ticket)
            self._count_bytes()
        except BaseException:
            self._stage.break_off([episode.close for episode in self.episodes])
            raise
        finally:
            self._stage.close()
        self.stats.seconds = time.perf_counter() - begin
        self.stats.launch_seconds, self.stats.device_seconds = self._clock.launch_seconds, self._clock.wait_seconds
        self.stats.decode_forwards, self.stats.prefill_forwards = self._batch.num_steps, self._reader.num_forwards
        self.stats.sampled_tokens = sum(episode.num_drawn for episode in self.episodes)

    @property
    def _num_live(self) -> int:
        return sum(not row.ended for row in self._batch.rows)

    def _open(self) -> None:
        """Every environment says its first words; the rows that can be answered queue up."""
        openings = [_Parked(Row(episode), self._consult(episode), -1, None) for episode in self.episodes]
        if not self.deterministic:
            self._parked = openings
            return
        for opening in openings:
            self._hear(opening.row.episode, opening.ticket)
        self._waiting.add([Row(episode) for episode in self.episodes if not episode.finished])

    def _consult(self, episode: Episode) -> Ticket:
        return self._stage.submit(self._owners[id(episode)], episode.consult, too_late=episode.close)

    def _close(self, episode: Episode) -> None:
        """Have the environment closed after what it is asked now; a call of its own, which may hang by itself."""
        owner = self._owners[id(episode)]
        if owner not in self._closings:
            self._closings[owner] = self._stage.submit(owner, episode.close)

    def _hear(self, episode: Episode, ticket: Ticket) -> None:
        self._await(ticket)
        try:
            episode.receive(ticket.result())
        except EnvironmentFailedError as fault:
            episode.receive(fault)
        except OverrunError:  # closed once the call returns, if ever
            assert self._stage.timeout is not None
            episode.time_out(self._stage.timeout)
            self._closings.pop(self._owners[id(episode)], None)
            return
        if episode.finished:
            self._close(episode)

    def _see_closed(self, episode: Episode, ticket: Ticket) -> None:
        self._await(ticket)
        try:
            ticket.result()
        except EnvironmentFailedError as fault:
            episode.close_error = str(fault)
        except OverrunError:
            assert self._stage.timeout is not None
            episode.close_error = f"close of the environment took longer than {self._stage.timeout:g} s"

    def _await(self, ticket: Ticket) -> None:
        begin = time.perf_counter()
        self._stage.await_answer(ticket)
        self.stats.environment_seconds += time.perf_counter() - begin

    def _read(self, draws: Draws) -> None:
        """Take what was drawn: rows whose action is complete end, and their environments are asked."""
        self._clock.wait(draws.tokens, draws.logprobs)
        tokens: Any = draws.tokens.tolist()
        logprobs: Any = draws.logprobs.tolist()
        going_on: list[tuple[Row, Ticket]] = []
        for row, token, logprob in zip(draws.rows, tokens, logprobs, strict=True):
            if row.ended or not row.episode.push(token, logprob):
                continue
            row.ended, self._is_full = True, False
            row.episode.end_action()
            ticket = self._consult(row.episode)
            if row.episode.on_last_turn:
                self._last_words.append((row.episode, ticket))
                self._close(row.episode)
            else:
                going_on.append((row, ticket))
        if going_on:
            places = {id(row): place for place, row in enumerate(self._batch.rows)}
            rows = [row for row, _ in going_on if not row.episode.starts_afresh]
            seats = self._seats(self._batch.cache, rows, [places[id(row)] for row in rows])
            self._parked += [
                _Parked(row, ticket, self._batch.num_steps, seats.get(id(row))) for row, ticket in going_on
            ]

    def _seats(self, cache: Cache, rows: Sequence[Row], places: Sequence[int]) -> dict[int, _Seat]:
        """By id of the row, seats in a cache of their own, which holds nothing of the one that they had a place in."""
        if not rows:
            return {}
        own = select(cache, places)
        self._clock.launch(all_arrays(own))
        return {id(row): _Seat(row, own, place) for place, row in enumerate(rows)}

    def _move_together(self, left: Sequence[_Parked]) -> None:
        """Have rows that still wait in caches that others have left move into smaller ones."""
        for cache in {id(one.seat.cache): one.seat.cache for one in left if one.seat is not None}.values():
            staying = [one for one in self._parked if one.seat is not None and one.seat.cache is cache]
            seats = self._seats(cache, [one.row for one in staying], [one.seat.place for one in staying if one.seat])
            self._parked = [replace(one, seat=seats.get(id(one.row), one.seat)) for one in self._parked]

    def _regrouping_is_due(self) -> bool:
        num_rows, num_live = len(self._batch.rows), self._num_live
        if num_live == 0:
            return bool(self._waiting or self._parked)
        due = self._due()
        free = self.room.width - num_live - self._num_seated(self._parked) + self._num_seated(due)
        arriving = len(due) + (0 if self._is_full else len(self._waiting))
        joining, leaving = min(free, arriving), num_rows - num_live
        share = self.room.regroup_share
        return joining >= max(1, share * num_rows) or leaving >= max(1, 2 * share * num_rows)

    def _num_seated(self, parked: Sequence[_Parked]) -> int:
        """How many of these rows hold a cache."""
        return sum(one.seat is not None for one in parked)

    def _due(self) -> list[_Parked]:
        """The parked rows whose answer is taken at the next regrouping, and waited for if need be."""
        if not self.deterministic:
            self._stage.patrol()
            return [parked for parked in self._parked if parked.ticket.answered]
        if self._num_live == 0:
            return self._parked
        return [parked for parked in self._parked if parked.since < self._batch.num_steps]

    def _regroup(self) -> None:
        """Rows that have ended give their places to rows whose environment has answered, and then to new ones."""
        self._count_bytes()  # until now all have grown
        keep = [place for place, row in enumerate(self._batch.rows) if not row.ended]
        staying = [self._batch.rows[place] for place in keep]
        if not staying and not self._a_new_row_fits():
            self._stage.wait_for_any([parked.ticket for parked in self._parked])
        returning = self._take_answers()
        free = max(0, self.room.width - len(staying) - self._num_seated(self._parked))
        joining = list(islice(chain((seat.row for seat in returning), self._waiting), free))
        fitting = self._how_many_fit(staying, joining)
        self._waiting.add([Row(seat.row.episode) for seat in returning[fitting:]], ahead=True)  # to be read again
        self._is_full = fitting < len(joining)
        returning = returning[:fitting]
        new = self._waiting.take(fitting - len(returning))
        draws = self._batch.regroup(keep, [*self._read_on(returning), *self._waiting.read(new, self._read_prompts)])
        if draws is not None:
            self._unread.append(draws)
        num_rows = len(self._batch.rows) + self._num_seated(self._parked)
        self.stats.peak_rows = max(self.stats.peak_rows, num_rows)
        self._count_bytes()

    def _how_many_fit(self, staying: Sequence[Row], joining: Sequence[Row]) -> int:
        held = [*staying, *(parked.row for parked in self._parked if parked.seat is not None)]
        fitting = self.room.how_many_fit(held, joining, self._waiting.bytes_kept(joining, self.room.row_bytes))
        return fitting if held else max(fitting, min(1, len(joining)))  # or nobody would ever go on

    def _a_new_row_fits(self) -> bool:
        """Whether a row could join an empty batch beside those that wait for their environments."""
        has_place = bool(self._waiting) and self._num_seated(self._parked) < self.room.width
        return has_place and self._how_many_fit([], [next(iter(self._waiting))]) > 0

    def _take_answers(self) -> list[_Seat]:
        """Hear the environments that are due; the seats of the rows that read on from where they are."""
        due = self._due()
        self._parked = [parked for parked in self._parked if parked not in due]
        self._move_together(due)
        seats: list[_Seat] = []
        afresh: list[Row] = []
        for parked in due:
            episode, num_read = parked.row.episode, parked.row.num_read
            self._hear(episode, parked.ticket)
            if episode.finished:
                continue
            if parked.seat is None or num_read == len(episode.token_ids):  # nothing new to read, and no logits kept
                afresh.append(Row(episode))
            else:
                seats.append(_Seat(Row(episode, num_read=num_read), parked.seat.cache, parked.seat.place))
        self._waiting.add(afresh, ahead=True)
        return seats

    def _read_on(self, seats: Sequence[_Seat]) -> Iterator[tuple[list[Row], Prefilled]]:
        """Read what is new since the rows spoke last."""
        new_tokens = [seat.row.episode.token_ids[seat.row.num_read :] for seat in seats]
        for chunk in self._plan(new_tokens):
            places_of: dict[int, list[int]] = {}
            for i in chunk:
                places_of.setdefault(id(seats[i].cache), []).append(i)
            parts = [select(seats[group[0]].cache, [seats[i].place for i in group]) for group in places_of.values()]
            order = [i for group in places_of.values() for i in group]
            prefilled = self._read_in(join(parts), [new_tokens[i] for i in order])
            rows = [seats[i].row for i in order]
            for row in rows:
                row.num_read = len(row.episode.token_ids)
            yield rows, prefilled

    def _read_prompts(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Sequence[Prompt], Prefilled]]:
        for chunk in self._plan(prompts):
            texts = [prompts[i] for i in chunk]
            yield texts, self._read_in(new_cache(self.model, len(texts)), texts)

    def _plan(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        return reading_plan([len(text) for text in texts], ragged=self.room.ragged)

    def _read_in(self, cache: Cache, texts: Sequence[Sequence[int]]) -> Prefilled:
        self.stats.prefill_tokens += sum(map(len, texts))
        return self._reader(cache, texts)

    def _count_bytes(self) -> None:
        caches = {id(parked.seat.cache): parked.seat.cache for parked in self._parked if parked.seat is not None}
        caches |= {id(prefilled): prefilled.cache for prefilled in self._waiting.kept}
        held = num_bytes(self._batch.cache) + sum(map(num_bytes, caches.values()))
        self.stats.peak_cache_bytes = max(self.stats.peak_cache_bytes, held)
