"""Contexts on disk: written, read back to the same bits, converted, and shown without a model.

`format` has the byte table.
"""

from llamay.kv.snapshot.convert import convert_snapshot
from llamay.kv.snapshot.encryption import Key
from llamay.kv.snapshot.files import sweep
from llamay.kv.snapshot.format import Encryption, Header, Identity
from llamay.kv.snapshot.reader import Check, Restored, Shown, read_snapshot, show_snapshot
from llamay.kv.snapshot.segments import Extended, Run, extend_from_segments, write_segment
from llamay.kv.snapshot.writer import SnapshotInfo, write_snapshot

__all__ = [
    "Check",
    "Encryption",
    "Extended",
    "Header",
    "Identity",
    "Key",
    "Restored",
    "Run",
    "Shown",
    "SnapshotInfo",
    "convert_snapshot",
    "extend_from_segments",
    "read_snapshot",
    "show_snapshot",
    "sweep",
    "write_segment",
    "write_snapshot",
]
