"""The command line: one file for each subcommand."""

import io
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer

import givens
from givens import distributed
from givens.cli import output as out
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

# The message when a rank is lost: each rank sees another error, or is stopped by torchrun.
LOST = "lost"

# Commands that save their state and can continue.
RESUMED = {"fit", "train"}

# Seconds to wait until an interrupted command releases the output.
FLUSHING = 1.0


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"givens {givens.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Options before the subcommand."""


# Seconds between two checks of the signal handlers.
TAKEN_BACK = 0.2


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; its argument is the number of the signal."""


def main() -> None:
    """Run the command line; an error that the user can fix is one line on stderr.

    The command runs in a thread of its own while this one waits, so that an interrupt is raised
    here, and not inside an import, a destructor or a callback, where Python would lose it.
    """
    # A name that is no UTF-8 is shown with escapes.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    command = threading.Thread(target=_run, args=(outcome,), daemon=True)
    try:
        _handle_signals(_interrupt)
        command.start()
        error = _wait_for(outcome)
        _handle_signals(signal.SIG_IGN)
        if error is not None:
            raise error
    except Interrupted as error:
        # The command may still run until the process ends.
        files.remove_unfinished(for_good=command.is_alive())
        out.undo()
        again = "run the same command again"
        if RESUMED & {*sys.argv[1:2]}:
            again += ", with --resume to continue from where its state was last saved"
        line, code = f"interrupted; nothing is left half-written, {again}", 128 + error.args[0]
        _fail(line, code, LOST, leave=_exit_at_once if command.is_alive() else None)
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


def _run(outcome: queue.SimpleQueue[BaseException | None]) -> None:
    """Run the command in `sys.argv`, and hand over its error, if any."""
    try:
        app()
    except BaseException as error:
        outcome.put(error)
    else:
        outcome.put(None)


def _wait_for(outcome: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    """Wait for the command; returns its error, if any.

    If a package replaces the signal handlers (Ray writes a stack trace for SIGTERM), ours are
    restored.
    """
    while True:
        try:
            return outcome.get(timeout=TAKEN_BACK)
        except queue.Empty:
            _handle_signals(_interrupt)


def _handle_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Only once: torchrun forwards to its ranks a signal that the terminal has already sent them.
    _handle_signals(signal.SIG_IGN)
    raise Interrupted(number)


def _exit_at_once(code: int) -> None:
    """End the process while the command may still run and hold the output."""
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(FLUSHING)
    os._exit(code)


def _fail(
    message: str, code: int = 1, what: str = "", leave: Callable[[int], None] | None = None
) -> None:
    """Exit with one line on stderr; of ranks that fail for the same reason, only one writes it."""
    if distributed.is_told(what or message):
        os._exit(code)
    typer.echo(f"givens: {' '.join(message.split())}", err=True)
    if leave is not None:
        leave(code)
    sys.exit(code)
