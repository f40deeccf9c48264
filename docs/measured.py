"""The directive `measured`: what a command has left in results/, as pictures, tables or claims.

    ```{measured} step-cpu.json
    :command: python benchmarks/step.py --device cpu --json results/step-cpu.json
    :table: step
    ```

Pictures and Markdown tables are shown as they are. With `table`, that function of `tables.py`,
`joint_tables.py` or `scale_tables.py` makes a table from the rows; with `claims`, that function of
`givens.paper` ("fig3.claims") says what they show. No number of a measurement is typed on a page.
What is missing stops the build.
"""

import importlib
import json
from pathlib import Path
from typing import Any, ClassVar

import cells
import joint_tables
import scale_tables
import tables
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parent.parent / "results"
TABLES = {**vars(tables), **vars(joint_tables), **vars(scale_tables)}


class Measured(SphinxDirective):
    """Results by the pattern of their names, with the command that made them."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "command": directives.unchanged_required,
        "rows": directives.unchanged,
        "table": directives.unchanged,
        "claims": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """The results, and a line on where they come from."""
        pattern, command = self.arguments[0], self.options["command"]
        found = sorted(RESULTS.glob(pattern))
        self.env.note_dependency(str(RESULTS))
        for module in (cells, tables, joint_tables, scale_tables):
            self.env.note_dependency(module.__file__)
        if not found:
            raise self.error(f"results/{pattern} must be there; `{command}` writes it")
        rows = sorted(RESULTS.glob(self.options.get("rows", pattern)))
        for path in (*found, *rows):
            self.env.note_dependency(str(path))
        lines = self.shown(found)
        if "claims" in self.options:
            if not rows:
                raise self.error(f"results/{pattern} is there without {self.options['rows']}")
            module, function = self.options["claims"].split(".")
            claims = getattr(importlib.import_module(f"givens.paper.{module}"), function)
            lines += ["", *(f"- {line}" for line in claims(merge(rows)))]
        links = [f"{{download}}`{path.name} <../results/{path.name}>`" for path in rows]
        lines += ["", f"`{command}`" + (f"; rows: {', '.join(links)}" if links else "")]
        return self.parse_text_to_nodes("\n".join(lines))

    def shown(self, found: list[Path]) -> list[str]:
        """Pictures, tables that are Markdown, or one table of all the rows."""
        if "table" in self.options:
            names = ", ".join(path.name for path in found)
            try:
                return list(TABLES[self.options["table"]](merge(found)))
            except (KeyError, ValueError) as error:
                raise self.error(f"results/{names}: {error}") from error
        return [
            line
            for path in found
            for line in (_picture(path) if path.suffix == ".png" else _table(path))
        ]


def merge(paths: list[Path]) -> Any:
    """What one file holds, or the rows of several."""
    held = [json.loads(path.read_text("utf-8")) for path in paths]
    return held[0] if len(held) == 1 else [row for rows in held for row in rows]


def _picture(path: Path) -> list[str]:
    return [f"![{path.stem}](../results/{path.name})", ""]


def _table(path: Path) -> list[str]:
    """A Markdown file inside a section of the page: its headings become bold words."""
    lines = path.read_text("utf-8").splitlines()
    return [f"**{line.lstrip('# ')}**" if line.startswith("#") else line for line in lines] + [""]


def setup(app: Any) -> dict[str, bool]:
    """Make the directive known."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True}
