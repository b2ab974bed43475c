import errno
import io
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamay.errors import HubError, UsageError
from llamay.hub import digest, download, find_model, pull, resolve
from tests.hub.hub_server import COMMIT, PATH, Hub, serve

NAME = "hf:owner/repo/Q4/file.gguf"
CONTENT = random.Random(1).randbytes(3_000_000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(CONTENT)
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    with serve(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def target(home: Path) -> Path:
    return home / "llamay" / "models" / "hf" / "owner" / "repo" / "Q4" / "file.gguf"


@pytest.fixture
def part(target: Path) -> Path:
    target.parent.mkdir(parents=True)
    return target.with_name("file.gguf.part")


def ranges(hub: Hub) -> list[str | None]:
    """The Range of each request that was answered with content."""
    return [wanted for method, path, wanted, _ in hub.requests if path == "/cdn"]


def test_a_download_is_whole_named_and_found_again(hub: Hub, target: Path) -> None:
    pulled = pull(NAME)
    assert (pulled.path, pulled.fetched) == (target, True)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["file.gguf"]
    count = len(hub.requests)
    assert find_model(NAME) == resolve(NAME) == target
    assert not pull(NAME).fetched
    assert len(hub.requests) == count


def test_the_digest_of_a_download_is_known_without_reading_it(hub: Hub, target: Path) -> None:
    pulled = pull(NAME)
    reads: list[int] = []
    found = digest.weights_digest(target, lambda label, done, total: reads.append(done))
    assert (found, reads) == (pulled.sha256, [])


def test_progress_ends_at_the_size(hub: Hub) -> None:
    calls: list[tuple[int, int | None]] = []
    pull(NAME, lambda label, done, total: calls.append((done, total)))
    assert calls[-1] == (len(CONTENT), len(CONTENT))
    assert calls == sorted(calls)


def test_a_download_resumes_where_an_earlier_run_stopped(
    hub: Hub, target: Path, part: Path
) -> None:
    part.write_bytes(CONTENT[:1_234_567])
    pull(NAME)
    assert target.read_bytes() == CONTENT
    assert ranges(hub) == ["bytes=1234567-"]


def test_a_part_that_is_complete_is_only_checked(hub: Hub, target: Path, part: Path) -> None:
    part.write_bytes(CONTENT)
    pull(NAME)
    assert target.read_bytes() == CONTENT
    assert ranges(hub) == []


@pytest.mark.parametrize("stale", [b"x" * 1000, b"x" * len(CONTENT), b"x" * 4_000_000])
def test_a_part_of_another_file_is_replaced(
    hub: Hub, target: Path, part: Path, stale: bytes
) -> None:
    part.write_bytes(stale)
    pull(NAME)
    assert target.read_bytes() == CONTENT


def test_a_server_that_ignores_ranges_is_read_from_the_start(
    hub: Hub, target: Path, part: Path
) -> None:
    hub.ranges = False
    part.write_bytes(CONTENT[:1000])
    pull(NAME)
    assert target.read_bytes() == CONTENT


def test_a_broken_transfer_is_taken_up_again(hub: Hub, target: Path) -> None:
    hub.cut_after, hub.cuts = 1_000_000, 2
    pull(NAME)
    assert target.read_bytes() == CONTENT
    assert ranges(hub) == [None, "bytes=1000000-", "bytes=2000000-"]


def test_a_transfer_that_keeps_breaking_keeps_what_came(hub: Hub, target: Path, part: Path) -> None:
    hub.cut_after, hub.cuts = 100_000, 99
    with pytest.raises(HubError, match=r"broke off after 0\.5 MB of 3\.0 MB.*kept"):
        pull(NAME)
    assert not target.exists()
    assert part.read_bytes() == CONTENT[:500_000]
    hub.cuts = 0
    pull(NAME)
    assert target.read_bytes() == CONTENT


def test_bytes_that_do_not_match_the_digest_are_thrown_away(
    hub: Hub, target: Path, part: Path
) -> None:
    hub.promised_sha256 = "0" * 64
    with pytest.raises(HubError, match=r"0{64}.*thrown away"):
        pull(NAME)
    assert not target.exists()
    assert part.stat().st_size == 0


def test_another_size_than_promised_is_refused(hub: Hub, target: Path) -> None:
    hub.promised_size = len(CONTENT) + 1
    with pytest.raises(HubError, match=r"promises 3000001 bytes.*3000000"):
        pull(NAME)
    assert not target.exists()


def test_a_file_without_digest_is_checked_by_its_length(hub: Hub, target: Path) -> None:
    hub.linked = False
    hub.cut_after, hub.cuts = 1_000_000, 1
    pulled = pull(NAME)
    assert target.read_bytes() == CONTENT
    assert pulled.sha256 is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "no such file"),
        (401, "denies access.*HF_TOKEN"),
        (403, "denies access.*HF_TOKEN"),
        (503, "503"),
    ],
)
def test_refusals_are_explained(hub: Hub, target: Path, status: int, words: str) -> None:
    hub.status = status
    with pytest.raises(HubError, match=f"{NAME}.*{words}"):
        pull(NAME)
    assert not target.exists()


