"""Packed weights on disk: the same logits with and without, whatever happens to the files."""

import fcntl
import hashlib
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamay.formats import Format, Tensor
from llamay.gguf import GGUFFile, open_gguf
from llamay.mlx_kernels import _cpu, packed
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.mlx_kernels.packed import HEADER_BYTES, PackedFolder, packed_key
from llamay.model.decoder import Decoder
from tests.model.running import plain, same_bits, tokens
from tests.quantisers import quantise
from tests.tiny_models import TinyConfig, random_integers, write_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
IDS = tokens(20, seed=1)
CHUNK, DIGEST_BYTES = 16 << 20, 16
# SHA-256 of every format's packed bytes. Where these change, files kept before must not be read:
# they need another version.
LAYOUTS = {2: "ff16055b263862b5d453ab8af908fcc408070e942e363583de243180208af63d"}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    write_tiny_model(path, TinyConfig(), Format.Q4_1)
    return path


@pytest.fixture
def folder(tmp_path):
    return PackedFolder(tmp_path / "cache" / "packed", min_bytes=1)


def logits(model, folder, spoil=None):
    """Of the model; spoil: changes each matrix's bytes [rows, row_bytes] once it is opened."""
    with open_gguf(model) as file:
        if spoil is not None:
            tensors = {
                name: replace(tensor, data=spoiled(tensor, spoil)) if tensor.rows > 1 else tensor
                for name, tensor in file.tensors.items()
            }
            file = GGUFFile(file.paths, dict(file.metadata), tensors, (), file.source)
        kernels = CpuKernels(2, packed=folder)
        found = plain(Decoder(file, kernels), IDS)
    if kernels.weights_writer is not None:
        kernels.weights_writer.join(30)
    return found


def spoiled(tensor, spoil):
    data = np.frombuffer(tensor.data, np.uint8).reshape(tensor.rows, -1).copy()
    spoil(data)
    return memoryview(data.tobytes())


def other_weights(data):
    data[:] = data[::-1]


def kept(folder):
    return sorted(folder.folder.glob("*"))


