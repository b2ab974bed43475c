"""`llamay pull`: fetches a model into llamay's own store."""

import click

from llamay.cli.output import format_bytes, print_json, printable, progress_bar


@click.command("pull")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print an object.")
def command(name: str, as_json: bool) -> None:
    """Fetch the model NAME, unless it is here already.

    NAME is smollm2:135m, the default model, or hf:owner/repo/file.gguf. A download that was
    interrupted continues when the command is repeated.
    """
    from llamay.hub import pull
    from llamay.hub.stores import model_files

    with progress_bar() as progress:
        pulled = pull(name, progress)
    size_bytes = sum(file.stat().st_size for file in model_files(pulled.path))
    if as_json:
        print_json(
            {
                "name": pulled.name,
                "path": str(pulled.path),
                "size_bytes": size_bytes,
                "sha256": pulled.sha256,
                "fetched": pulled.fetched,
            }
        )
        return
    state = "fetched" if pulled.fetched else "already here"
    checked = ", SHA-256 checked" if pulled.sha256 else ""
    click.echo(
        printable(f"{pulled.name}: {state}, {format_bytes(size_bytes)}{checked}: {pulled.path}")
    )
