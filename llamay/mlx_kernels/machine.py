"""How much of the machine is this process's: cores and memory, as far as its container gives them.

Containers bound both by control groups, version 1 or 2 of which are mounted at the usual place.
Within a container, the path that a process is told of its group may be the host's, and lead nowhere
here; the innermost group is then the mount's root.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_CORES = 1024  # that the CPU kernels' pool takes

_ROOT = Path("/")


def usable_cores() -> int:
    """Cores that this process may run on and has the time of; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for group in _groups("cpu"):
        words = _words(group / "cpu.max")
        words = words or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdigit() for word in words):  # neither "max" nor -1
            quota_us, period_us = map(int, words)
            cores = min(cores, math.ceil(quota_us / max(period_us, 1)))
    return max(1, min(cores, MAX_CORES))


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups("memory"):
        words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        memory = min([memory, *(int(word) for word in words if word.isdigit())])
    return memory


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and those around it; not all need exist."""
    mount = _ROOT / "sys/fs/cgroup"
    for line in _lines(_ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield (mount / controller if controllers else mount) / folder


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
