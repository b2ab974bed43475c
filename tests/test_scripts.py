"""What the scripts import from the project and from each other exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PEER = re.compile(r"^(?:import|from) (?:gguf|llama_cpp|tokenizers|torch)\b", re.MULTILINE)
LOAD = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='loaded')"


def loads_here(script: Path) -> bool:
    """Whether it is Python and needs no environment of its own."""
    if not script.is_file():
        return False
    text = script.read_bytes().decode()
    return text.startswith("#!/usr/bin/env python3") and not PEER.search(text)


@pytest.mark.parametrize("name", sorted(path.name for path in filter(loads_here, SCRIPTS.iterdir())))
def test_imports(name: str) -> None:
    command = [sys.executable, "-c", LOAD, str(SCRIPTS / name)]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert loaded.returncode == 0, loaded.stderr
