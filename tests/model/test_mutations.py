"""The tests of exactness notice a fault in a reduction's order: one here, more when run deep.

The edits that `scripts/check_mutations` and `check_kv_mutations` make fit the text that is there.
"""

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "check_mutations"
KV_SCRIPT = ROOT / "scripts" / "check_kv_mutations"


def check_mutations(*names):
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if not shutil.which(compiler) and not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    result = subprocess.run([sys.executable, SCRIPT, *names], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_edit_fits_its_file(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    edits = [
        (ROOT / "llamay/mlx_kernels/csrc" / mutation.file, old)
        for mutation in runpy.run_path(str(SCRIPT))["MUTATIONS"].values()
        for old, _ in mutation.edits
    ]
    edits += [
        (ROOT / "llamay/kv" / mutation.file, mutation.old)
        for mutation in runpy.run_path(str(KV_SCRIPT))["MUTATIONS"]
    ]
    assert len(edits) > 300
    assert [(path.name, old) for path, old in edits if path.read_text().count(old) != 1] == []


def test_runs_merged_in_another_order_turn_the_tests_red():
    assert check_mutations("runs-merged-backwards") == (
        "runs-merged-backwards: red, as it should be\n"
    )


@pytest.mark.deep
def test_every_mutation_turns_the_tests_red():
    check_mutations()
