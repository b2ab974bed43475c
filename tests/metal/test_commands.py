"""`llamay verify` and `llamay bench` through the kernels, as users see them."""

import json

import pytest

from llamay import cli
from llamay.engine import model
from llamay.formats import Format
from llamay.mlx_kernels.metal import MetalKernels, check
from tests.test_verify import EXACT_ROWS
from tests.tiny_models import TinyConfig, write_tiny_model

# Notes where there is nothing to choose.
CHECKED = [
    name for name in EXACT_ROWS if name.split()[0] not in ("thread-count", "instruction-set")
]

MODELS = {
    "llama-q4_1": (TinyConfig(), Format.Q4_1),
    "qwen2-q8_0": (TinyConfig(arch="qwen2"), Format.Q8_0),
}


@pytest.fixture
def kernels(quick_metal, monkeypatch, empty_home):
    """Stands in for `load_kernels`; the first start's check has a test of its own."""
    made = MetalKernels(quick_metal.metal_kernel)
    monkeypatch.setattr(model, "load_kernels", lambda *_: made)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_verify(kernels, tmp_path, capsys, name):
    path = tmp_path / f"{name}.gguf"
    write_tiny_model(path, *MODELS[name])
    code = cli.main(["verify", "-m", str(path), "--tokens", "128", "--ctx-size", "256"])
    table = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{name}, Metal's kernels on the host\n{table}")
    assert code == 0
    rows = [line for line in table.splitlines() if "0.00e+00" in line]
    assert [row.split("  ")[0] for row in rows] == CHECKED
    assert all(row.split("  ")[1].strip() == "pass" or " pass " in row for row in rows)


def test_verify_shows_each_kernel_that_was_replaced(kernels, tmp_path, capsys, monkeypatch):
    found = {"embed": "differs from the reference by 0.1", "best": "no Metal library"}
    monkeypatch.setattr(check, "check", lambda *_: (found, True))
    monkeypatch.setattr(kernels, "_checks_file", tmp_path / "kernels.json")
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, TinyConfig(), Format.Q4_1)
    arguments = ["verify", "-m", str(path), "--tokens", "128", "--ctx-size", "256", "--json"]
    assert cli.main(arguments) == 1
    result = json.loads(capsys.readouterr().out)
    first, *others = result["checks"]
    assert (first["check"], first["result"]) == ("kernels work here", "fail")
    assert first["detail"] == "; ".join(f"{name}: {reason}" for name, reason in found.items())
    assert {row["result"] for row in others if row["check"] in EXACT_ROWS} == {"note"}


def test_bench_tells_what_the_device_did(kernels, tmp_path, capsys):
    path, layers, prompt = tmp_path / "tiny.gguf", 2, 70
    write_tiny_model(path, TinyConfig(layers=layers), Format.Q4_1)
    sizes = ["--prompt", str(prompt), "--gen", "3", "--forks", "2", "--batch", "1", "--reps", "2"]
    assert cli.main(["bench", "-m", str(path), *sizes, "--ctx-size", "128", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    decode = result["decode"]["device"]
    assert (decode["dispatches"], decode["submissions"]) == (8 * layers + 3, 1)
    assert 0 < decode["seconds"] < result["decode"]["seconds"]
    prefill = result["prefill"]["device"]
    assert prefill["dispatches"] > 10 * layers
    assert cli.main(["bench", "-m", str(path), *sizes, "--ctx-size", "128"]) == 0
    assert f"{8 * layers + 3} dispatches, 1 submissions, " in capsys.readouterr().out
