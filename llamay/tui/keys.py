"""Every key of the interface, in one table: bindings, footer, help and palette are made from it.

A user's `keys.toml` in llamay's folder gives actions other keys:

    [keys]
    regenerate = "r"
    send = ["enter", "ctrl+s"]

Keys are named as Textual names them ("ctrl+g", "pagedown", "question_mark" or "?").
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from textual.binding import Binding

from llamay.errors import UsageError


@dataclass(frozen=True, slots=True)
class Key:
    """An action and its keys.

    id:     its name in keys.toml; action: what Textual runs
    keys:   with commas between; the first is the one shown
    footer: the word in the footer, empty for those that only help and palette show
    help:   what it does, as help and palette say it
    """

    id: str
    keys: str
    action: str
    footer: str
    help: str

    @property
    def binding(self) -> Binding:
        """The binding with its own keys; the keymap replaces them by `id`."""
        return Binding(
            self.keys,
            self.action,
            self.footer or self.help,
            show=bool(self.footer),
            id=self.id,
            tooltip=self.help,
        )


APP = (
    Key("palette", "ctrl+p", "command_palette", "Palette", "Every command by name"),
    Key("quit", "ctrl+q", "quit", "", "Save everything and quit"),
    Key("interrupt", "ctrl+c", "interrupt", "", "Stop what is being written; if nothing is, quit"),
)

MAIN = (
    Key("stop", "escape", "escape", "", "Stop generation; else leave what is open"),
    Key("next_region", "tab", "next_region", "", "Next region"),
    Key("previous_region", "shift+tab", "previous_region", "", "Previous region"),
    Key("fork", "f", "fork", "Fork", "Fork: the next message starts a new branch at this turn"),
    Key("sample", "n", "sample", "Sample", "Sample several answers to this turn"),
    Key("edit", "e", "edit", "Edit", "Edit this message as a sibling of it"),
    Key("regenerate", "r", "regenerate", "Again", "Regenerate: another answer beside this one"),
    Key("resume", "R", "resume", "Resume", "Continue a stopped or interrupted answer exactly"),
    Key("mark", "space", "mark", "Mark", "Mark this turn, for compare"),
    Key("compare", "c", "compare", "Compare", "Compare marked answers, or this one's siblings"),
    Key("inspector", "i", "inspector", "State", "Show or hide the state inspector"),
    Key("search", "slash", "search", "Search", "Search all turns"),
    Key("filter", "v", "filter", "", "Show all turns, or those of one kind"),
    Key("label", "L,l", "label", "Label", "Label this turn"),
    Key("delete", "d", "delete", "Delete", "Delete this turn and what follows it"),
    Key("undo", "u", "undo", "", "Undo the last change of the tree"),
    Key("redo", "U", "redo", "", "Redo what was undone"),
    Key("copy", "y", "copy", "Copy", "Copy this turn's text"),
    Key("copy_code", "Y", "copy_code", "", "Copy the last block of code of this turn"),
    Key("duplicate", "D", "duplicate", "", "Duplicate: a new session that begins with this branch"),
    Key("export", "x", "export", "", "Export this branch as Markdown"),
    Key("unfold_text", "o", "unfold_text", "", "Show or fold thinking and long text"),
    Key("sessions", "s", "sessions", "Sessions", "Switch to another session"),
    Key("model", "m", "model", "", "Choose a model"),
    Key("settings", "comma", "settings", "", "System prompt and sampling"),
    Key("system", "S", "system", "", "Edit the system prompt"),
    Key("log", "g,l", "log", "", "Show log"),
    Key("theme", "T", "theme", "", "Light or dark"),
    Key("help", "question_mark,f1", "help", "Help", "All keys"),
)

TREE = (
    Key("go", "enter", "go", "Continue", "Continue here: answers as place, messages to edit"),
    Key("tree_up", "up,k", "up", "", "Previous turn"),
    Key("tree_down", "down,j", "down", "", "Next turn"),
    Key("tree_left", "left,h", "left", "", "Fold, or go to the turn before"),
    Key("tree_right", "right,l", "right", "", "Unfold, or go to the turn after"),
    Key("tree_fold", "z", "fold", "", "Fold or unfold what follows"),
    Key("tree_next_sibling", "right_square_bracket", "sibling(1)", "", "Next sibling"),
    Key("tree_previous_sibling", "left_square_bracket", "sibling(-1)", "", "Previous sibling"),
    Key("tree_home", "home,g", "top", "", "First turn"),
    Key("tree_end", "end,G", "bottom", "", "Last turn"),
    Key("tree_page_up", "pageup", "page(-1)", "", "A page up"),
    Key("tree_page_down", "pagedown", "page(1)", "", "A page down"),
    Key("tree_here", "full_stop", "here", "", "To where the next message goes"),
)
