"""The host on which Metal kernels run without a GPU."""

import os
import sys

import pytest

from tests.metal.executor import HostMetal

# On a Mac the kernels run on its GPU; this harness knows how Linux switches stacks and maps memory.
collect_ignore_glob = ["test_*"] if sys.platform == "darwin" else []
if not os.environ.get("LLAMAY_METAL_CLANG"):
    collect_ignore_glob.append("test_address_spaces.py")


@pytest.fixture
def metal() -> HostMetal:
    """Runs each call in all schedules: for tests of kernels."""
    return HostMetal()


@pytest.fixture
def quick_metal() -> HostMetal:
    """Runs each call once: for whole models."""
    return HostMetal(schedules=["forward"])
