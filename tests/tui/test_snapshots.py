"""Pictures of a few screens, compared with those in testdata; LLAMAY_UPDATE_SNAPSHOTS=1 draws them.

What is compared is the text of each line with its colours and attributes, so that the numbers that
an SVG's names are made of do not matter.
"""

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llamay.events import Resumed

from .fake_session import FakeSession
from .main_app import NARROW, WIDE, Driver, branched, drive

FOLDER = Path(__file__).parents[2] / "testdata" / "tui"
SVG = "{http://www.w3.org/2000/svg}"


def rows(svg: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The picture's lines from above: their height on it, and (text, style) of each piece."""
    styles = dict(re.findall(r"\.(?:terminal-\d+-)?(r\d+) \{ (.*?) \}", svg))
    found: dict[float, list[tuple[float, str, str]]] = {}
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        name = re.sub(r"terminal-\d+-", "", text.get("class", ""))
        if name in styles:
            place = float(text.get("y", 0)), float(text.get("x", 0))
            found.setdefault(place[0], []).append((place[1], text.text or "", styles[name]))
    return [(str(y), [(t, s) for _, t, s in sorted(found[y])]) for y in sorted(found)]


async def compare(driver: Driver, name: str) -> None:
    await driver.told()
    svg = driver.app.export_screenshot(title="llamay")
    file = FOLDER / f"{name}.svg"
    if os.environ.get("LLAMAY_UPDATE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(svg, "utf-8")
    assert rows(svg) == rows(file.read_text("utf-8")), f"{file} shows another screen"


def review() -> FakeSession:
    """A session with something of everything that a transcript and a tree show."""
    session = branched()
    session.label(3, "shorter")
    session.script = lambda node: (
        "<think>\nWhich one?\n</think>\n\nThis one:\n\n"
        "```sql\nCREATE UNIQUE INDEX ON users (email); -- quick\n```\n\n"
        "1. It is **small**.\n2. It is *exact*: see `pg_index`.\n\n"
        "| rows | ms |\n|---|---|\n| 10M | 3 |\n"
    )
    session.send("Show me 漢字 and שלום")
    return session


@pytest.mark.parametrize(
    ("name", "size", "light"),
    [("main_dark", WIDE, False), ("main_light", WIDE, True), ("narrow", NARROW, False)],
)
def test_main_screen(name, size, light):
    async def scenario(d: Driver) -> None:
        await d.quiet()
        d.session.emit(Resumed(2202, 0.031, None))
        if light:
            d.app.action_theme()
        await d.press("escape")
        await compare(d, name)

    drive(scenario, review(), size=size)


def test_first_screen():
    async def scenario(d: Driver) -> None:
        await compare(d, "first")

    drive(scenario, FakeSession("new"))


def test_dialog_over_the_tree():
    async def scenario(d: Driver) -> None:
        d.regions.go(d.regions.tree_view)
        await d.press("j", "d")
        await compare(d, "delete")

    drive(scenario, branched(), size=NARROW)