def test_the_second_start_maps_what_the_first_one_packed(model, folder):
    """The weights in the model's file are not read again."""
    first = logits(model, folder)
    assert same_bits(first, logits(model, None))
    (path,) = kept(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    assert same_bits(logits(model, folder, other_weights), first)
    assert not same_bits(logits(model, None, other_weights), first)


def test_kernels_tell_whether_weights_were_packed_by_an_earlier_start(model, folder):
    for mapped in (False, True):
        kernels = CpuKernels(1, packed=folder)
        with open_gguf(model) as file:
            Decoder(file, kernels)
        assert kernels.weights_mapped == mapped
        assert (kernels.weights_writer is None) == mapped
        if kernels.weights_writer is not None:
            kernels.weights_writer.join()


def test_a_changed_file_is_packed_anew(model, folder):
    first = logits(model, folder)
    write_tiny_model(model, TinyConfig(seed=2), Format.Q4_1)
    os.utime(model, ns=(1, 1))
    second = logits(model, folder)
    assert not same_bits(second, first)
    assert same_bits(second, logits(model, None))
    assert len(kept(folder)) == 2


def test_another_file_under_the_same_name_date_and_size_is_packed_anew(model, folder, tmp_path):
    logits(model, folder)
    stat = model.stat()
    other = tmp_path / "other.gguf"
    write_tiny_model(other, TinyConfig(seed=2), Format.Q4_1)
    assert other.stat().st_size == stat.st_size
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(model)
    assert same_bits(logits(model, folder), logits(model, None))
    assert len(kept(folder)) == 2


def flip(offset, count=1):
    """Changes bytes from an offset on, which is counted from the end if it is negative."""

    def change(path):
        data = bytearray(path.read_bytes())
        offset_from_start = offset % len(data)
        for i in range(offset_from_start, offset_from_start + count):
            data[i] ^= 1
        path.write_bytes(data)

    return change


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def append(path):
    with path.open("ab") as file:
        file.write(b"\0")


DAMAGES = {
    "cut": cut,
    "too long": append,
    "empty": lambda path: os.truncate(path, 0),
    "magic": flip(0),
    "key": flip(39),
    "size": flip(40),
    "zeros after the size": flip(HEADER_BYTES - 1),
    "first weights": flip(HEADER_BYTES),
    "a weight": flip(-3000),
    "64 bytes": flip(-3000, 64),
    "last weights": flip(-DIGEST_BYTES - 1),
    "digest": flip(-1),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_whole_is_replaced(model, folder, damage):
    first = logits(model, folder)
    (path,) = kept(folder)
    whole = path.read_bytes()
    damage(path)
    assert same_bits(logits(model, folder), first)
    assert kept(folder) == [path]
    assert path.read_bytes() == whole
    damage(path)
    assert same_bits(logits(model, folder, other_weights), logits(model, None, other_weights))


def test_every_chunk_is_verified(folder):
    weights = content(1, 2 * CHUNK + 1000)
    for offset in (0, CHUNK - 1, CHUNK, 2 * CHUNK, weights.nbytes - 1):
        folder.keep(key(1), weights).join()
        assert folder.load(key(1), weights.nbytes, 2) == weights
        (path,) = kept(folder)
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + offset)
            file.write(bytes([weights[offset] ^ 1]))
        assert folder.load(key(1), weights.nbytes, 2) is None
        assert kept(folder) == [], "what is damaged is removed"


def test_what_is_there_of_a_file_is_not_written_again(folder, monkeypatch):
    """A process that ends, however it does, leaves the beginning of a file."""
    weights = content(1, CHUNK + 1000)
    folder.keep(key(1), weights).join()
    (path,) = kept(folder)
    whole = path.read_bytes()
    written, write = [], os.write
    monkeypatch.setattr(packed.os, "write", lambda *a: written.append(write(*a)) or written[-1])
    ends = (0, 1, HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + CHUNK, len(whole) - 1, len(whole))
    for end in ends:
        path.unlink()
        path.with_suffix(".tmp").write_bytes(whole[:end])
        written.clear()
        folder.keep(key(1), weights).join()
        assert kept(folder) == [path]
        assert path.read_bytes() == whole
        assert sum(written) == len(whole) - end


def test_a_beginning_that_a_power_cut_has_harmed_is_noticed(folder):
    weights = content(1)
    folder.folder.mkdir(parents=True)
    (folder.folder / f"{key(1)}.tmp").write_bytes(bytes(50_000))
    folder.keep(key(1), weights).join()
    assert folder.load(key(1), weights.nbytes, 1) is None
    folder.keep(key(1), weights).join()
    assert folder.load(key(1), weights.nbytes, 1) == weights


@pytest.mark.parametrize("obstacle", ["directory", "file for folder", "link to nothing"])
def test_what_cannot_be_written_is_done_without(model, folder, obstacle):
    first = logits(model, folder)
    (path,) = kept(folder)
    path.unlink()
    match obstacle:
        case "directory":
            path.mkdir()
        case "link to nothing":
            path.symlink_to(path.parent / "nothing")
        case _:
            path.parent.rmdir()
            path.parent.touch()
    assert same_bits(logits(model, folder), first)
    assert same_bits(logits(model, folder), first)


def test_without_room_on_the_disk_nothing_is_kept(model, folder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 10_000, limits[1]))
    try:
        found = logits(model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same_bits(found, logits(model, None))
    assert kept(folder) == []
    assert same_bits(logits(model, folder), found)
    assert len(kept(folder)) == 1


def test_half_of_what_is_free_stays_free(model, folder, monkeypatch):
    usage = type("Usage", (), {"free": 2 * (HEADER_BYTES + 50_000 + DIGEST_BYTES)})
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda path: usage)
    weights = memoryview(bytes(50_001))
    folder.keep("ab" * 32, weights).join()
    assert kept(folder) == []
    folder.keep("ab" * 32, weights[:50_000]).join()
    assert len(kept(folder)) == 1


def test_what_others_left_unfinished_makes_room(folder, monkeypatch):
    """It is removed first, also where there is no room even then."""
    file_bytes = HEADER_BYTES + 50_000 + DIGEST_BYTES
    abandoned = folder.folder / f"{key(1)}.tmp"

    def usage(path):
        found = sum(path.stat().st_size for path in kept(folder))
        return type("Usage", (), {"free": 2 * file_bytes - found})

    monkeypatch.setattr(packed.shutil, "disk_usage", usage)
    for size, suffixes in ((50_001, []), (50_000, [packed.SUFFIX])):
        folder.folder.mkdir(parents=True, exist_ok=True)
        abandoned.write_bytes(bytes(10_000))
        folder.keep(key(2), content(2, size)).join()
        assert [path.suffix for path in kept(folder)] == suffixes


def test_models_below_and_above_what_is_worth_it_are_not_kept(model, folder):
    logits(model, folder)
    (path,) = kept(folder)
    size = path.stat().st_size
    packed_bytes = size - HEADER_BYTES - DIGEST_BYTES
    path.unlink()
    for other in (
        replace(folder, min_bytes=packed_bytes + 1),
        replace(folder, max_bytes=size - 1),
    ):
        logits(model, other)
        assert kept(folder) == []
    logits(model, PackedFolder(folder.folder))
    assert kept(folder) == [], "tiny models are packed at every start"


