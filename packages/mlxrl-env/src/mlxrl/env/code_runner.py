"""The process in which a completion's code meets its tests: started as a script, one for each completion.

It reads {"code", "tests", "token", "memory_mb", "seconds"} as JSON, takes its limits on itself, writes READY, runs the
code and then the tests in one namespace, and writes the token if nothing was raised. What it writes before READY is why
it could not start. The token stays out of the code's namespace, so that leaving early is not passing.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from types import ModuleType

READY = b"ready "
NOBODY = 65534
MOST_FILES, LARGEST_FILE_MB = 64, 16


def main() -> None:
    """Run one job."""
    job = json.loads(sys.stdin.read())
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    try:
        limit(job["memory_mb"], job["seconds"])
    except (OSError, ValueError) as error:
        os.write(verdict, str(error).encode())
        os._exit(1)
    os.write(verdict, READY)
    module = ModuleType("completion")
    sys.modules["completion"] = module  # dataclasses and pickle look their module up here
    token = job.pop("token").encode()
    for name in ("code", "tests"):
        exec(compile(job[name], f"{name}.py", "exec"), module.__dict__)
    os.write(verdict, token)
    os._exit(0)  # nothing that the code has left behind runs any more


def limit(memory_mb: int, seconds: float) -> None:
    """Bound what this process may use, for good.

    Raises:
        OSError, ValueError: a limit cannot be set.
    """
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_FSIZE: LARGEST_FILE_MB * 2**20,
        resource.RLIMIT_NOFILE: MOST_FILES,
        resource.RLIMIT_NPROC: 0,  # no further processes and threads
    }
    if sys.platform != "darwin":  # which has no such limit
        bounds[resource.RLIMIT_AS] = memory_mb * 2**20
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))
    if os.getuid() == 0:
        become_nobody()


def become_nobody() -> None:
    """Make the limit on processes count for root, who is exempt from it: by the real user and by capabilities.

    The effective user stays root, for root's Python and its modules are often readable to nobody else.

    Raises:
        OSError: it cannot be done.
    """
    if not hasattr(os, "setresuid"):
        raise OSError("no limit on processes binds root on this system; train as another user")
    os.setresuid(NOBODY, 0, 0)
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    header, no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)  # the third version, this process
    if libc.capset(header, no_capabilities) != 0:
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    main()
