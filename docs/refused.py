"""The directive `refused`: tables of bad input, read from the tests themselves.

`python docs/refused.py` prints them.
"""

import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent
Row = tuple[str, str]


def command(name: str) -> Callable[..., str]:
    """What is given to a command in a shell."""

    def told(given: Any) -> str:
        words = shlex.split(given) if isinstance(given, str) else given
        return shlex.join([*name.split(), *map(str, words)])

    return told


def options(name: str) -> Callable[..., str]:
    """What is given to a function or class by name."""

    def told(*given: Any) -> str:
        *before, named = given
        words = [f"x of shape {tuple(x.shape)}" for x in before]
        return f"{name}({', '.join(words + [f'{key}={shown(v)}' for key, v in named.items()])})"

    return told


def shown(value: Any) -> str:
    """A value in a call; a tensor by its shape."""
    return f"(of shape {tuple(value.shape)})" if hasattr(value, "shape") else repr(value)


def source(call: Any) -> str:
    """What a lambda of a table calls, as it is written there."""
    code = call.__code__
    places = {(line, column) for line, _, column, _ in code.co_positions()}
    for node in ast.walk(_tree(code.co_filename)):
        if isinstance(node, ast.Lambda) and (node.body.lineno, node.body.col_offset) in places:
            return ast.unparse(node.body)
    raise ValueError(f"no lambda begins in {code.co_filename}:{code.co_firstlineno}")


def file(name: str) -> str:
    """A file of that name, which says what is wrong with it."""
    return name


def content(name: str, what: Any, *_: Any) -> str:
    """A file with something wrong in it."""
    if what is None:
        return f"{name} is missing"
    text = what.decode("latin-1") if isinstance(what, bytes) else str(what)
    return f"{name} holds {text[:40]!r}"


# The tables: over the rows, the test that has them, and how what it is given is written.
TABLES: tuple[tuple[str, str, str, Callable[..., str]], ...] = (
    (
        "givens …",
        "cli/test_cli",
        "test_bad_input_is_one_line_and_leaves_nothing",
        command("givens"),
    ),
    (
        "givens train",
        "cli/test_train_cli",
        "test_train_bad_input_is_one_line",
        command("givens train"),
    ),
    ("Click logs", "retrieval/test_data", "test_bad_files", file),
    ("Click logs in Parquet files", "retrieval/test_streams", "test_bad_files", file),
    ("Config, of a training run", "retrieval/test_data", "test_bad_options", options("Config")),
    ("Folders of runs", "report/test_report", "test_folders_that_are_not_whole", content),
    ("fit, its options", "fixed/test_fit", "test_bad_input", options("fit")),
    ("Values, at every entry", "test_checks", "test_bad_input", source),
    ("IndexLayer", "layer/test_layer", "test_bad_input", source),
    ("GCD", "test_optim", "test_bad_input", source),
    ("Rotations", "test_rotation", "test_bad_input", source),
    ("Pairings", "test_pairing", "test_bad_input", source),
)


def tables() -> dict[str, list[Row]]:
    """What is given and what is said of it, by table."""
    for folder in (ROOT / "tests" / "cli", ROOT / "tests"):
        sys.path.insert(0, str(folder))
    found = {}
    for title, module, test, told in TABLES:
        function = getattr(_load(ROOT / "tests" / f"{module}.py"), test)
        (mark,) = [
            mark
            for mark in function.pytestmark
            if mark.name == "parametrize" and "message" in mark.args[0]
        ]
        rows = [getattr(row, "values", row) for row in mark.args[1]]
        found[title] = [(told(*given), plain(message)) for *given, message in rows]
    return found


def _load(path: Path) -> ModuleType:
    """A module of the tests by its file: its folder's name may be that of another module."""
    spec = importlib.util.spec_from_file_location(f"refused_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plain(pattern: str) -> str:
    """A message without what makes it a pattern."""
    return re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)\.[*+]", "…", pattern)).strip("^$")


def html() -> str:
    """The tables, folded."""
    return "".join(_folded(title, rows) for title, rows in tables().items())


def _folded(title: str, rows: list[Row]) -> str:
    lines = [f"<details><summary>{escape(title)}: {len(rows)}</summary>", "", "<table>"]
    lines += ["<thead><tr><th>given</th><th>said</th></tr></thead><tbody>"]
    for given, said in rows:
        lines.append(f"<tr><td><code>{escape(given)}</code></td><td>{escape(said)}</td></tr>")
    return "\n".join([*lines, "</tbody></table>", "</details>", "", ""])


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text("utf-8"))


class Refused(SphinxDirective):
    """All the tables."""

    def run(self) -> list[nodes.Node]:
        """One block of HTML."""
        for path in (ROOT / "tests").rglob("test_*.py"):
            self.env.note_dependency(str(path))
        return [nodes.raw("", html(), format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Make the directive known."""
    app.add_directive("refused", Refused)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for title, rows in tables().items():
        print(f"\n{title}\n")
        for given, said in rows:
            print(f"    {given}\n        {said}")
