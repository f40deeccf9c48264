"""The command line: one file for each subcommand."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import typer

import givens
from givens import distributed
from givens.cli.build import build
from givens.cli.compare import compare
from givens.cli.demo import demo
from givens.cli.evaluate import evaluate
from givens.cli.fit import fit
from givens.cli.groundtruth import groundtruth
from givens.cli.inspect import inspect
from givens.cli.paper import app as paper
from givens.cli.report import report
from givens.cli.search import search
from givens.cli.tokens import tokens
from givens.cli.train import train
from givens.storage import files

app = typer.Typer(
    name="givens",
    help=givens.__doc__,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    fit,
    build,
    search,
    groundtruth,
    evaluate,
    compare,
    train,
    tokens,
    report,
    inspect,
    demo,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(paper)

# Why ranks end when one is lost: each sees it in another way, or is stopped by torchrun.
LOST = "lost"

# Frames of an import have this name for a file.
IMPORT = "<frozen importlib._bootstrap>"

# Commands that keep their state.
RESUMED = {"fit", "train"}


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


class Interrupted(BaseException):
    """Ctrl-C, or a request to end; not KeyboardInterrupt, of which typer says nothing."""


def main() -> None:
    """Run; what the user can put right is told in one line."""
    # As an error: what is half-written is taken away on the way out.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.unraisablehook = _lost
    try:
        app()
    except Interrupted as error:
        files.remove_unfinished()
        again = "run the same command again"
        if RESUMED & {*sys.argv[1:2]}:
            again += ", with --resume to go on from where its state was last saved"
        _fail(f"interrupted; nothing is left half-written, {again}", 128 + error.args[0], LOST)
    except OSError as error:
        # "q.safetensors: No space left on device", without the number.
        where = f"{error.filename}: " if error.filename else ""
        what = LOST if isinstance(error, ConnectionError) else ""
        _fail(f"{where}{error.strerror or error}", what=what)
    except (ValueError, ImportError, MemoryError) as error:
        _fail(str(error) or "not enough memory")
    except RuntimeError as error:
        if "out of memory" not in f"{error}" and "allocate memory" not in f"{error}":
            raise
        _fail(f"not enough memory: {error}".split(". ")[0])


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupted`; after an import, which would leave its locks or be told as failed."""
    # Imports that a command does, not one that runs `main`.
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename == IMPORT:
            _ask_again(number)
            return
        frame = frame.f_back
    # Once: a terminal's is sent to ranks again by torchrun.
    signal.signal(number, signal.SIG_IGN)
    raise Interrupted(number)


def _lost(error: Any) -> None:
    """Hear of an error where Python lets none out, as in a destructor."""
    if isinstance(error.exc_value, Interrupted):
        signal.signal(error.exc_value.args[0], _interrupt)
        _ask_again(error.exc_value.args[0])
    else:
        sys.__unraisablehook__(error)


def _ask_again(number: int) -> None:
    """Have the signal come once more, soon."""
    timer = threading.Timer(0.02, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _fail(message: str, code: int = 1, what: str = "") -> None:
    """End with a line; of ranks that end for one reason, one has the word."""
    if distributed.is_told(what or message):
        os._exit(code)
    typer.echo(f"givens: {' '.join(message.split())}", err=True)
    sys.exit(code)
