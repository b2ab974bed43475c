"""`llamay sessions`: the saved sessions: list, show, export, rm."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamay.cli.options import key_flag, read_key
from llamay.cli.output import (
    format_bytes,
    print_json,
    print_table,
    printable,
    say,
    terminal_text,
)
from llamay.errors import SessionError

if TYPE_CHECKING:
    from llamay.session.catalog import Catalog, Entry
    from llamay.session.loading import Loaded
    from llamay.session.manifest import Summary

_PATH = click.Path(path_type=Path)
_json_flag = click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")


@click.group("sessions", invoke_without_command=True)
@key_flag
@_json_flag
@click.pass_context
def command(ctx: click.Context, context_key: Path | None, as_json: bool) -> None:
    """Saved sessions: list (also without a subcommand), show, export, rm."""
    if ctx.invoked_subcommand is None:
        _list(context_key, as_json)


@command.command("list")
@key_flag
@_json_flag
def list_(context_key: Path | None, as_json: bool) -> None:
    """List the sessions, the newest first, copies below what they are copies of."""
    _list(context_key, as_json)


@command.command("show")
@click.argument("name")
@key_flag
@_json_flag
def show(name: str, context_key: Path | None, as_json: bool) -> None:
    """Draw a session's tree of turns."""
    from llamay.session.export import draw

    loaded = _read(name, context_key)
    summary = loaded.summary()
    if as_json:
        print_json({"name": name, **_fields(summary), "encrypted": loaded.encrypted})
        return
    model = f", {summary.model}" if summary.model else ""
    click.echo(printable(f"{name}: {summary.title}"))
    click.echo(printable(f"{summary.tokens} tokens, {_branches(summary.branches)}{model}"))
    for line in draw(loaded.tree):
        click.echo(printable(line))


@command.command("export")
@click.argument("name")
@click.option("-o", "--output", "target", type=_PATH, help="The file to write [standard output].")
@click.option(
    "--format", "form", type=click.Choice(["markdown", "json"]), help="[by the file, or markdown]"
)
@click.option("--branch", "turn", type=int, metavar="TURN", help="Only up to this turn [all].")
@key_flag
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def export(
    name: str,
    target: Path | None,
    form: str | None,
    turn: int | None,
    context_key: Path | None,
    as_json: bool,
) -> None:
    """Write a session, or one branch of it, as Markdown or JSON."""
    from llamay.session.export import to_markdown, to_object

    loaded = _read(name, context_key)
    tree = loaded.tree
    if turn is not None and not tree.visible(turn):
        raise SessionError(f"{name}: there is no turn {turn}; see `llamay sessions show`")
    nodes = list(tree.walk()) if turn is None else tree.path(turn)
    if form is None:
        as_json |= target is not None and target.suffix.lower() == ".json"
        form = "json" if as_json else "markdown"
    if form == "json":
        text = json.dumps(to_object(tree, name, nodes), allow_nan=False) + "\n"
    else:
        text = to_markdown(tree, loaded.summary().title or name, nodes)
    if target is None:
        click.echo(terminal_text(text) if sys.stdout.isatty() else text, nl=False)
        return
    target.write_bytes(text.encode("utf-8", "replace"))
    say(f"wrote {len(nodes) - 1} turns to {target}")


@command.command("rm")
@click.argument("names", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def remove(names: Sequence[str], yes: bool) -> None:
    """Delete sessions for good, unless a process has them open."""
    catalog = _catalog()
    for name in names:
        catalog.path(name)
    listed = ", ".join(map(printable, names))
    if not yes and not click.confirm(f"Delete {listed} for good?", err=True):
        return
    for name in names:
        catalog.remove(name)
        say(f"deleted {name}")


def _list(context_key: Path | None, as_json: bool) -> None:
    entries = _catalog().entries(read_key(context_key))
    if as_json:
        print_json([_entry_fields(entry) for entry in entries])
        return
    if not entries:
        say("no sessions; `llamay` starts one")
        return
    print_table(
        ["NAME", "TITLE", "TOKENS", "BRANCHES", "UPDATED", "MODEL", "SIZE", "STATE"],
        [_row(entry) for entry in entries],
    )


def _row(entry: "Entry") -> list[str]:
    owner = f"open in {entry.owner}" if entry.owner else None
    state = [owner, "encrypted" if entry.encrypted else None, entry.problem]
    name = f"{'  ' * (entry.depth - 1)}└─ {entry.name}" if entry.depth else entry.name
    end = [format_bytes(entry.bytes), ", ".join(filter(None, state))]
    if entry.summary is None:
        return [name, "-", "-", "-", "-", "-", *end]
    summary = entry.summary
    return [
        name,
        summary.title,
        str(summary.tokens),
        str(summary.branches),
        datetime.fromtimestamp(summary.updated).strftime("%Y-%m-%d %H:%M"),
        summary.model or "-",
        *end,
    ]


def _entry_fields(entry: "Entry") -> dict[str, Any]:
    return {
        "name": entry.name,
        **(_fields(entry.summary) if entry.summary else {}),
        "bytes": entry.bytes,
        "encrypted": entry.encrypted,
        "owner": entry.owner,
        "problem": entry.problem,
        "depth": entry.depth,
    }


def _fields(summary: "Summary") -> dict[str, Any]:
    return {name: value for name, value in asdict(summary).items() if name != "sequence"}


def _branches(count: int) -> str:
    return "1 branch" if count == 1 else f"{count} branches"


def _catalog() -> "Catalog":
    from llamay.hub.paths import data_dir
    from llamay.session.catalog import Catalog

    return Catalog(data_dir())


def _read(name: str, context_key: Path | None) -> "Loaded":
    loaded = _catalog().read(name, read_key(context_key))
    for notice in loaded.notices:
        say(notice)
    return loaded
