"""Processes that answer questions, each against the clock: a process can be ended, a thread cannot."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Seconds that a process may take to start: it imports, on a machine that may be busy.
START_SECONDS = 120.0


class WorkerError(RuntimeError):
    """A question that brought no answer: the process took too long, or died."""


class WorkerPool:
    """A few processes that are started when they are needed, and again after one that overran was killed.

    Args:
        command: starts a process that writes a line of JSON when it is ready, and then reads a question from every
            line and answers it with a line. It ends when its input does.
        count: most processes at a time.
        seconds: how long an answer may take.
    """

    def __init__(self, command: Sequence[str], count: int, seconds: float) -> None:
        self._count = count
        self._seconds = seconds
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(_Worker(command))

    def ask(self, questions: Sequence[Any]) -> list[Any]:
        """The answer to each question, or the `WorkerError` why there is none."""
        with ThreadPoolExecutor(self._count) as threads:
            return list(threads.map(self._ask, questions))

    def _ask(self, question: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.ask(question, self._seconds)
        except WorkerError as error:
            return error
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            self._end = weakref.finalize(self, _end, self._process)
            self._read(self._process, START_SECONDS)
        return self._read(self._process, seconds, json.dumps(question))

    def _read(self, process: subprocess.Popen[str], seconds: float, line: str | None = None) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        overran = threading.Event()

        def kill() -> None:
            overran.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            if line is not None:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if overran.is_set() or not answer:
            self._end()
            self._process = None
            raise WorkerError(f"took longer than {seconds:g} s" if overran.is_set() else "its process died")
        return json.loads(answer)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
