"""Fixtures that every room's tests share."""

import os
import sys
from pathlib import Path

import pytest

MODEL_VARIABLE = "LLAMAY_TEST_MODEL"
_STORE_VARIABLES = (
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "LLAMAY_HOME",
    "OLLAMA_MODELS",
)


def pytest_configure() -> None:
    """On a Mac, `auto` is the CPU for all tests and for the processes that they start.

    They demand what holds for its kernels; tests/metal names Metal where it means it.
    """
    if sys.platform == "darwin":
        from llamay.mlx_kernels.cpu import kernel_set_names

        os.environ.setdefault("LLAMAY_ISA", kernel_set_names()[0])


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, from $LLAMAY_TEST_MODEL or else from where llamay finds it.

    Tests that ask for it are marked `model`; they are skipped if the model is not here.
    """
    given = os.environ.get(MODEL_VARIABLE)
    if given:
        path = Path(given)
        if not path.is_file():
            pytest.fail(f"${MODEL_VARIABLE} names {given}, which is not a file")
        return path
    from llamay.hub import find_model

    found = find_model("smollm2:135m")
    if found is None:
        pytest.skip(f"needs `llamay pull smollm2:135m`, or ${MODEL_VARIABLE}=FILE")
    return found


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without models: every folder that llamay looks at is below this new, empty home.

    Proxies are taken out of the environment, so that servers on 127.0.0.1 are reached.
    """
    for variable in list(os.environ):
        if variable.startswith("XDG_") or variable in _STORE_VARIABLES:
            monkeypatch.delenv(variable)
        if variable.lower().endswith("_proxy"):
            monkeypatch.delenv(variable)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LLAMAY_HOME", str(home / "llamay"))
    return home


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With $LLAMAY_FAIL_ON_SKIP, a run that skipped something has failed (`.ci/run` sets it)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("LLAMAY_FAIL_ON_SKIP") or reporter is None:
        return
    if skipped := len(reporter.stats.get("skipped", [])):
        reporter.write_line("")
        reporter.write_line(f"{skipped} skipped, and LLAMAY_FAIL_ON_SKIP is set: failed", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
