"""How much memory this process may use, and how to write it."""

import os
from pathlib import Path

GIB = 2**30


def available_memory() -> int:
    """Bytes this process may use: the machine's physical memory, or its cgroup's limit where that is smaller.

    On Apple silicon the GPU shares this memory, and macOS lets it wire about three quarters of it by default.

    Raises:
        OSError: the system does not tell; pass a budget instead.
    """
    if not hasattr(os, "sysconf"):
        raise OSError("available_memory must know the physical memory, which this system does not tell; pass a budget.")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return physical if limit is None else min(physical, limit)


def cgroup_limit(membership: Path, mount: Path) -> int | None:
    """The tightest memory limit in bytes on the way from this process's cgroup up to the root, None without one.

    Args:
        membership: file of `hierarchy:controllers:path` lines, `/proc/self/cgroup` on Linux.
        mount: where the cgroup file systems are mounted; version 2 directly, version 1 under `memory`.
    """
    if not membership.is_file():
        return None
    limits: list[int] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for parent in (folder, *folder.parents):
            if not parent.is_relative_to(base):
                break
            text = (parent / name).read_text().strip() if (parent / name).is_file() else "max"
            if text != "max":
                limits.append(int(text))
    return min(limits, default=None)


def human_bytes(count: int) -> str:
    """Bytes as people read them: `"3.42 GiB"`, or `"5.0 MiB"` below a hundredth of one."""
    return f"{count / GIB:.2f} GiB" if abs(count) >= GIB // 100 else f"{count / 2**20:.1f} MiB"
