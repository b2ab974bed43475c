"""Memory taken from the system itself, for what is large and short-lived or never moves."""

import mmap
from contextlib import suppress

HUGE_PAGE = 2 << 20  # bytes, where there are any: of x86-64 and of arm64 with pages of 4 KiB


def anonymous_memory(size: int) -> mmap.mmap:
    """`size` bytes of zeros, aligned to a page, in huge pages where the system has them.

    Raises MemoryError if the system has not so much.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {size} bytes of memory left") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may be built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
