"""Hands work to the device, and sums up how long that takes the host.

Of a decode step on CUDA it takes as long as building the next one's graph in Python, and MLX needs no Python for it: a
thread of its own launches while the host builds. One thread launches at a time, and nothing else is evaluated
meanwhile; for MLX streams that may change threads are not guarded.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx


class Launcher:
    """Launches arrays, at once or beside the host, and waits for them.

    Args:
        beside: whether `launch_beside` has a thread; without one it is `launch`.

    Attributes:
        launch_seconds: how long the host has been launching.
        wait_seconds: how long it has waited for the device, and for what was launched beside it to be launched.
    """

    def __init__(self, *, beside: bool = False):
        self.launch_seconds = self.wait_seconds = 0.0
        self._thread = ThreadPoolExecutor(1, "mlxrl-launcher") if beside else None
        self._under_way: Future[None] | None = None

    def stream(self) -> AbstractContextManager[Any]:
        """Where to build what is launched."""
        return mx.stream(mx.default_device() if self._thread is None else _stream_of_all_threads())

    def launch(self, *arrays: Any) -> None:
        """Have arrays, or lists of them, computed; the host does not wait."""
        if self._under_way is not None:
            self._under_way.result()
        begin = time.perf_counter()
        mx.async_eval(*arrays)
        self.launch_seconds += time.perf_counter() - begin

    def launch_beside(self, *arrays: Any, held: Any = None) -> "Future[None] | None":
        """The same while the host goes on, which may evaluate nothing until another launch.

        Args:
            *arrays: what to compute.
            held: arrays on the way there that the host may let go of next; MLX would take them apart in both threads.

        Returns:
            What is done once they are launched, and raises what the launch raised; None where they are already.
        """
        if self._thread is None:
            return self.launch(*arrays)
        self._under_way = self._thread.submit(_launch, arrays, held)
        return self._under_way

    def wait(self, *arrays: Any, after: "Future[None] | None" = None) -> None:
        """Wait for arrays whose launch was `after`."""
        begin = time.perf_counter()
        if after is not None:
            after.result()
        mx.eval(*arrays)
        self.wait_seconds += time.perf_counter() - begin

    def close(self) -> None:
        """Wait for the thread and let it go."""
        if self._thread is not None:
            self._thread.shutdown()


def _launch(arrays: tuple[Any, ...], held: Any) -> None:  # the call holds what it was given
    mx.async_eval(*arrays)


def _stream_of_all_threads() -> mx.Stream:
    """One for each device: a stream is never given back."""
    device = mx.default_device()
    if str(device) not in _streams:
        _streams[str(device)] = mx.new_thread_unsafe_stream(device)
    return _streams[str(device)]


_streams: dict[str, mx.Stream] = {}
