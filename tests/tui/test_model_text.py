"""A model's text is data wherever it is shown: no markup, no escape sequence, straight columns."""

import pytest

from .fake_session import FakeSession
from .main_app import WIDE, Driver, drive, settle

HOSTILE = (
    "[bold red]markup[/] [@click=app.quit]press[/] [link=http://x]y[/link]\n"
    "\x1b[31mred\x1b[0m \x1b]52;c;ZXZpbA==\x07 \x9b2J \x1b[2J \x08\x08 \r over\n"
    "\u202eright to left\u202c [see](http://evil.example) <script>x</script>"
)
WIDE_TEXT = (
    "한글과 漢字 かな, 👨‍👩‍👧 family ❤️ heart 👍🏽 thumb 🇩🇪 flag 1️⃣, "
    "cafe\u0301 n\u0303 ก็ กำลัง, שלום עולם, مرحبا بالعالم, हिन्दी क्षि "
) * 4


def everywhere(text: str) -> FakeSession:
    """A session with this text in every place that shows any."""
    session = FakeSession(name="hostile", system=text)
    session.script = lambda node: text
    session.send(text, n=2)
    settle(session)
    session.label(2, text[:60])
    session.send(text)
    settle(session)
    return session


@pytest.mark.parametrize("text", [HOSTILE, f"```{HOSTILE}\n{HOSTILE}\n```", f"<think>{HOSTILE}"])
def test_nothing_in_a_text_is_obeyed(text):
    session = everywhere(text)

    async def scenario(d: Driver) -> None:
        session.notice(HOSTILE, "error")
        await d.told()
        await d.press("escape", "o")
        for _ in range(2):
            for strip in d.app.screen._compositor.render_strips():
                assert not set(strip.text) & set("\x1b\x07\x08\x9b\r\u202e\u202c")
                assert strip.cell_length == WIDE[0]
                for segment in strip:
                    style = segment.style
                    assert style is None or (style.link is None and "@click" not in style.meta)
            await d.press("slash")  # and with the tree searched

    drive(scenario, session)


def test_markup_is_shown_as_it_was_written():
    session = everywhere("[bold red]markup[/] stays")

    async def scenario(d: Driver) -> None:
        assert d.screen_text().count("[bold red]markup[/]") >= 4

    drive(scenario, session)


@pytest.mark.parametrize("size", [WIDE, (80, 24)])
def test_columns_stay_straight_whatever_the_script(size):
    session = everywhere(WIDE_TEXT)

    async def scenario(d: Driver) -> None:
        for _ in range(3):
            lines = d.app.screen._compositor.render_strips()
            assert {line.cell_length for line in lines} == {size[0]}
            # Regions end where their border stands, on every line.
            assert lines[5].text.rstrip()[-1] in "┃│▌"
            await d.press("tab")

    drive(scenario, session, size=size)