def test_weights_without_a_source_are_not_kept(model, folder):
    with open_gguf(model) as file:
        nameless = GGUFFile(file.paths, dict(file.metadata), file.tensors, ())
        kernels = CpuKernels(1, packed=folder)
        plain(Decoder(nameless, kernels), IDS)
    assert (kernels.weights_mapped, kernels.weights_writer) == (False, None)
    assert not folder.folder.exists()


def key(number):
    return f"{number:064x}"


def content(number, size=100_000):
    return memoryview(random.Random(number).randbytes(size))


def test_beyond_the_limit_the_least_recently_used_go(folder):
    room_for_two = replace(folder, max_bytes=2 * (HEADER_BYTES + 100_000 + DIGEST_BYTES))
    for number in (1, 2):
        room_for_two.keep(key(number), content(number)).join()
        time.sleep(0.02)  # longer than the file system's clock ticks
    assert room_for_two.load(key(1), 100_000, 1) == content(1)
    mapped = room_for_two.load(key(1), 100_000, 1)
    time.sleep(0.02)
    room_for_two.keep(key(3), content(3)).join()
    assert room_for_two.load(key(2), 100_000, 1) is None
    time.sleep(0.02)
    room_for_two.load(key(3), 100_000, 1)
    time.sleep(0.02)
    room_for_two.keep(key(4), content(4)).join()
    found = [room_for_two.load(key(number), 100_000, 1) for number in (1, 2, 3, 4)]
    assert found == [None, None, content(3), content(4)]
    assert mapped == content(1), "whoever has mapped a file keeps it"


WRITER = """
import sys
from pathlib import Path
from llamay.mlx_kernels.packed import PackedFolder
from tests.mlx_kernels.test_packed import content, key
folder = PackedFolder(Path(sys.argv[1]), min_bytes=1)
print("ready", flush=True)
for number in [int(sys.argv[2])] * 3:
    folder.keep(key(number), content(number, 30_000_000)).join()
"""


def test_processes_that_write_at_once_or_are_killed_leave_whole_files(folder):
    wait = random.Random(1)
    for _ in range(3):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(folder.folder), str(number)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
            for number in (1, 1, 2)
        ]
        for process in started:
            assert process.stdout.readline() == b"ready\n"
        for process in started[1:]:
            time.sleep(wait.uniform(0, 0.05))
            process.kill()
        for process in started:
            process.wait()
            process.stdout.close()
        assert started[0].returncode == 0
        for number in (1, 2):
            found = folder.load(key(number), 30_000_000, 1)
            assert found is None or found == content(number, 30_000_000)
        assert folder.load(key(1), 30_000_000, 1) is not None or started[1].returncode != 0
    folder.keep(key(3), content(3)).join()
    assert {path.suffix for path in kept(folder)} == {packed.SUFFIX}
    assert folder.load(key(3), 100_000, 1) == content(3)


def test_a_file_that_has_its_name_is_never_written_to(folder, monkeypatch):
    """Another writer gives it its name after this one has opened it, and before it locks it."""
    folder.keep(key(1), content(1)).join()
    (path,) = kept(folder)
    temporary = path.with_suffix(packed.TEMPORARY)
    path.rename(temporary)
    lock = fcntl.flock

    def rename_and_lock(descriptor, operation):
        if temporary.exists():
            temporary.rename(path)
        lock(descriptor, operation)

    monkeypatch.setattr(packed.fcntl, "flock", rename_and_lock)
    folder.keep(key(1), content(2)).join()
    assert folder.load(key(1), 100_000, 1) == content(1)


def test_keys_tell_programs_apart():
    kinds = [(Format.Q4_0, (16, 64)), (Format.Q4_0, (64, 16)), (Format.Q4_1, (16, 64))]
    tensors = [Tensor("t", format, shape, memoryview(b"")) for format, shape in kinds]
    keys = {packed_key(source, [tensor]) for source in ("a", "b") for tensor in tensors}
    keys |= {packed_key("a", tensors), packed_key("a", tensors[::-1])}
    assert len(keys) == 8


def test_the_layout_is_the_one_that_the_version_names():
    digest = hashlib.sha256()
    for format in Format:
        rows, columns = 21, 2 * max(format.block_len, 32)
        values = (random_integers(1, format.name, rows * columns) * 2.0**-15).astype(np.float32)
        arguments = (format.type_id, rows, columns)
        target = bytearray(_cpu.packed_bytes(*arguments))
        _cpu.pack(*arguments, quantise(values.reshape(rows, columns), format), target)
        digest.update(target)
    assert LAYOUTS[packed.VERSION] == digest.hexdigest()
