"""Every key of the main screen, in one table: bindings, footer, help and palette are made from it.

A user's `keys.toml` in llamay's folder gives actions other keys, by the names of this table:

    [keys]
    regenerate = "r"
    send = ["ctrl+s"]

Keys are named as Textual names them ("ctrl+g", "pagedown", "?").
"""

import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Key:
    """An action and its keys.

    id:     its name in keys.toml; action: what Textual runs
    keys:   with commas between; the first is the one shown
    footer: the word in the footer, empty for what only help and palette show
    help:   what it does, as help and palette say it
    """

    id: str
    keys: str
    action: str
    footer: str
    help: str


APP = (
    Key("palette", "ctrl+p", "command_palette", "Palette", "Every command by name"),
    Key("quit", "ctrl+q", "quit", "", "Save everything and quit"),
    Key("interrupt", "ctrl+c", "interrupt", "", "Stop what is being written; if nothing is, quit"),
    Key("theme", "T", "theme", "", "Light or dark, from now on"),
    Key("log", "ctrl+l", "log", "", "Show log"),
    Key("help", "question_mark,f1", "help", "Help", "All keys"),
)

MAIN = (
    Key("leave_editor", "escape", "leave_editor", "Turns", "From the editor to the turns"),
    Key("escape", "escape", "escape", "", "Stop generation; else leave what is open"),
    Key("fork", "f", "fork", "Fork", "Fork: the next message starts a new branch here"),
    Key("sample", "n", "sample", "Sample", "Sample several answers and compare them"),
    Key("edit", "e", "edit", "Edit", "Edit this message as a sibling of it"),
    Key("regenerate", "r", "regenerate", "Again", "Another answer beside this one"),
    Key("resume", "R", "resume", "Resume", "Continue a stopped answer from its exact token"),
    Key("compare", "c", "compare", "Compare", "Compare marked turns, or this answer's siblings"),
    Key("inspector", "i", "inspector", "State", "Show or hide the state inspector"),
    Key("search", "slash", "search", "Search", "Search all turns"),
    Key("next_region", "tab", "next_region", "Region", "Next region"),
    Key("previous_region", "shift+tab", "previous_region", "", "Previous region"),
    Key("mark", "space", "mark", "Mark", "Mark this turn, for compare"),
    Key("label", "l,L", "label", "Label", "Label this turn"),
    Key("delete", "d", "delete", "Delete", "Delete this turn and what follows it"),
    Key("undo", "u", "app.undo", "", "Undo the last change of the tree"),
    Key("redo", "U", "app.redo", "", "Redo what was undone"),
    Key("copy", "y", "copy", "Copy", "Copy this turn's text"),
    Key("copy_code", "Y", "copy_code", "", "Copy the last code block of this turn"),
    Key("unfold_text", "o", "unfold_text", "", "Show or fold thinking and long messages"),
    Key("duplicate", "D", "app.duplicate", "", "Duplicate: a new session from here"),
    Key("export", "x", "app.export", "", "Export this branch as Markdown"),
    Key("sessions", "s", "app.sessions", "Sessions", "Switch to another session, or a new one"),
    Key("model", "m", "app.model", "", "Choose a model"),
    Key("settings", "comma", "app.settings", "", "Sampling and system prompt from here on"),
    Key("system", "S", "app.system", "", "The session's system prompt"),
)

