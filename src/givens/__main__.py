"""The command `givens`, also as `python -m givens`."""

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line, which takes seconds, and run it."""
    # During the import nothing is written yet: exit at once, without a traceback from an import.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from givens.cli import main

    main()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"givens: interrupted before it began; nothing is written\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
