"""A reward for code that passes its tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from mlxrl.env.code_blocks import last_block
from mlxrl.env.options import check_real, check_whole

RUNNER = Path(__file__).with_name("code_runner.py")
READY = b"ready "  # as in code_runner, which Windows cannot import


class CodeError(RuntimeError):
    """A row whose code could not be run."""


class CodeTestsReward:
    """1 where the completion's Python code passes the row's tests, and 0 elsewhere.

    The code is the last block between ``` fences, or else the whole completion. The column `tests` holds Python that
    runs after it in the same namespace and raises where it is not content, as one text or a list of texts. A row
    without tests is not scored (None).

    Each row runs in a process of its own, in an empty folder that is thrown away, without input, output and the
    environment's variables; it is bound in time, memory (not on macOS), open files and their size, and can start no
    further process or thread. These limits keep clumsy code from taking the machine down; they are no wall against code
    that means harm: it can read, change and send over the network what the user can. Train in a container for that.

    Args:
        seconds: how long code and tests may take.
        memory_mb: most memory of the process, in MB (2^20 bytes).
        workers: most rows that run at a time; by default one for each processor.

    Raises:
        ValueError: an option is out of range, or the system is Windows, which has no such limits.
    """

    bounded = True
    columns = ("tests",)

    def __init__(self, seconds: float = 10.0, memory_mb: int = 1024, workers: int | None = None) -> None:
        if os.name != "posix":
            raise ValueError("code-tests needs Linux or macOS, whose limits keep the code in bounds")
        if check_real("seconds", seconds, 0.0) == 0:
            raise ValueError("seconds must be above 0, got 0")
        self._seconds = seconds
        self._memory_mb = check_whole("memory_mb", memory_mb, 64)
        self._workers = os.cpu_count() or 1 if workers is None else check_whole("workers", workers, 1)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        *,
        tests: Sequence[Any],
        **columns: Any,
    ) -> list[float | CodeError | None]:
        """Scores a batch."""
        with ThreadPoolExecutor(self._workers) as threads:
            return list(threads.map(self._score, zip(completions, tests, strict=True)))

    def _score(self, row: tuple[str, Any]) -> float | CodeError | None:
        completion, tests = row
        try:
            program = _joined(tests)
            return None if program is None else float(self._passes(last_block(completion), program))
        except CodeError as error:
            return error

    def _passes(self, code: str, tests: str) -> bool:
        token = secrets.token_hex(16)
        job = {"code": code, "tests": tests, "token": token, "memory_mb": self._memory_mb, "seconds": self._seconds}
        with tempfile.TemporaryDirectory(prefix="mlxrl-code-", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(RUNNER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
            timer = threading.Timer(self._seconds, _kill, [process])
            timer.start()
            try:
                verdict = _exchange(process, json.dumps(job).encode())
            finally:
                timer.cancel()
                _kill(process)
                process.wait()
        if not verdict.startswith(READY):
            why = verdict.decode(errors="replace") or f"its process did not start within {self._seconds:g} s"
            raise CodeError(f"the code could not be run: {why}")
        return verdict == READY + token.encode()


def _exchange(process: subprocess.Popen[bytes], job: bytes) -> bytes:
    """Hands the job over and reads the verdict, and not more than that."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as verdict:
        try:
            with process.stdin as stdin:
                stdin.write(job)
        except BrokenPipeError:  # it died of its limits; what it has said counts
            pass
        return verdict.read(1000)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _joined(tests: Any) -> str | None:
    """The tests as one program; None where there are none."""
    parts = [*cast(Sequence[Any], tests)] if isinstance(tests, list | tuple) else [tests]
    for part in parts:
        if part is not None and not isinstance(part, str):
            raise CodeError(f"tests must be text or a list of texts, got {type(part).__name__} {part!r}")
    return "\n".join(part for part in parts if part is not None).strip() or None
