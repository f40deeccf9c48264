"""The folders of runs, as `givens train` writes them, finished or not."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from givens.checks import check_choice, check_number, check_seed, check_sizes, check_whole
from givens.retrieval.config import LABELS

Row = dict[str, Any]
# The largest distortion or time that is drawn.
LARGE = 1e30


@dataclass(frozen=True, eq=False)
class Folder:
    """The contents of a run's folder."""

    path: Path
    label: str
    """A label that is unique in a report."""
    about: dict[str, Any]
    """config.json: options, command, seed, device and versions."""
    rows: list[Row]
    """The rows of all evaluations on the validation users."""
    results: dict[str, Any] | None
    """The metrics of the test users; None before the run is finished."""

    @property
    def options(self) -> dict[str, Any]:
        """The run's options, including the seed."""
        return {**self.about["configuration"], "seed": self.about["seed"]}

    @property
    def method(self) -> str:
        """The method that learned R."""
        return str(self.options["method"])

    @property
    def bytes(self) -> int:
        """The bytes of an item's code, with bits packed."""
        bits = max(int(self.options["codewords"] - 1).bit_length(), 1)
        return -(-int(self.options["subspaces"]) * bits // 8)

    @property
    def joint(self) -> list[Row]:
        """The evaluations in the joint phase."""
        return [row for row in self.rows if row["phase"] == "joint"]

    @property
    def metric(self) -> str:
        """The name of the main metric: recall@100, or at a smaller k in a small catalogue."""
        ks = [
            int(name[7:])
            for name in (self.results or {"index": {}})["index"]
            if name[:7] == "recall@"
        ]
        return f"recall@{max(ks, default=100)}"

    @property
    def recall(self) -> float | None:
        """The test users' recall by the index."""
        return self.find_recall("index")

    @property
    def distortion(self) -> float | None:
        """The distortion of all items, by the index that is kept or the latest one so far."""
        if self.results is not None:
            return float(self.results["distortion"])
        return float(self.joint[-1]["distortion"]) if self.joint else None

    @property
    def kept(self) -> int | None:
        """The step whose index is kept; None before the run is finished."""
        return None if self.results is None else int(self.results["best_step"])

    def find_recall(self, by: str) -> float | None:
        """The test users' recall by the index, in full precision or by popularity."""
        return None if self.results is None else float(self.results[by][self.metric])

    @property
    def standing(self) -> str:
        """The run's progress, in words."""
        done = self.rows[-1]["step"] if self.rows else 0
        if self.results is not None:
            return f"finished, {done:,} steps"
        total = self.options["warmup"] + self.options["steps"]
        return f"not finished: {done:,} of {total:,} steps"


def read_runs(paths: list[Path]) -> list[Folder]:
    """Read the runs in these folders, with unique labels."""
    if not paths:
        raise ValueError("a report needs at least one run; make one with `givens train -o RUN`")
    runs = [_read(path) for path in dict.fromkeys(paths)]
    names = [run.label for run in runs]
    return [
        run if names.count(run.label) == 1 else Folder(**{**vars(run), "label": _qualify(run)})
        for run in runs
    ]


def _qualify(run: Folder) -> str:
    """Add the folder's name to a label if two runs have the same method."""
    return f"{run.label}, {run.path}"


def _read(path: Path) -> Folder:
    if not (path / "config.json").is_file():
        found = "has no config.json" if path.is_dir() else "is no folder"
        raise FileNotFoundError(
            f"there is no run in {path}, which {found}; make one with `givens train -o {path}`"
        )
    about = _read_json(path / "config.json")
    metrics, results = path / "metrics.jsonl", path / "results.json"
    rows = [_parse(metrics, line) for line in _read_lines(metrics)] if metrics.is_file() else []
    outcome = _read_json(results) if results.is_file() else None
    try:
        label = _check(about, rows, outcome)
        run = Folder(path, label, about, rows, outcome)
        for by in ("index", "full", "popularity"):
            if outcome is not None:
                check_number(f"{by} {run.metric}", outcome[by][run.metric], 0, 1)
    except KeyError as error:
        raise ValueError(f"{path} does not hold a complete run: {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold a complete run: {error}") from error
    return run


def _check(about: Row, rows: list[Row], results: Row | None) -> str:
    """Check that the page can show a run; returns its method's name."""
    options = _check_object("configuration", about["configuration"])
    check_choice("method", options["method"], LABELS)
    sizes = (options["dim"], options["subspaces"], options["codewords"], options.get("coarse", 0))
    check_sizes(*sizes)
    for name in ("warmup", "steps"):
        check_whole(name, options[name], 0)
    check_seed(about["seed"])
    _check_object("versions", about.get("versions", {}))
    for name, value, kind in (
        ("log", about["log"], str),
        ("command", about.get("command", []), list),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, but got {value!r}")
    if about.get("seconds") is not None:
        check_number("seconds", about["seconds"], 0, LARGE)
    for row in rows:
        check_whole("step", row["step"], 0)
        check_choice("phase", row["phase"], ("towers", "joint"))
        check_number("recall", row["recall"], 0, 1)
        if row["phase"] == "joint":
            for name in ("distortion", "orthogonality"):
                check_number(name, row[name], 0, LARGE)
    if results is not None:
        check_number("distortion", results["distortion"], 0, LARGE)
        check_whole("best_step", results["best_step"], 0)
        for by in ("index", "full", "popularity"):
            _check_object(by, results[by])
        for name in results["index"]:
            if name.startswith("recall@") and not name[7:].isdecimal():
                raise ValueError(f"index must have recall@ a number, but got {name!r}")
    return LABELS[options["method"]]


def _check_object(name: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object, but got {value!r}")
    return value


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not text in UTF-8") from error


def _read_json(path: Path) -> Row:
    return _parse(path, "\n".join(_read_lines(path)))


def _parse(path: Path, text: str) -> Row:
    try:
        return _check_object("it", json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is not what `givens train` writes") from error
