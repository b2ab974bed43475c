import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llamay import cli, verify
from llamay.kv import Context
from tests.tiny_models import TinyConfig, write_tiny_model

Run = Callable[..., tuple[int, str, str]]

EXACT_ROWS = 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "tiny.gguf"
    write_tiny_model(path, TinyConfig())
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], empty_home: Path) -> Run:
    """Runs `llamay verify` with arguments; gives its code, stdout and stderr."""

    def run_verify(model: Path, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["verify", "-m", str(model), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_verify


def test_the_table(run: Run, tiny: Path) -> None:
    code, output, said = run(tiny, "--tokens", "130")
    assert code == 0
    heading, *lines = output.splitlines()
    assert heading.split() == ["check", "result", "difference", "detail"]
    rows = lines[: lines.index("")]
    assert [line for line in rows if "  0.00e+00" in line] == rows[:EXACT_ROWS]
    assert all("  pass  " in line for line in rows[:EXACT_ROWS])
    assert lines[-1] == "All invariants hold."
    names = [line.split("  ")[0] for line in rows]
    assert [line.split(maxsplit=1)[1] for line in said.splitlines()] == names


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_json(run: Run, tiny: Path, kv: str) -> None:
    code, output, said = run(tiny, "--tokens", "128", "--kv", kv, "--page-tokens", "16", "--json")
    assert (code, said) == (0, "")
    result = json.loads(output)
    assert result.keys() >= {"model", "checks", "ok"}
    assert (result["model"], result["ok"]) == ("tiny llama", True)
    for row in result["checks"]:
        assert row.keys() == {"check", "result", "difference", "detail"}
        assert row["result"] in ("pass", "note")
    assert [row["difference"] for row in result["checks"][:EXACT_ROWS]] == [0] * EXACT_ROWS


def test_a_failed_check_exits_with_1(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "_writable", lambda self, index: None)
    code, output, said = run(tiny, "--tokens", "130", "--json")
    assert (code, said) == (1, "")
    result = json.loads(output)
    assert result["ok"] is False
    (failed,) = [row for row in result["checks"] if row["result"] == "fail"]
    assert failed["check"] == "fork is exact"
    assert failed["difference"] > 0
    monkeypatch.setattr(verify, "_keep_one_bit", lambda *arguments: None)
    code, output, said = run(tiny, "--tokens", "130")
    assert code == 1
    assert output.endswith("\n2 checks failed.\n")
    assert said.count("fail ") == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ctx-size", "127"], "error: ctx-size: expected 128 tokens or more to compare"),
        (["--tokens", "127"], "error: Invalid value for '--tokens': 127 is not in the range 128<="),
        (["--kv", "f8"], "error: Invalid value for '--kv': 'f8' is not one of"),
        (["--page-tokens", "17"], "error: page-tokens: expected a multiple of 16"),
        (["--ctx-mem-budget", "8X"], "error: Invalid value for '--ctx-mem-budget': expected a"),
        (["--ctx-mem-budget", "8\u212a"], "error: Invalid value for '--ctx-mem-budget': expected"),
        (["--ctx-mem-budget", "9" * 5000], "error: Invalid value for '--ctx-mem-budget': expected"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(
    run: Run, tiny: Path, arguments: list[str], expected: str
) -> None:
    code, output, said = run(tiny, *arguments)
    assert (code, output) == (2, "")
    assert said.startswith(expected)
    assert said.count("\n") == 1


@pytest.mark.deep  # the scalar kernels take most of the time
@pytest.mark.model
def test_the_default_model_keeps_its_promises(run: Run, default_model_path: Path) -> None:
    code, output, _ = run(default_model_path, "--tokens", "128", "--json")
    result = json.loads(output)
    assert (code, result["ok"]) == (0, True)
    assert [row["difference"] for row in result["checks"][:EXACT_ROWS]] == [0] * EXACT_ROWS
    moved = {row["check"]: row["difference"] for row in result["checks"]}
    assert moved["vq8 kv cache"] < 0.05 < moved["vq8 bound has teeth"]
