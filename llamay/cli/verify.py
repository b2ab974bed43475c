"""`llamay verify`: the table of what is exact, computed on the model at hand."""

import click

from llamay.cli.options import ModelOptions, model_flags
from llamay.cli.output import print_json, print_table, say


@click.command("verify")
@click.option("--tokens", type=click.IntRange(128, 8192), default=320, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print an object.")
@model_flags
@click.pass_context
def command(ctx: click.Context, tokens: int, as_json: bool, options: ModelOptions) -> None:
    """Check that a context continues with a logit difference of exactly 0.

    Exits with 1 if a check fails.
    """
    from llamay.verify import run_checks

    engine = options.load(identified=True)
    checks = []
    for check in run_checks(engine, tokens):
        checks.append(check)
        if not as_json:
            say(f"{check.result:5} {check.check}")
    failed = [check for check in checks if check.result == "fail"]
    if as_json:
        rows = [
            {
                "check": check.check,
                "result": check.result,
                "difference": check.difference,
                "detail": check.detail,
            }
            for check in checks
        ]
        print_json({"model": engine.model.name, "checks": rows, "ok": not failed})
    else:
        print_table(
            ("check", "result", "difference", "detail"),
            [
                (check.check, check.result, _difference(check.difference), check.detail)
                for check in checks
            ],
        )
        click.echo("\nAll invariants hold." if not failed else f"\n{len(failed)} checks failed.")
    if failed:
        ctx.exit(1)


def _difference(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"
