"""A machine without models: every folder that the hub looks at lies in a temporary home."""

import os
from pathlib import Path

import pytest

_STORE_VARIABLES = ("LLAMAY_HOME", "OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, no variable that points out of it, and no proxy before local servers."""
    for variable in list(os.environ):
        if variable in _STORE_VARIABLES or variable.startswith("XDG_"):
            monkeypatch.delenv(variable)
        if variable.lower().endswith("_proxy"):
            monkeypatch.delenv(variable)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LLAMAY_HOME", str(home / "llamay"))
    return home
