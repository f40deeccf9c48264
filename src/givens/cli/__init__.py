"""The command line: one file for each subcommand."""

import sys

import typer

import givens
from givens.cli.demo import demo

app = typer.Typer(
    name="givens",
    help=givens.__doc__,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"givens {givens.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Options that come before the subcommand."""


def main() -> None:
    """Run; what the user can put right is told in one line."""
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"givens: {error}", err=True)
        sys.exit(1)
