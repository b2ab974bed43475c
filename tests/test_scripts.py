"""What the scripts import from the project and from each other exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PEER = re.compile(r"^(?:import|from) (?:gguf|llama_cpp|tokenizers|torch)\b", re.MULTILINE)
LOAD = (
    "import runpy, sys; sys.path[0] = sys.argv[1]; runpy.run_path(sys.argv[2], run_name='loaded')"
)


def loads_here(script: Path) -> bool:
    """Whether it is Python and needs no environment of its own."""
    if not script.is_file():
        return False
    text = script.read_bytes().decode()
    return text.startswith("#!/usr/bin/env python3") and not PEER.search(text)


@pytest.mark.parametrize(
    "script", sorted(filter(loads_here, SCRIPTS.iterdir())), ids=lambda path: path.name
)
def test_imports(script: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(SCRIPTS), str(script)]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert loaded.returncode == 0, loaded.stderr
