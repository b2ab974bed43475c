"""The editor of messages."""

import sys
import time
from pathlib import Path

from textual.events import Paste

from .fake_session import FakeSession
from .main_app import Driver, drive


def test_lines_history_and_sending():
    async def scenario(d: Driver) -> None:
        editor = d.regions.editor
        await d.press("a", "ctrl+j", "b")
        assert editor.text == "a\nb"
        assert editor.size.height == 2
        await d.press("enter")
        await d.quiet()
        assert d.session.calls[-1] == ("send", "a\nb", None, 1)
        await d.press("enter", "space", "enter")  # nothing to send
        assert len(d.session.calls) == 1
        editor.text = ""
        await d.press("x", "up")
        assert editor.text == "a\nb"
        await d.press("down")
        assert editor.text == "x"  # the draft comes back

    drive(scenario)


def test_arrows_move_within_several_lines_before_they_reach_the_history():
    async def scenario(d: Driver) -> None:
        editor = d.regions.editor
        editor.remember("earlier")
        await d.press("a", "ctrl+j", "b", "up")
        assert editor.text == "a\nb"
        assert editor.cursor_location[0] == 0
        await d.press("up")
        assert editor.text == "earlier"

    drive(scenario)


def test_writing_in_another_editor(monkeypatch, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("import sys; open(sys.argv[1], 'a').write(' and more\\n')")
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{sys.executable} {program}")

    async def scenario(d: Driver) -> None:
        d.app.suspend = _nothing  # type: ignore[method-assign]
        await d.press("a", "ctrl+g")
        assert d.regions.editor.text == "a and more"
        monkeypatch.setenv("EDITOR", "no-such-editor")
        await d.press("ctrl+g")
        assert d.regions.editor.text == "a and more"

    drive(scenario)


def test_a_paste_of_20_000_lines_is_put_aside_and_sent_whole_and_stays_quick():
    text = "\n".join(f"line {i} of a long log with some words in it" for i in range(20_000))

    async def scenario(d: Driver) -> None:
        begun = time.process_time()
        editor = d.regions.editor
        editor.post_message(Paste(text))
        await d.until(lambda: "[pasted 20,000 lines]" in editor.text)
        await d.press("x")
        editor.post_message(Paste(text.upper().replace("\n", "\r")))  # as terminals send it
        await d.until(lambda: "#2" in editor.text)
        assert editor.text == "[pasted 20,000 lines]x[pasted 20,000 lines #2]"
        await d.press("enter")
        await d.quiet()
        assert d.session.calls[-1][1] == f"{text}x{text.upper()}"
        assert "39,987 more lines" in d.screen_text()
        await d.press("escape", "k", "o", "end", "home", "e")
        assert editor.text == "[pasted 39,999 lines]"
        assert time.process_time() - begun < 8

    drive(scenario, FakeSession())


def test_a_short_paste_is_text():
    async def scenario(d: Driver) -> None:
        editor = d.regions.editor
        editor.post_message(Paste("two\nlines\r"))
        await d.until(lambda: editor.text == "two\nlines\n")
        await d.press("x", "y", "shift+left")
        editor.post_message(Paste("and\r\nmore"))
        await d.until(lambda: editor.text == "two\nlines\nxand\nmore")
        await d.press("!")
        assert editor.text.endswith("more!")

    drive(scenario)


def test_what_is_pasted_in_the_tree_is_for_the_editor():
    async def scenario(d: Driver) -> None:
        d.regions.go(d.regions.tree_view)
        d.app.post_message(Paste("dud"))
        await d.until(lambda: d.regions.editor.text == "dud")
        assert d.regions.editor.has_focus

    drive(scenario)


class _nothing:  # noqa: N801 - stands for a method
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...
