"""The whole app over a session in memory, driven by keys."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot

from llamay.tui.app import LlamayApp
from llamay.tui.main_screen import MainScreen
from llamay.tui.regions import Regions

from .fake_host import FakeHost
from .fake_session import ANSWER, RUNNING, FakeSession

WIDE, NARROW = (120, 40), (80, 24)


class Driver:
    """What a test sees of the app and does with it."""

    def __init__(self, app: LlamayApp, pilot: Pilot[None], host: FakeHost) -> None:
        self.app = app
        self.pilot = pilot
        self.host = host

    @property
    def main(self) -> MainScreen:
        return self.app.main

    @property
    def regions(self) -> Regions:
        return self.app.main.regions

    @property
    def session(self) -> FakeSession:
        return self.host.session

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def write(self, text: str) -> None:
        """Puts a text into the editor at once and sends it."""
        self.regions.editor.text = text
        self.regions.go(self.regions.editor)
        await self.press("enter")

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(500):  # not by the clock: a busy machine may stand still
            if condition():
                await self.pilot.pause()
                return
            await self.pilot.pause(0.01)
        raise AssertionError("it did not happen in time")

    async def quiet(self) -> None:
        """Waits until nothing is written and all of it is shown."""
        await self.until(lambda: not busy(self.session))
        await self.told()

    async def told(self) -> None:
        """Waits until all that the session told is on the screen."""
        for _ in range(2):  # what the journal's thread has in hand is in neither queue
            await self.until(lambda: self.session.all_told and not self.app.bridge._waiting)
            await self.pilot.pause(0.02)

    def screen_text(self) -> str:
        """What is on the screen, without colours."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    def notices(self) -> list[str]:
        return [entry.message for entry in self.app.notices]


Scenario = Callable[[Driver], Awaitable[None]]


def drive(
    scenario: Scenario,
    session: FakeSession | None = None,
    size: tuple[int, int] = WIDE,
    host: FakeHost | None = None,
) -> LlamayApp:
    """Runs a scenario in an app of its own, which ends with it."""

    async def run() -> LlamayApp:
        with tempfile.TemporaryDirectory() as home:
            given = host or FakeHost(Path(home), session)
            app = LlamayApp(given)
            app.animation_level = "none"
            async with app.run_test(size=size) as pilot:
                driver = Driver(app, pilot, given)
                if given.fails is None:
                    await driver.until(lambda: app.session is not None)
                await scenario(driver)
            app.close_session()
            return app

    return asyncio.run(run())


def busy(session: FakeSession) -> bool:
    return any(node.state in RUNNING for node in session.tree.nodes.values())


def settle(session: FakeSession) -> None:
    """Waits, outside an app, until everything is written."""
    for _ in range(1000):
        if not busy(session):
            return
        time.sleep(0.005)
    raise AssertionError("it is still written")


def branched() -> FakeSession:
    """Turns 1 (user), then answers 2, 3 and 4; turn 5 follows 2, and 6 answers it: the place."""
    session = FakeSession(system="You review database migrations.")
    answers = [ANSWER, "A *partial* index.", "None; nobody asks for it."]
    session.script = lambda node: answers[node.seed_index]
    session.send("Which index would you use?", n=3)
    settle(session)
    session.go(2)
    session.script = lambda node: "At that size, measure."
    session.send("And for 10M rows?")
    settle(session)
    return session