def test_a_refused_connection_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(HubError, match=f"127.0.0.1:{port}.*refused.*network"):
        pull(NAME)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1", "file:///etc", "ftp://host", "http://", "http://a b", "http://h:x"]
)
def test_an_endpoint_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        pull(NAME)


def test_the_token_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull(NAME)
    tokens = [(path, token) for _, path, _, token in hub.requests]
    assert tokens == [
        (PATH.format(revision="main"), "Bearer hf_secret"),
        (PATH.format(revision=COMMIT), "Bearer hf_secret"),
        ("/cdn", None),
    ]


def test_a_split_model_is_fetched_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(CONTENT)
    first = "m-00001-of-00002.gguf"
    monkeypatch.setattr("tests.hub.hub_server.PATH", "/owner/repo/resolve/{revision}/" + first)
    with serve(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(HubError, match=r"m-00002-of-00002.gguf.*no such file"):
            pull(f"hf:owner/repo/{first}")
    assert find_model(f"hf:owner/repo/{first}") is None


class FullDisk(io.FileIO):
    """A file on a disk that takes another `room` bytes."""

    room = 1_500_000

    def write(self, data: object) -> int:
        view = memoryview(data)[: self.room]  # type: ignore[arg-type]
        if not view:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(view)
        return super().write(view)


def test_a_full_disk_is_explained_and_the_download_continues_later(
    hub: Hub, target: Path, part: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamay.hub.files.FileIO", FullDisk)
        with pytest.raises(HubError, match=f"{target.parent}.*disk is full.*LLAMAY_HOME"):
            pull(NAME)
    assert part.read_bytes() == CONTENT[:1_500_000]
    pull(NAME)
    assert target.read_bytes() == CONTENT
    assert ranges(hub) == [None, "bytes=1500000-"]


def test_a_file_that_cannot_fit_is_refused_before_it_is_fetched(
    hub: Hub, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(HubError, match="3 MB are needed and 1 MB are free"):
        pull(NAME)
    assert not target.exists()


def test_a_folder_that_cannot_be_made_is_named(hub: Hub, home: Path) -> None:
    (home / "llamay").write_text("a file where the folder should be")
    with pytest.raises(HubError, match=r"llamay.*LLAMAY_HOME"):
        pull(NAME)


def test_processes_at_once_fetch_it_once(hub: Hub, target: Path) -> None:
    script = f"from llamay.hub import pull; print(pull({NAME!r}).fetched)"
    runs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [run.communicate()[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(said) == ["False", "False", "True"]
    assert target.read_bytes() == CONTENT
    assert len(ranges(hub)) == 1
    assert [path.name for path in target.parent.iterdir()] == ["file.gguf"]