TREE = (
    Key("go", "enter", "screen.go", "Continue", "Continue here; a message goes to the editor"),
    Key("tree_up", "up,k", "up", "", "Turn above"),
    Key("tree_down", "down,j", "down", "", "Turn below"),
    Key("tree_left", "left,h", "left", "", "Fold, or to the turn before"),
    Key("tree_right", "right", "right", "", "Unfold, or to the turn after"),
    Key("tree_unfold", "l", "unfold", "Unfold", "Unfold, if it is folded"),
    Key("tree_fold", "z", "fold", "", "Fold or unfold what follows"),
    Key("tree_filter", "v", "filter", "", "Show all, branch ends, labelled, marked, unfinished"),
    Key("tree_next_sibling", "right_square_bracket", "sibling(1)", "", "Next sibling"),
    Key("tree_previous_sibling", "left_square_bracket", "sibling(-1)", "", "Previous sibling"),
    Key("tree_here", "full_stop", "here", "", "To where the next message goes"),
    Key("tree_first", "home,g", "first", "", "First turn"),
    Key("tree_last", "end,G", "last", "", "Last turn"),
    Key("tree_page_up", "pageup,ctrl+b", "page(-1)", "", "A page up"),
    Key("tree_page_down", "pagedown,ctrl+f", "page(1)", "", "A page down"),
)

TRANSCRIPT = (
    Key(
        "continue", "enter", "screen.go", "Continue", "Continue here; a message goes to the editor"
    ),
    Key("turn_up", "up,k", "up", "", "Scroll up, or to the turn above"),
    Key("turn_down", "down,j", "down", "", "Scroll down, or to the turn below"),
    Key("next_sibling", "right,right_square_bracket", "screen.sibling(1)", "", "Next sibling"),
    Key(
        "previous_sibling",
        "left,h,left_square_bracket",
        "screen.sibling(-1)",
        "",
        "Previous sibling",
    ),
    Key("turn_first", "home,g", "first", "", "First turn"),
    Key("turn_last", "end,G", "last", "", "Last turn"),
    Key("turn_page_up", "pageup,ctrl+b", "page(-1)", "", "A page up"),
    Key("turn_page_down", "pagedown,ctrl+f", "page(1)", "", "A page down"),
)

EDITOR = (
    Key("send", "enter", "send", "Send", "Send; while it answers, the message waits its turn"),
    Key("new_line", "ctrl+j,shift+enter", "new_line", "New line", "New line"),
    Key("history_back", "up", "history(-1)", "", "Earlier message, from the first line"),
    Key("history_on", "down", "history(1)", "", "Later message, from the last line"),
    Key("external", "ctrl+g", "external", "", "Write in $EDITOR"),
)

GROUPS = {
    "Everywhere": APP,
    "Outside the editor": MAIN,
    "Tree": TREE,
    "Transcript": TRANSCRIPT,
    "Editor": EDITOR,
}


def bindings(keys: Iterable[Key]) -> list[Binding]:
    """Textual's bindings, with the table's own keys; the app's keymap replaces those by id."""
    return [
        Binding(
            key.keys,
            key.action,
            key.footer or key.help,
            show=bool(key.footer),
            id=key.id,
            tooltip=key.help,
        )
        for key in keys
    ]


def load_keymap(path: Path, known: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The keys that the file gives to actions, by id, and a sentence for all that is wrong in it.

    known: ids of all actions. No file is an empty keymap. Entries that are wrong are left out.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8")).get("keys", {})
    except FileNotFoundError:
        return {}, []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return {}, [f"{path}: expected TOML in UTF-8 ({error}); the keys are llamay's own"]
    if not isinstance(table, dict):
        return {}, [f"{path}: expected a table [keys]; the keys are llamay's own"]
    keymap, problems = {}, []
    for id, keys in table.items():
        names = _names(keys)
        if id not in known:
            problems.append(f"{path}: there is no action {id!r}; help (?) lists them all")
        elif names is None:
            problems.append(f"{path}: {id}: expected a key or a list of keys, found {keys!r}")
        else:
            keymap[id] = ",".join(names)
    return keymap, problems


def _names(keys: Any) -> list[str] | None:
    """The keys of an entry; None if it is none. A comma is written as Textual names it."""
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, list) or not names:
        return None
    if not all(isinstance(name, str) and name.strip() for name in names):
        return None
    return ["comma" if name == "," else name.strip() for name in names]
