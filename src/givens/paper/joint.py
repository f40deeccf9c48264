"""Runs of towers and index trained together, for figure 3, table 1 and `when`.

All runs of a seed continue from the same warm-up and the same start, which are cached in files.
Each run is one row, written as soon as it is finished, so a rerun continues with what is missing.
Figure 3 and table 1 share rows.
"""

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

from torch import Tensor

from givens.paper.rows import Rows, environment, machine, read, write
from givens.quantizer import Quantizer
from givens.retrieval import checkpoint
from givens.retrieval.config import LABELS, Config, Method, Size
from givens.retrieval.data import Log, click_log
from givens.retrieval.readers import read as read_log
from givens.retrieval.state import DivergedError
from givens.retrieval.train import explore, train, warm_up

SEEDS, SIGNIFICANT = 5, 0.05
# With a p-value in this range, a method is run on more seeds.
MORE, UNDECIDED = 10, (0.01, 0.1)
# Seeds on which rates are chosen; no table shows them.
HIDDEN = (100, 101)
# Version of towers and training: rows of another version are not reused.
VERSION = 2
# Options that have no effect before the joint steps.
JOINT = ("method", "exact", "angle", "weight", "joint_lr", "fixed_items")
# Options that are chosen on the validation users.
CHOSEN = ("lr", "joint_lr", "weight", "angle")
METHODS: tuple[str, ...] = get_args(Method)
# The paper's industrial log has 10 million clicks of a million queries.
INDUSTRIAL = {"users": 1_000_000, "items": 1_500_000, "clicks": 10_000_000, "words": 50_000}
SMOKE = {"users": 2000, "items": 600, "clicks": 40_000}


def log_for(data: Path | None, *, smoke: bool, size: Size = "large") -> Log:
    """The log of a folder, or the built-in one: at the paper's industrial size for "large"."""
    if data is not None:
        return read_log(data)
    if smoke:
        return click_log(**SMOKE)
    return click_log(**INDUSTRIAL) if size == "large" else click_log()


