"""The table of keys, and the user's own."""

from pathlib import Path

import pytest

from llamay.tui.help import ALL_GROUPS
from llamay.tui.keys import load_keymap

KNOWN = {key.id for group in ALL_GROUPS.values() for key in group}


def load(path: Path, text: str) -> tuple[dict[str, str], list[str]]:
    path.write_text(text)
    return load_keymap(path, KNOWN)


def test_names_of_actions_are_unique():
    names = [key.id for group in ALL_GROUPS.values() for key in group]
    assert len(names) == len(set(names))


def test_no_action_has_alt_as_its_only_way():
    for group in ALL_GROUPS.values():
        for key in group:
            assert not all("alt+" in name for name in key.keys.split(",")), key.id


def test_the_users_keys_replace_those_of_the_table(tmp_path):
    keymap, problems = load(
        tmp_path / "keys.toml", '[keys]\nfork = "F"\nsend = ["ctrl+s", "f5"]\nmark = ","\n'
    )
    assert keymap == {"fork": "F", "send": "ctrl+s,f5", "mark": "comma"}
    assert not problems


def test_no_file_is_no_change(tmp_path):
    assert load_keymap(tmp_path / "keys.toml", KNOWN) == ({}, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[keys]\nforc = "F"', "there is no action 'forc'"),
        ("[keys]\nfork = 3", "fork: expected a key or a list of keys, found 3"),
        ('[keys]\nfork = ""', "fork: expected a key"),
        ("[keys]\nfork = []", "fork: expected a key"),
        ("keys = 1", "expected a table [keys]"),
        ("[keys", "expected TOML"),
    ],
)
def test_what_is_wrong_is_left_out_and_said(tmp_path, text, said):
    file = tmp_path / "keys.toml"
    keymap, problems = load(file, text)
    assert keymap == {}
    assert len(problems) == 1
    assert said in problems[0]
    assert str(file) in problems[0]
