"""Where environments run: in a few threads beside the decoding, each environment in one of them, against the clock."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

NUM_THREADS = 64
# How often a waiting host looks whether a call has overrun, in seconds; an answer in time is never waited for.
PATROL = 0.05
# Seconds that all last calls together may take where the others are broken off.
FAREWELL = 2.0


class OverrunError(Exception):
    """A call took longer than it was given; its thread is given up."""


class Ticket:
    """A call to be answered.

    Args:
        call: what to do.
        owner: whose call it is.
        too_late: what to do afterwards, in the same thread, where nobody waits for the answer any more.
    """

    def __init__(self, call: Callable[[], Any], owner: int = 0, too_late: Callable[[], Any] | None = None):
        self._call, self.owner, self._too_late = call, owner, too_late
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._outcome: Any = None
        self.error: BaseException | None = None
        self.started: float | None = None

    @property
    def answered(self) -> bool:
        """Whether there is something to collect."""
        return self._done.is_set()

    def run(self) -> bool:
        """Make the call; returns False if it overran, so that nobody waits for it any more."""
        self.started = time.monotonic()
        outcome, error = None, None
        try:
            outcome = self._call()
        except BaseException as raised:  # handed to whoever collects the answer
            error = raised
        in_time = self._answer(outcome, error)
        if not in_time and self._too_late is not None:
            with suppress(Exception):  # nobody is there to be told
                self._too_late()
        return in_time

    def overrun(self) -> bool:
        """Answer with `OverrunError`; returns False if the call has been answered after all."""
        return self._answer(None, OverrunError())

    def wait(self, seconds: float) -> bool:
        """Wait for the answer; returns whether it is there."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """What the call returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._outcome

    def _answer(self, outcome: Any, error: BaseException | None) -> bool:
        """The first answer counts; returns whether this was it."""
        with self._lock:
            if self.answered:
                return False
            self._outcome, self.error = outcome, error
            self._done.set()
            return True


class Stage:
    """Makes calls in threads, those of one owner in the same one, which owners share where there are more than threads.

    A thread that hangs cannot be stopped: it is left behind, and another takes over what waits behind it, with the
    later calls of those who shared it. Threads are daemons, so that one left behind does not keep the process alive.

    Args:
        timeout: seconds that a call may take; None makes every call at once, in the caller's thread.
        num_owners: how many owners there will be; there are never more threads.
    """

    def __init__(self, timeout: float | None, num_owners: int):
        self.timeout = timeout
        self._patrol_seconds = PATROL if timeout is None else min(PATROL, timeout)
        self._bell = threading.Event()
        num_threads = 0 if timeout is None else min(num_owners, NUM_THREADS)
        self._threads = [_Thread(self._bell) for _ in range(num_threads)]
        self._given_up: set[int] = set()  # owners whose call overran, and may still run

    def submit(self, owner: int, call: Callable[[], Any], too_late: Callable[[], Any] | None = None) -> Ticket:
        """Have a call made, after the earlier ones of its owner; `too_late`: see `Ticket`.

        Raises:
            KeyboardInterrupt: it came while the call was made in this thread.
        """
        ticket = Ticket(call, owner, too_late)
        if self.timeout is None:
            ticket.run()
            if isinstance(ticket.error, KeyboardInterrupt):
                raise ticket.error
        else:
            self._threads[owner % len(self._threads)].tickets.put(ticket)
        return ticket

    def await_answer(self, ticket: Ticket) -> None:
        """Wait until a call is answered, if only with `OverrunError`."""
        while not ticket.wait(self._patrol_seconds):
            self.patrol()

    def wait_for_any(self, tickets: Sequence[Ticket]) -> None:
        """Wait until one of the calls has been answered."""
        while not any(ticket.answered for ticket in tickets):
            self._bell.wait(self._patrol_seconds)
            self._bell.clear()
            self.patrol()

    def patrol(self) -> None:
        """Give up the threads whose call has overrun."""
        for place, thread in enumerate(self._threads):
            ticket = thread.current
            if ticket is None or ticket.answered or ticket.started is None or self.timeout is None:
                continue
            if time.monotonic() - ticket.started > self.timeout and ticket.overrun():
                self._given_up.add(ticket.owner)
                self._threads[place] = thread.relieved(ticket.owner)

    def break_off(self, farewells: Sequence[Callable[[], Any]]) -> None:
        """Drop the calls that have not begun, and give each owner a last one, which is waited for a little.

        Args:
            farewells: one for each owner; those who were given up have had the `too_late` of their call.
        """
        for thread in self._threads:
            thread.dismiss()
        last = [self.submit(owner, call) for owner, call in enumerate(farewells) if owner not in self._given_up]
        deadline = time.monotonic() + FAREWELL
        for ticket in last:
            ticket.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Let every thread end as soon as its call does."""
        for thread in self._threads:
            thread.tickets.put(None)


class _Thread:
    def __init__(self, bell: threading.Event) -> None:
        self._bell = bell
        self.tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self.current: Ticket | None = None
        threading.Thread(target=self._work, name="mlxrl-environment", daemon=True).start()

    def relieved(self, owner: int) -> "_Thread":
        """Another thread with the tickets that wait here, but for those of the owner who keeps this one."""
        other = _Thread(self._bell)
        for ticket in self.dismiss():
            if ticket is None or ticket.owner != owner:
                other.tickets.put(ticket)
            else:
                ticket.overrun()
        return other

    def dismiss(self) -> list["Ticket | None"]:
        """Take away the tickets that wait here."""
        waiting: list[Ticket | None] = []
        with suppress(queue.Empty):
            while True:
                waiting.append(self.tickets.get_nowait())
        return waiting

    def _work(self) -> None:
        while (ticket := self.tickets.get()) is not None:
            self.current = ticket
            in_time = ticket.run()
            self._bell.set()
            if not in_time:
                return
