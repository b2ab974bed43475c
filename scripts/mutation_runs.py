"""What `check_mutations`, `check_kv_mutations` and `check_metal_mutations` share.

Each breaks a copy of the project in one place at a time and runs tests there, in the tests'
environment.
"""

import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("llamay", "scripts", "testdata", "tests", "pyproject.toml")

# An edit may make a loop endless, or have somebody wait for ever: what takes so many times as long
# counts as that, of the processor and of the clock, of which other work takes its share.
SLOWER, LATER = 5, 50

BOUNDED = """
import os, resource, sys
most_s = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class EndlessError(Exception):
    """What was run does not come to an end."""


def copy_tree(target: Path) -> None:
    """Copies what the tests need; ends the script if they would import another copy of llamay."""
    ignored = shutil.ignore_patterns("__pycache__", "*.objects")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target / name)
    where = run_python(target, "-c", "import llamay; print(llamay.__file__)").stdout.splitlines()
    if not Path(where[-1]).resolve().is_relative_to(target.resolve()):
        sys.exit("the tests would import another copy of llamay")


def run_python(
    tree: Path, *arguments: str, usual_s: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a tree, with the tree's llamay; both outputs are in `stdout`.

    usual_s: seconds of the processor that it takes if nothing is broken; None does not bound them

    Raises EndlessError if it takes SLOWER times as many, or LATER times as long.
    """
    most_s = None if usual_s is None else math.ceil(SLOWER * usual_s)
    bound = () if most_s is None else ("-c", BOUNDED, str(most_s))
    try:
        done = subprocess.run(
            [sys.executable, *bound, *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
            | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=None if usual_s is None else LATER * usual_s,
        )
    except subprocess.TimeoutExpired as error:
        raise EndlessError(f"no end within {error.timeout:.0f} s") from None
    if most_s is not None and done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise EndlessError(f"no end within {most_s} s of the processor")
    return done


def processor_s() -> float:
    """Seconds of the processor that ended children have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
