"""Memory from the system."""

import errno
import mmap

import pytest

from llamay.mlx_kernels.memory import anonymous_memory


def test_memory_is_zero_and_begins_at_a_page() -> None:
    memory = anonymous_memory(3 * mmap.PAGESIZE + 1)
    assert memory[:] == bytes(3 * mmap.PAGESIZE + 1)


def test_a_system_without_huge_pages_gives_memory_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutHugePages(mmap.mmap):
        """As a kernel that was built without them answers."""

        def madvise(self, *arguments: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    assert len(anonymous_memory(5000)) == 5000


def test_more_than_the_system_has_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError, match="the system has no"):
        anonymous_memory(2**62)
