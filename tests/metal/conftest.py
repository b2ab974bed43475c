"""Where Metal kernels run in tests: on this machine's processor, or on a Mac's GPU."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from llamay.mlx_kernels import has_metal
from tests.metal.executor import HostMetal

ON_GPU = has_metal()

# What tests the harness itself; it knows how Linux switches stacks and maps memory.
HARNESS_TESTS = [f"test_{name}.py" for name in ("executor", "faults", "language")]

collect_ignore_glob: list[str] = []
if sys.platform == "darwin":
    collect_ignore_glob += HARNESS_TESTS if ON_GPU else ["test_*"]
# scripts/check_metal sets both.
if not os.environ.get("LLAMAY_METAL_RACES"):
    collect_ignore_glob.append("test_races.py")
if not os.environ.get("LLAMAY_METAL_CLANG"):
    collect_ignore_glob.append("test_address_spaces.py")


class GpuMetal:
    """Stands in for `HostMetal` where there is a GPU: the real `mx.fast.metal_kernel`.

    launches: calls by kernel name
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def metal_kernel(self, name: str, *args: Any, **kwargs: Any) -> Callable[..., list[mx.array]]:
        kernel = mx.fast.metal_kernel(name, *args, **kwargs)

        def call(**arguments: Any) -> list[mx.array]:
            self.launches[name] += 1
            return kernel(**arguments)

        return call


@pytest.fixture
def metal() -> HostMetal | GpuMetal:
    """Runs each call in all schedules: for tests of kernels."""
    return GpuMetal() if ON_GPU else HostMetal()


@pytest.fixture
def quick_metal() -> HostMetal | GpuMetal:
    """Runs each call once: for whole models."""
    return _quick()


@pytest.fixture(scope="module")
def shared_metal() -> HostMetal | GpuMetal:
    """`quick_metal` for a model that several tests use."""
    return _quick()


def _quick() -> HostMetal | GpuMetal:
    return GpuMetal() if ON_GPU else HostMetal(schedules=["forward"])
