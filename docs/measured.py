"""The directive `measured`: what a command has left in results/, or that it has still to be run.

    ```{measured} fig2a.png
    :command: givens paper fig2a --data sift -o results --device cuda
    :rows: fig2a.json
    ```

Pictures and Markdown tables are shown as they are. With `claims`, the module of `givens.paper` that
is named there reads the rows and says what they show. So no number of a measurement is typed here.
"""

import importlib
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from givens.paper.rows import read

RESULTS = Path(__file__).parent.parent / "results"


class Measured(SphinxDirective):
    """Results by the pattern of their names, with the command that made them."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "command": directives.unchanged_required,
        "rows": directives.unchanged,
        "claims": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """The results, and a line on where they come from."""
        pattern, command = self.arguments[0], self.options["command"]
        found = sorted(RESULTS.glob(pattern))
        self.env.note_dependency(str(RESULTS))
        if not found:
            text = [
                ":::{note}",
                f"Not measured yet. `{command}` writes `results/{pattern}`.",
                ":::",
            ]
            return self.parse_text_to_nodes("\n".join(text))
        text = []
        for path in found:
            self.env.note_dependency(str(path))
            text += _picture(path) if path.suffix == ".png" else _table(path)
        if "claims" in self.options:
            if not self.rows():
                raise self.error(f"results/{pattern} is there without {self.options['rows']}")
            module = importlib.import_module(f"givens.paper.{self.options['claims']}")
            text += [f"- {line}" for line in module.claims(read(RESULTS / self.options["rows"]))]
        rows = [f"rows: {{download}}`{path.name} <../results/{path.name}>`" for path in self.rows()]
        text += ["", f"`{command}`" + "".join(f"; {row}" for row in rows)]
        return self.parse_text_to_nodes("\n".join(text))

    def rows(self) -> list[Path]:
        """The files of raw rows."""
        return sorted(RESULTS.glob(self.options["rows"])) if "rows" in self.options else []


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
