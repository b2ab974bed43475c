"""The model picker: what is here, what can be pulled, and what cannot run."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from llamay.errors import HubError
from llamay.hub.listing import ModelEntry
from llamay.tui import model_picker
from llamay.tui.model_picker import ModelPicker

from .fake_session import FakeSession
from .host import NARROW, WIDE, Host, until

Scenario = Callable[[Pilot[None], ModelPicker], Awaitable[None]]

GOOD = ModelEntry("qwen2.5:0.5b", "Ollama", Path("/m/q.gguf"), 397_807_936, "qwen2", "Q4_K_M", None)
BAD = ModelEntry(
    "mamba",
    "Ollama",
    Path("/m/x.gguf"),
    10,
    "mamba",
    "F16",
    "architecture mamba is not one of llama",
)


@pytest.fixture
def store(monkeypatch):
    """What the hub has, to be changed by a test; nothing of this machine is looked at."""

    class Store:
        def __init__(self):
            self.entries = [BAD, GOOD]
            self.default_is_here = False
            self.pulled = []

        def resolve(self, name, progress):
            self.pulled.append(name)

    store = Store()
    monkeypatch.setattr(model_picker, "list_models", lambda: iter(store.entries))
    monkeypatch.setattr(
        model_picker,
        "find_model",
        lambda name: Path("/m/s.gguf") if store.default_is_here else None,
    )
    monkeypatch.setattr(model_picker, "resolve", lambda *given: store.resolve(*given))
    return store


def pick(scenario: Scenario, current: str = "", size: tuple[int, int] = NARROW) -> Host:
    async def run() -> Host:
        host = Host(FakeSession(), lambda host: ModelPicker(current))
        async with host.run_test(size=size) as pilot:
            await until(pilot, lambda: not said(host.screen).startswith("looking"))
            await scenario(pilot, host.screen)
            await until(pilot, lambda: True)
        return host

    return asyncio.run(run())


def rows(screen: ModelPicker) -> list[str]:
    return [str(option.prompt) for option in screen.query_one(OptionList).options]


def said(screen: ModelPicker) -> str:
    return str(screen.query_one("#detail", Static).content)


def test_enter_ends_with_a_model_that_is_here(store):
    async def scenario(pilot, screen):
        assert said(screen) == "/m/q.gguf"
        await pilot.press("enter")

    assert pick(scenario).result == ["qwen2.5:0.5b"]
    assert store.pulled == []


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_models_that_run_come_first_then_what_can_be_pulled_then_the_others(store, size):
    async def scenario(pilot, screen):
        width = screen.query_one(OptionList).scrollable_content_region.width
        assert [row.split()[:2] for row in rows(screen)] == [
            ["qwen2.5:0.5b", "qwen2"],
            ["↓", "smollm2:135m"],
            ["✗", "mamba"],
        ]
        assert {"Q4_K_M", "379", "MiB", "Ollama"} <= set(rows(screen)[0].split())
        assert all(len(row) <= width for row in rows(screen))

    pick(scenario, size=size)


def test_one_that_cannot_run_says_why_and_is_not_chosen(store):
    async def scenario(pilot, screen):
        await pilot.press("end", "enter")
        assert said(screen) == "llamay cannot run it: architecture mamba is not one of llama"

    assert pick(scenario).result == []


def test_the_default_model_is_pulled_with_progress_and_then_chosen(store):
    go_on = threading.Event()

    def resolve(name, progress):
        store.pulled.append(name)
        progress("smollm2:135m", 46 << 20, 92 << 20)
        go_on.wait(20)

    store.resolve = resolve

    async def scenario(pilot, screen):
        await pilot.press("j", "enter")
        await until(pilot, lambda: "46 MiB of 92 MiB" in said(screen))
        assert "█" * 12 + "░" * 12 in said(screen)
        go_on.set()
        await until(pilot, lambda: pilot.app.result == ["smollm2:135m"])

    pick(scenario)
    assert store.pulled == ["smollm2:135m"]


def test_escape_stops_a_pull_and_stays(store):
    def resolve(name, progress):
        for done in range(10_000):
            progress(name, done, None)
            threading.Event().wait(0.01)

    store.resolve = resolve

    async def scenario(pilot, screen):
        await pilot.press("j", "enter", "escape")
        await until(pilot, lambda: said(screen).startswith("stopped; pulling smollm2:135m again"))

    assert pick(scenario).result == []


def test_another_model_is_named(store):
    async def scenario(pilot, screen):
        await pilot.press("slash", *"hf:o/r/f.gguf", "enter")
        await until(pilot, lambda: pilot.app.result == ["hf:o/r/f.gguf"])

    pick(scenario)
    assert store.pulled == ["hf:o/r/f.gguf"]


def test_a_pull_that_fails_is_said_and_the_name_stays(store):
    def resolve(name, progress):
        raise HubError("[x]: no such repository; check the name")

    store.resolve = resolve

    async def scenario(pilot, screen):
        await pilot.press("slash", *"hf:x", "enter")
        await until(pilot, lambda: said(screen) == "[x]: no such repository; check the name")
        assert screen.query_one(Input).value == "hf:x"
        await pilot.press("escape")
        assert screen.query_one(OptionList).has_focus

    assert pick(scenario).result == []


def test_it_opens_on_the_model_in_use(store):
    store.default_is_here = True
    store.entries = [GOOD, ModelEntry("z", "llamay", Path("/m/z.gguf"), 5, "llama", "F16", None)]

    async def scenario(pilot, screen):
        assert [row[:3] for row in rows(screen)] == ["  q", "● z"]
        await pilot.press("enter")

    assert pick(scenario, current="z").result == ["z"]
