from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(empty_home: Path) -> Path:
    """No test of the hub sees the models of this machine."""
    return empty_home
