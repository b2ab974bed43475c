"""Fails unless each symbol that a macOS extension needs is Python's or in the system's C library.

    check_mach_o.py FILE

Linked with `-undefined dynamic_lookup`, a misspelt or Linux-only function would fail only on a Mac,
when the module is loaded. Such symbols carry "dynamic lookup" as their library (mach-o/nlist.h).
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC_64, LC_SYMTAB = 0xFEEDFACF, 2
DEBUG_ENTRY, TYPE_BITS, EXTERNAL = 0xE0, 0x0E, 0x01
NO_LIBRARY = (0x00, 0xFE)  # flat lookup, dynamic lookup


def undefined_symbols(data: bytes) -> Iterator[tuple[str, int]]:
    """(name, number of the library that has it) of a 64-bit Mach-O file."""
    magic, _, _, _, commands = struct.unpack_from("<5I", data)
    if magic != MAGIC_64:
        sys.exit(f"expected a Mach-O file, found magic number {magic:#x}")
    offset = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, offset)
        if command == LC_SYMTAB:
            symbols, count, strings, _ = struct.unpack_from("<4I", data, offset + 8)
            for at in range(symbols, symbols + 16 * count, 16):
                name, kind, _, description, _ = struct.unpack_from("<IBBHQ", data, at)
                if not kind & DEBUG_ENTRY and kind & EXTERNAL and not kind & TYPE_BITS:
                    end = data.index(b"\0", strings + name)
                    yield data[strings + name : end].decode(), description >> 8
        offset += size


def main() -> None:
    path = Path(sys.argv[1])
    symbols = list(undefined_symbols(path.read_bytes()))
    foreign = [
        name
        for name, library in symbols
        if library in NO_LIBRARY and not name.startswith(("_Py", "__Py"))
    ]
    if foreign or not symbols:
        sys.exit(f"{path.name}: not in macOS's C library: {', '.join(foreign) or 'no symbols'}")
    print(f"{path.name}: links; {len(symbols)} symbols are macOS's or Python's")


if __name__ == "__main__":
    main()
