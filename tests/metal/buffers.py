"""Memory that faults where a kernel must not touch it."""

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

GUARD_BYTES = 1 << 30  # on both sides, so that an index that is far off still faults
ALIGNMENT = 16  # of a buffer, as of Metal's

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
        total = self._mapped + 2 * GUARD_BYTES
        base = _libc.mmap(None, total, _PROT_NONE, _PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if base == ctypes.c_void_p(-1).value:
            raise MemoryError(f"no address space for the {size} bytes of {name}")
        self._base: int = base
        self._pages = base + GUARD_BYTES
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = self._pages
        if at_end:
            self.address += (self._mapped - size) // ALIGNMENT * ALIGNMENT
        around = np.ctypeslib.as_array((ctypes.c_uint8 * self._mapped).from_address(self._pages))
        start = self.address - self._pages
        around[:start] = 0xFF
        around[start + size :] = 0xFF
        self.bytes: NDArray[np.uint8] = around[start : start + size]

    def _protect(self, access: int) -> None:
        if self._mapped:
            _libc.mprotect(self._pages, self._mapped, access)

    def make_read_only(self) -> None:
        self._read_only = True
        self._protect(mmap.PROT_READ)

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
        """Unmaps it; `bytes` must not be used any more."""
        _libc.munmap(self._base, self._mapped + 2 * GUARD_BYTES)
