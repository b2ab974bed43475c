"""`llamay models`: what is here, where, and whether llamay can run it."""

import click

from llamay.cli.output import format_bytes, print_json, print_table, say


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def command(as_json: bool) -> None:
    """List the models on this machine.

    Looks in llamay's own store, Ollama's, the Hugging Face cache and LM Studio's folders. The
    names are what -m takes.
    """
    from llamay.hub import DEFAULT_MODEL
    from llamay.hub.listing import list_models

    entries = list(list_models())
    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "store": entry.store,
                    "path": str(entry.path),
                    "size_bytes": entry.size_bytes,
                    "architecture": entry.architecture,
                    "quantisation": entry.quantisation,
                    "supported": entry.supported,
                    "reason": entry.reason,
                }
                for entry in entries
            ]
        )
        return
    if not entries:
        say(f"no models on this machine; `llamay pull {DEFAULT_MODEL}` fetches one of 98 MB")
        return
    print_table(
        ["NAME", "WHERE", "SIZE", "ARCHITECTURE", "QUANTISATION", "SUPPORTED"],
        [
            [
                entry.name,
                entry.store,
                format_bytes(entry.size_bytes),
                entry.architecture or "-",
                entry.quantisation or "-",
                "yes" if entry.reason is None else f"no: {entry.reason}",
            ]
            for entry in entries
        ],
    )
