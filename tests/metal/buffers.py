"""Memory that faults where a kernel must not touch it."""

import ctypes
import mmap
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

GUARD_BYTES = 1 << 30  # on both sides, so that an index that is far off still faults
ALIGNMENT = 16  # of a buffer, as of Metal's
KEPT_BYTES = 1 << 28  # of memory that waits to be used again: mapping it takes most of a launch

_PROT_NONE, _PRIVATE_ANONYMOUS_NORESERVE = 0, 0x4022

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedBuffer:
    """Bytes that lie between two unmapped regions and touch one of them.

    at_end: its end touches the region above, but for at most 15 bytes that the alignment costs;
        else its start touches the one below
    Bytes of its pages that are not its own are 0xFF, which makes NaN of floats that are read there.
    """

    def __init__(self, name: str, size: int, at_end: bool) -> None:
        self.name, self.size, self._read_only = name, size, False
        self._mapped = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._base = _taken(self._mapped)
        self._pages = self._base + GUARD_BYTES
        self.address = self._pages
        if at_end:
            self.address += (self._mapped - size) // ALIGNMENT * ALIGNMENT
        around = np.ctypeslib.as_array((ctypes.c_uint8 * self._mapped).from_address(self._pages))
        start = self.address - self._pages
        around[:start] = 0xFF
        around[start + size :] = 0xFF
        self.bytes: NDArray[np.uint8] = around[start : start + size]

    def make_read_only(self) -> None:
        self._read_only = True
        _protect(self._base, self._mapped, mmap.PROT_READ)

    def place_of(self, address: int) -> str | None:
        """Where an address is, in words; None if neither in this buffer nor near it."""
        if not self._base <= address < self._pages + self._mapped + GUARD_BYTES:
            return None
        if address < self.address:
            return f"{self.address - address} bytes before the start of {self.name}"
        if address >= self.address + self.size:
            return f"{address - self.address - self.size} bytes after the end of {self.name}"
        read_only = ", read-only" if self._read_only else ""
        return f"byte {address - self.address} of {self.name}{read_only}"

    def close(self) -> None:
        """Gives its memory back; `bytes` must not be used any more."""
        if self._read_only:
            _protect(self._base, self._mapped, mmap.PROT_READ | mmap.PROT_WRITE)
        _give_back(self._base, self._mapped)


_kept: dict[int, list[int]] = defaultdict(list)  # by size, regions that nobody uses


def _taken(size: int) -> int:
    """The address of a region: `size` writable bytes, page by page, and guards on both sides."""
    if _kept[size]:
        return _kept[size].pop()
    base = _libc.mmap(None, size + 2 * GUARD_BYTES, _PROT_NONE, _PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    if base == ctypes.c_void_p(-1).value:
        raise MemoryError(f"no address space for a buffer of {size} bytes")
    _protect(base, size, mmap.PROT_READ | mmap.PROT_WRITE)
    return int(base)


def _give_back(base: int, size: int) -> None:
    if sum(size * len(regions) for size, regions in _kept.items()) + size <= KEPT_BYTES:
        _kept[size].append(base)
    else:
        _libc.munmap(base, size + 2 * GUARD_BYTES)


def _protect(base: int, size: int, access: int) -> None:
    if size:
        _libc.mprotect(base + GUARD_BYTES, size, access)
