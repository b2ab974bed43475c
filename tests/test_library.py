"""What the documentation shows is what happens."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import llamay

ROOT = Path(__file__).parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.model
def test_the_examples_of_the_library_run(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = llamay.Engine.load
    monkeypatch.setattr(
        llamay.Engine, "load", lambda name: load({"smollm2:135m": str(default_model_path)}[name])
    )
    failed, tried = doctest.testfile(
        str(ROOT / "docs" / "library.md"), module_relative=False, optionflags=OPTIONS
    )
    assert failed == 0
    assert tried > 25


def test_importing_llamay_loads_nothing_heavy() -> None:
    heavy = "{'numpy', 'mlx', 'textual', 'jinja2'}"
    code = f"import sys, llamay; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("name", llamay.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert getattr(llamay, name).__doc__


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = llamay.Nothing
