"""Cores and memory that a container leaves to its processes, by files as Linux writes them."""

import os

import pytest

from llamay.kv.snapshot.parallel import cores
from llamay.mlx_kernels import machine
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.mlx_kernels.machine import usable_cores, usable_memory

GIB = 1 << 30
V1 = "4:memory:/docker/7f\n2:cpu,cpuacct:/docker/7f\n1:name=systemd:/init\n0::/\n"
UNBOUNDED_V1 = "9223372036854771712\n"


@pytest.fixture(autouse=True)
def large_machine(monkeypatch, tmp_path):
    """16 cores and 64 GiB, and no file says anything else."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(machine.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}.get)
    monkeypatch.setattr(machine, "_ROOT", tmp_path)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v2(path, files):
    """Of version 2, the process in the group of that path."""
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return {"proc/self/cgroup": f"0::{path}\n", **groups}


def v1(files):
    """Of version 1, the process in the groups that `V1` says."""
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return {"proc/self/cgroup": V1, **groups}


CORES = {
    "no files at all": ({}, 16),
    "no group": ({"proc/self/cgroup": ""}, 16),
    "no quota": (v2("/", {"cpu.max": "max 100000\n"}), 16),
    "two": (v2("/", {"cpu.max": "200000 100000\n"}), 2),
    "one and a half": (v2("/", {"cpu.max": "150000 100000\n"}), 2),
    "a tenth": (v2("/", {"cpu.max": "10000 100000\n"}), 1),
    "more than there are": (v2("/", {"cpu.max": "6400000 100000\n"}), 16),
    "the group's own": (v2("/a/b", {"a/b/cpu.max": "300000 100000\n"}), 3),
    "of a group around it": (
        v2("/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 50000\n"}),
        4,
    ),
    "the least of several": (
        v2("/a/b", {"a/b/cpu.max": "500000 100000\n", "a/cpu.max": "400000 100000\n"}),
        4,
    ),
    "the host's path": (v2("/../system/7f", {"cpu.max": "300000 100000\n"}), 3),
    "of another group": (v2("/a", {"b/cpu.max": "100000 100000\n"}), 16),
    "version 1": (
        v1(
            {
                "cpu/docker/7f/cpu.cfs_quota_us": "250000\n",
                "cpu/docker/7f/cpu.cfs_period_us": "100000\n",
            }
        ),
        3,
    ),
    "version 1, the host's path": (
        v1({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "25000\n"}),
        2,
    ),
    "version 1, no quota": (
        v1({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}),
        16,
    ),
    "nonsense": (v2("/", {"cpu.max": "some words here\n"}), 16),
    "empty": (v2("/", {"cpu.max": ""}), 16),
}


@pytest.mark.parametrize(("files", "expected"), CORES.values(), ids=CORES)
def test_cores_are_those_that_the_container_gives(tmp_path, files, expected):
    write(tmp_path, files)
    assert usable_cores() == expected


MEMORY = {
    "no files at all": ({}, 64 * GIB),
    "no limit": (v2("/", {"memory.max": "max\n"}), 64 * GIB),
    "two": (v2("/", {"memory.max": f"{2 * GIB}\n"}), 2 * GIB),
    "more than there is": (v2("/", {"memory.max": f"{65 * GIB}\n"}), 64 * GIB),
    "of a group around it": (
        v2("/a/b", {"a/b/memory.max": "max\n", "a/memory.max": f"{3 * GIB}\n"}),
        3 * GIB,
    ),
    "version 1": (
        v1(
            {
                "memory/docker/7f/memory.limit_in_bytes": f"{GIB}\n",
                "memory/memory.limit_in_bytes": UNBOUNDED_V1,
            }
        ),
        GIB,
    ),
    "version 1, no limit": (v1({"memory/memory.limit_in_bytes": UNBOUNDED_V1}), 64 * GIB),
}


@pytest.mark.parametrize(("files", "expected"), MEMORY.values(), ids=MEMORY)
def test_memory_is_what_the_container_gives(tmp_path, files, expected):
    write(tmp_path, files)
    assert usable_memory() == expected


def test_a_process_may_be_kept_from_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    write(tmp_path, v2("/", {"cpu.max": "400000 100000\n"}))
    assert usable_cores() == 2


def test_a_system_without_affinity_counts_its_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, expected in ((12, 12), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert usable_cores() == expected


def test_no_machine_has_more_cores_than_the_kernels_take(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4096)))
    assert usable_cores() == 1024


def test_kernels_and_snapshots_take_the_cores_that_are_usable(tmp_path):
    write(tmp_path, v2("/", {"cpu.max": "300000 100000\n"}))
    assert CpuKernels().threads == 3
    assert cores() == 3
