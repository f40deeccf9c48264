"""Run folders as `givens train` leaves them, finished or not."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from givens.paper.joint import NAMES

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Folder:
    """What a run has written."""

    path: Path
    label: str
    """Its name among the runs of a report."""
    about: dict[str, Any]
    """config.json: options, command, seed, device and versions."""
    rows: list[Row]
    """What every look at the validation users saw."""
    results: dict[str, Any] | None
    """Of the test users; none where the run is not finished."""

    @property
    def options(self) -> dict[str, Any]:
        """Of the run, the seed among them."""
        return {**self.about["configuration"], "seed": self.about["seed"]}

    @property
    def method(self) -> str:
        """How R was learned."""
        return str(self.options["method"])

    @property
    def bytes(self) -> int:
        """Of an item's code, whose parts are packed bit by bit."""
        bits = max(int(self.options["codewords"] - 1).bit_length(), 1)
        return -(-int(self.options["subspaces"]) * bits // 8)

    @property
    def joint(self) -> list[Row]:
        """The looks with the index."""
        return [row for row in self.rows if row["phase"] == "joint"]

    @property
    def metric(self) -> str:
        """recall@100, or of as many items as a small catalogue has."""
        ks = [
            int(name[7:])
            for name in (self.results or {"index": {}})["index"]
            if name[:7] == "recall@"
        ]
        return f"recall@{max(ks, default=100)}"

    @property
    def recall(self) -> float | None:
        """recall@100 of the test users by the index."""
        return self.found("index")

    @property
    def distortion(self) -> float | None:
        """Of all items after the last step, or of the index that was built afterwards.

        The index that is kept is of the step that did best on the validation users; which one that
        is would say more of them than of R.
        """
        if self.joint:
            return float(self.joint[-1]["distortion"])
        return None if self.results is None else float(self.results["distortion"])

    def found(self, by: str) -> float | None:
        """recall@100 of the test users by the index, in full precision or by popularity."""
        return None if self.results is None else float(self.results[by][self.metric])

    @property
    def standing(self) -> str:
        """How far it has come, in words."""
        done = self.rows[-1]["step"] if self.rows else 0
        if self.results is not None:
            return f"finished, {done:,} steps"
        total = self.options["warmup"] + self.options["steps"]
        return f"not finished: {done:,} of {total:,} steps"


def read_runs(paths: list[Path]) -> list[Folder]:
    """The runs in these folders, each with a label of its own."""
    if not paths:
        raise ValueError("a report needs at least one run; make one with `givens train -o RUN`")
    runs = [_read(path) for path in dict.fromkeys(paths)]
    names = [run.label for run in runs]
    return [
        run if names.count(run.label) == 1 else Folder(**{**vars(run), "label": _longer(run)})
        for run in runs
    ]


def _longer(run: Folder) -> str:
    """The folder too, where two runs are of the same method."""
    return f"{run.label}, {run.path}"


def _read(path: Path) -> Folder:
    if not (path / "config.json").is_file():
        found = "has no config.json" if path.is_dir() else "is no folder"
        raise FileNotFoundError(
            f"there is no run in {path}, which {found}; make one with `givens train -o {path}`"
        )
    about = _json(path / "config.json", (path / "config.json").read_text("utf-8"))
    rows, results = [], None
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        rows = [_json(metrics, line) for line in metrics.read_text("utf-8").splitlines()]
    if (path / "results.json").is_file():
        results = _json(path / "results.json", (path / "results.json").read_text("utf-8"))
    run = Folder(path, "", about, rows, results)
    try:
        label = NAMES[run.method]
        # All that a page is made of, so that what is missing is told before it is looked for.
        _ = run.bytes, run.standing, run.recall, run.distortion, [row["recall"] for row in rows]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold a run that is whole: {error} is missing") from error
    return Folder(path, label, about, rows, results)


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: it is not what `givens train` writes") from error
