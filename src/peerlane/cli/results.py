"""``peerlane results``: files of results as others read them."""

import typer

from peerlane.cli.options import example

EXAMPLE = example("peerlane results schema")
results = typer.Typer(help="Work with files of results: print their JSON Schema.", no_args_is_help=True, epilog=EXAMPLE)


@results.command(epilog=EXAMPLE)
def schema() -> None:
    """Print the JSON Schema of a line of results.jsonl."""
    from peerlane.results.schema import SCHEMA_FILE

    print(SCHEMA_FILE.read_text(encoding="utf-8"), end="")