class Runs:
    """The rows of a figure or table; runs that have a row are not repeated.

    A folder beside the file of rows caches the warm-up and the start of each seed, which all
    methods share, until `forget`.
    """

    def __init__(self, path: Path, device: str, tell: Callable[[str], None]) -> None:
        self.path, self.device, self.tell = path, device, tell
        self.cache = path.with_suffix(".cache")
        self.about = environment(device)
        self.rows: Rows = read(path) if path.exists() else []
        # What was read from the cache; towers with their digests.
        self.towers: dict[Path, tuple[dict[str, Tensor], str]] = {}
        self.starts: dict[Path, Quantizer] = {}

    def find(self, how: dict[str, Any]) -> dict[str, Any] | None:
        """The row with these values, or None."""
        return next(iter(select(self.rows, **how)), None)

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row and write all rows; returns the row with its environment."""
        self.rows.append({**row, **self.about})
        write(self.path, self.rows)
        return self.rows[-1]

    def run(self, log: Log, config: Config, **labels: Any) -> dict[str, Any]:
        """Train from the shared warm-up, unless there is a row for it; returns the row."""
        check_log(log)
        how = {**label(log, config), **labels}
        if row := self.find(how):
            return row
        towers, digest = self.load_warm_up(log, config)
        start = self.load_start(log, config)
        done = train(log, config, towers=towers, start=start, device=self.device)
        self.keep_start(log, config, done.start)
        row = self.keep({
            **how,
            **_collect_curves(log, config, done.rows),
            "warm_up": digest,
            "final_distortion": _find_final_distortion(done.rows, done.results["distortion"]),
            "results": done.results,
        })  # fmt: skip
        self.tell(
            f"{log.name}, {config.bytes} bytes, {LABELS[config.method]}, seed {config.seed}: "
            f"recall@100 {100 * recall(row):.2f} %, distortion {row['final_distortion']:.4f}"
        )
        return row

    def explore(self, log: Log, config: Config, **labels: Any) -> dict[str, Any]:
        """As `run`, on the validation users alone; a run that diverges has a row too."""
        check_log(log)
        how = {**label(log, config), **labels}
        if row := self.find(how):
            return row
        towers, digest = self.load_warm_up(log, config)
        start, failed = self.load_start(log, config), None
        rows: Rows = []
        try:
            rows, began = explore(log, config, towers, start=start, device=self.device)
            self.keep_start(log, config, began)
        except DivergedError as error:
            failed = str(error)
        row = self.keep({
            **how,
            **_collect_curves(log, config, rows),
            "warm_up": digest,
            "final_distortion": _find_final_distortion(rows, 0.0),
            "distinct": rows[-1].get("distinct") if rows else None,
            "diverged": failed,
        })  # fmt: skip
        chosen = ", ".join(f"{name} {getattr(config, name):g}" for name in CHOSEN)
        told = failed or f"validation recall {100 * max(row['recall']):.2f} %"
        self.tell(f"{log.name}, {LABELS[config.method]}, {chosen}, seed {config.seed}: {told}")
        return row

    def load_warm_up(self, log: Log, config: Config) -> tuple[dict[str, Tensor], str]:
        """The warmed-up towers of a seed and their digest, trained unless a file has them."""
        file = self._file("warm-up", log, _configure_warm_up(config))
        if not file.exists():
            self._warm_up(log, config, file)
        if file not in self.towers:
            towers = checkpoint.load_towers(file)
            self.towers[file] = towers, _digest(towers)
        return self.towers[file]

    def explore_towers(self, log: Log, config: Config) -> dict[str, Any]:
        """The row of the warm-up, with the recall of the validation users."""
        first = _configure_warm_up(config)
        how = label(log, first, phase="towers")
        if row := self.find(how):
            return row
        rows = self._warm_up(log, config, self._file("warm-up", log, first))
        curves = _collect_curves(log, dataclasses.replace(first, method="post-hoc"), rows)
        return self.keep({**how, **curves, "method": "warm-up", "final_distortion": 0.0})

    def _warm_up(self, log: Log, config: Config, file: Path) -> Rows:
        rows: Rows = []
        first = _configure_warm_up(config)
        checkpoint.save_parts(warm_up(log, first, device=self.device, tell=rows.append), file)
        best = 100 * max(row["recall"] for row in rows)
        self.tell(
            f"{log.name}, lr {config.lr:g}, seed {config.seed}: warmed up, "
            f"validation recall {best:.2f} % without an index"
        )
        return rows

    def load_start(self, log: Log, config: Config) -> Quantizer | None:
        """The index that the runs of a seed start with, or None before the first of them."""
        file = self._file("start", log, _reset_options(config, *JOINT))
        if file not in self.starts and file.exists():
            self.starts[file] = Quantizer.load(file).to(self.device)
        return None if config.after else self.starts.get(file)

    def keep_start(self, log: Log, config: Config, start: Quantizer | None) -> None:
        """Keep the index that a run started with for the other runs of its seed."""
        file = self._file("start", log, _reset_options(config, *JOINT))
        if start is not None and file not in self.starts:
            start.save(file)
            self.starts[file] = start

    def forget(self, seed: int) -> None:
        """Delete the cached towers and starts of a seed."""
        if not self.cache.exists():
            return
        for file in self.cache.glob(f"seed-{seed}-*"):
            file.unlink()
            self.towers.pop(file, None)
            self.starts.pop(file, None)
        if not any(self.cache.iterdir()):
            self.cache.rmdir()

    def _file(self, kind: str, log: Log, config: Config) -> Path:
        self.cache.mkdir(exist_ok=True)
        key = hashlib.sha256(f"{VERSION}{config}{log.fingerprint}".encode()).hexdigest()[:16]
        return self.cache / f"seed-{config.seed}-{kind}-{key}.safetensors"


def check_log(log: Log) -> None:
    """Refuse a log that has no recall@100."""
    if log.catalogue < 100:
        raise ValueError(
            f"{log.name} must have at least 100 items for recall@100, but has {log.catalogue}"
        )


def label(log: Log, config: Config, **labels: Any) -> dict[str, Any]:
    """What identifies a row."""
    about = {"version": VERSION, "log": log.fingerprint, "config": dataclasses.asdict(config)}
    return {**about, **labels}


def _collect_curves(log: Log, config: Config, rows: Rows) -> dict[str, Any]:
    """The evaluations of a run, as in its row; without an index they have no distortion."""
    joint = [row for row in rows if row["phase"] == "joint" or config.after]
    return {
        "name": log.name,
        "method": config.method,
        "bytes": config.bytes,
        "seed": config.seed,
        "steps": [row["step"] - config.warmup for row in joint],
        "distortion": [row["distortion"] for row in joint if "distortion" in row],
        "recall": [row["recall"] for row in joint],
    }


def _find_final_distortion(rows: Rows, otherwise: float) -> float:
    """The distortion after the last step, or `otherwise` for an index made afterwards."""
    return float(rows[-1].get("distortion", otherwise)) if rows else otherwise


def _configure_warm_up(config: Config) -> Config:
    """The configuration of the warm-up, the same for every size and method."""
    return dataclasses.replace(_reset_options(config, "start", "coarse", *JOINT), subspaces=1)


def _reset_options(config: Config, *names: str) -> Config:
    """The configuration with these options at their defaults."""
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in names})


def select_comparable(rows: Rows, log: Log, config: Config) -> Rows:
    """The finished rows of a log, with any method, size, seed and rates, else as `config`."""

    def common(options: dict[str, Any]) -> dict[str, Any]:
        free = ("method", "subspaces", "seed", *CHOSEN)
        return {k: v for k, v in options.items() if k not in free}

    wanted = common(dataclasses.asdict(config))
    mine = select(rows, log=log.fingerprint, version=VERSION)
    return [row for row in mine if "results" in row and common(row["config"]) == wanted]


def select(rows: Iterable[dict[str, Any]], **labels: Any) -> Rows:
    """The rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in labels.items())]


