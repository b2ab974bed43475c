"""The tests of exactness notice a fault in a reduction's order: one here, more when run deep."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "check_mutations"


def check_mutations(*names):
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if not shutil.which(compiler) and not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    result = subprocess.run([sys.executable, SCRIPT, *names], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_runs_merged_in_another_order_turn_the_tests_red():
    assert check_mutations("runs-merged-backwards") == (
        "runs-merged-backwards: red, as it should be\n"
    )


@pytest.mark.deep
def test_every_mutation_turns_the_tests_red():
    check_mutations()