def name_method(mine: Rows, rows: Rows) -> str:
    """The name of the method of `mine`, with its number of seeds if `rows` has others."""
    name, count = LABELS[mine[0]["method"]], len({row["seed"] for row in mine})
    if count == len({row["seed"] for row in rows}):
        return name
    return f"{name}, {count} seed{'s' * (count > 1)}"


def describe_setting(rows: Rows) -> str:
    """Seeds, steps and machine of runs, for a caption."""
    config, seeds = rows[0]["config"], len({row["seed"] for row in rows})
    return (
        f"{seeds} seed{'s' * (seeds > 1)}, {config['warmup']} + {config['steps']} steps of "
        f"{config['batch']}; {machine(rows[0])}"
    )


def recall(row: dict[str, Any]) -> float:
    """recall@100 of the test users, by the index."""
    return float(row["results"]["index"]["recall@100"])


def precision(row: dict[str, Any]) -> float:
    """precision@100 of the test users, by the index."""
    return float(row["results"]["index"]["precision@100"])


def distortion(row: dict[str, Any]) -> float:
    """The distortion of all items after the last step."""
    return float(row["final_distortion"])


Name = TypeVar("Name")
Value = Callable[[dict[str, Any]], float]


def verdict(mine: Rows, base: Rows, value: Value, *, lower: bool) -> str:
    """Whether the runs have a lower (or higher) value than the baseline, with p-values.

    Runs of a seed share their warm-up, so the test is paired, over the seeds that both have. The
    paper's analysis of variance, which ignores the pairs, is given too.
    """
    first, second = pair_values(mine, base, value)
    if not first:
        return "not shown (no seed has both)"
    change = statistics.mean(first) - statistics.mean(second)
    told = f"{100 * change / statistics.mean(second):+.2f} %"
    if len(first) == 1:
        return f"not shown ({told}, one seed)"
    p = paired_p_value(first, second)
    told += f", p = {p_value(first, second):.2g}, seed by seed p = {p:.2g}"
    word = "not shown"
    if p < SIGNIFICANT:
        word = "holds" if (change < 0) == lower else "does not hold"
    return f"{word} ({told})"


def pair_values(mine: Rows, base: Rows, value: Value) -> tuple[list[float], list[float]]:
    """The values of two methods on the seeds that both have."""
    ours, theirs = ({row["seed"]: value(row) for row in rows} for rows in (mine, base))
    both = [seed for seed in ours if seed in theirs]
    return [ours[seed] for seed in both], [theirs[seed] for seed in both]


def find_undecided(rows: Rows) -> list[str]:
    """The methods of one size whose difference from the baseline needs more seeds."""
    base, low, high = select(rows, method="frozen"), *UNDECIDED
    return [
        method
        for method in METHODS
        if method != "frozen"
        and any(
            low <= paired_p_value(*pair_values(select(rows, method=method), base, value)) <= high
            for value in (recall, distortion)
        )
    ]


def holm(values: dict[Name, float]) -> dict[Name, float]:
    """p-values corrected for multiple tests (Holm, 1979); NaN values are not counted.

    The i-th smallest of k is multiplied by k − i + 1, then made at least as large as those before.
    """
    known = sorted(
        (name for name in values if not math.isnan(values[name])), key=values.__getitem__
    )
    corrected, least = dict.fromkeys(values, math.nan), 0.0
    for at, name in enumerate(known):
        least = max(least, min(1.0, (len(known) - at) * values[name]))
        corrected[name] = least
    return corrected


def p_value(first: list[float], second: list[float]) -> float:
    """The p-value of a one-way analysis of variance."""
    if min(len(first), len(second)) < 2 or len({*first, *second}) == 1:
        return float("nan")
    return float(_import_stats().f_oneway(first, second).pvalue)


def paired_p_value(first: list[float], second: list[float]) -> float:
    """The p-value of a paired Student's t-test."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(set(differences)) < 2:
        return float("nan")
    return float(_import_stats().ttest_1samp(differences, 0.0).pvalue)


def _import_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the p-values need scipy: pip install 'givens[paper]'") from error
    return stats


def slug(name: str) -> str:
    """A log's name as part of a file name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def _digest(parts: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(name.encode())
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
