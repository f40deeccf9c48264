"""Runs of towers and index trained together, for figure 3, table 1 and the figure of when it pays.

All runs of a seed go on from the same warm-up and the same start, which are kept in files. A run
is a row, kept as soon as it is there: a rerun goes on from both. Figure 3 and table 1 share rows.
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
# Where chance is this likely, twice as many seeds decide.
MORE, UNDECIDED = 10, (0.01, 0.1)
# On which rates are chosen, and which no table shows.
HIDDEN = (100, 101)
# Of towers and training: rows of another version are not taken up.
VERSION = 2
# Options that play no part before the joint steps.
JOINT = ("method", "exact", "angle", "weight", "joint_lr", "fixed_items")
# Options that are chosen by the validation users.
CHOSEN = ("lr", "joint_lr", "weight", "angle")
METHODS: tuple[str, ...] = get_args(Method)
# The paper's log of its industry has 10 million clicks of a million queries.
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
    """The rows of a figure or table: a run that is there is not run again.

    Beside the rows' file is a folder with the warm-up and the start of each seed, which all methods
    share, until `forget`.
    """

    def __init__(self, path: Path, device: str, tell: Callable[[str], None]) -> None:
        self.path, self.device, self.tell = path, device, tell
        self.cache = path.with_suffix(".cache")
        self.about = environment(device)
        self.rows: Rows = read(path) if path.exists() else []
        # What is read from the cache, with the digests of towers.
        self.towers: dict[Path, tuple[dict[str, Tensor], str]] = {}
        self.starts: dict[Path, Quantizer] = {}

    def find(self, how: dict[str, Any]) -> dict[str, Any] | None:
        """The row that says all this of itself, if it is there."""
        return next(iter(of(self.rows, **how)), None)

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row, and write them all."""
        self.rows.append({**row, **self.about})
        write(self.path, self.rows)
        return self.rows[-1]

    def run(self, log: Log, config: Config, **labels: Any) -> dict[str, Any]:
        """Train from the shared warm-up, unless it was done before."""
        check_log(log)
        how = {**label(log, config), **labels}
        if row := self.find(how):
            return row
        towers, digest = self.warmed(log, config)
        started = self.started(log, config)
        done = train(log, config, towers=towers, start=started, device=self.device)
        self.keep_start(log, config, done.start)
        row = self.keep({
            **how,
            **_curves(log, config, done.rows),
            "warm_up": digest,
            "final_distortion": _end(done.rows, done.results["distortion"]),
            "results": done.results,
        })  # fmt: skip
        self.tell(
            f"{log.name}, {config.bytes} bytes, {LABELS[config.method]}, seed {config.seed}: "
            f"recall@100 {100 * recall(row):.2f} %, distortion {row['final_distortion']:.4f}"
        )
        return row

    def explore(self, log: Log, config: Config, **labels: Any) -> dict[str, Any]:
        """The same on the validation users alone; a loss that is not finite is a row too."""
        check_log(log)
        how = {**label(log, config), **labels}
        if row := self.find(how):
            return row
        towers, digest = self.warmed(log, config)
        started, failed = self.started(log, config), None
        rows: Rows = []
        try:
            rows, began = explore(log, config, towers, start=started, device=self.device)
            self.keep_start(log, config, began)
        except DivergedError as error:
            failed = str(error)
        row = self.keep({
            **how,
            **_curves(log, config, rows),
            "warm_up": digest,
            "final_distortion": _end(rows, 0.0),
            "distinct": rows[-1].get("distinct") if rows else None,
            "diverged": failed,
        })  # fmt: skip
        chosen = ", ".join(f"{name} {getattr(config, name):g}" for name in CHOSEN)
        told = failed or f"validation recall {100 * max(row['recall']):.2f} %"
        self.tell(f"{log.name}, {LABELS[config.method]}, {chosen}, seed {config.seed}: {told}")
        return row

    def warmed(self, log: Log, config: Config) -> tuple[dict[str, Tensor], str]:
        """The towers of a seed and their digest, learned once and kept in a file until `forget`."""
        file = self._file("warm-up", log, _before(config))
        if not file.exists():
            self._warm_up(log, config, file)
        if file not in self.towers:
            towers = checkpoint.load_towers(file)
            self.towers[file] = towers, _digest(towers)
        return self.towers[file]

    def explore_towers(self, log: Log, config: Config) -> dict[str, Any]:
        """A row of what validation users find in the warm-up."""
        how = label(log, _before(config), phase="towers")
        if row := self.find(how):
            return row
        rows = self._warm_up(log, config, self._file("warm-up", log, _before(config)))
        curves = _curves(log, dataclasses.replace(_before(config), method="post-hoc"), rows)
        return self.keep({**how, **curves, "method": "warm-up", "final_distortion": 0.0})

    def _warm_up(self, log: Log, config: Config, file: Path) -> Rows:
        rows: Rows = []
        first = _before(config)
        checkpoint.save_parts(warm_up(log, first, device=self.device, tell=rows.append), file)
        best = 100 * max(row["recall"] for row in rows)
        self.tell(
            f"{log.name}, lr {config.lr:g}, seed {config.seed}: warmed up, "
            f"validation recall {best:.2f} % without an index"
        )
        return rows

    def started(self, log: Log, config: Config) -> Quantizer | None:
        """The index that a seed starts with, once a run has found it."""
        file = self._file("start", log, _neutral(config, *JOINT))
        if file not in self.starts and file.exists():
            self.starts[file] = Quantizer.load(file).to(self.device)
        return None if config.after else self.starts.get(file)

    def keep_start(self, log: Log, config: Config, start: Quantizer | None) -> None:
        """Keep the index that a run has started with, for the others of its seed."""
        file = self._file("start", log, _neutral(config, *JOINT))
        if start is not None and file not in self.starts:
            start.save(file)
            self.starts[file] = start

    def forget(self, seed: int) -> None:
        """Delete the towers and starts of a seed, once all its runs are done."""
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
    """By what a row is known."""
    about = {"version": VERSION, "log": log.fingerprint, "config": dataclasses.asdict(config)}
    return {**about, **labels}


def _curves(log: Log, config: Config, rows: Rows) -> dict[str, Any]:
    """What a row says of its run's evaluations; those without an index have no distortion."""
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


def _end(rows: Rows, otherwise: float) -> float:
    """The distortion after the last step, or of an index that was made afterwards."""
    return float(rows[-1].get("distortion", otherwise)) if rows else otherwise


def _before(config: Config) -> Config:
    """The configuration of the warm-up, of every size and method alike."""
    return dataclasses.replace(_neutral(config, "start", "coarse", *JOINT), subspaces=1)


def _neutral(config: Config, *names: str) -> Config:
    """The configuration with some options at their defaults."""
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in names})


def comparable(rows: Rows, log: Log, config: Config) -> Rows:
    """The shown rows of a log that differ in method, size, seed and chosen rates alone."""

    def common(options: dict[str, Any]) -> dict[str, Any]:
        free = ("method", "subspaces", "seed", *CHOSEN)
        return {k: v for k, v in options.items() if k not in free}

    wanted = common(dataclasses.asdict(config))
    mine = of(rows, log=log.fingerprint, version=VERSION)
    return [row for row in mine if "results" in row and common(row["config"]) == wanted]


def of(rows: Iterable[dict[str, Any]], **labels: Any) -> Rows:
    """The rows that say this of themselves."""
    return [row for row in rows if all(row.get(name) == value for name, value in labels.items())]


def named(mine: Rows, rows: Rows) -> str:
    """The name of the method of some rows, with their seeds where there are more among all."""
    name, count = LABELS[mine[0]["method"]], len({row["seed"] for row in mine})
    if count == len({row["seed"] for row in rows}):
        return name
    return f"{name}, {count} seed{'s' * (count > 1)}"


def setting(rows: Rows) -> str:
    """Seeds, steps and machine of some runs, as a caption has them."""
    config, seeds = rows[0]["config"], len({row["seed"] for row in rows})
    return (
        f"{seeds} seed{'s' * (seeds > 1)}, {config['warmup']} + {config['steps']} steps of "
        f"{config['batch']}; {machine(rows[0])}"
    )


def recall(row: dict[str, Any]) -> float:
    """recall@100 of the test users by the index."""
    return float(row["results"]["index"]["recall@100"])


def precision(row: dict[str, Any]) -> float:
    """precision@100 of the test users by the index."""
    return float(row["results"]["index"]["precision@100"])


def distortion(row: dict[str, Any]) -> float:
    """Of all items after the last step."""
    return float(row["final_distortion"])


Name = TypeVar("Name")
Value = Callable[[dict[str, Any]], float]


def verdict(mine: Rows, base: Rows, value: Value, *, lower: bool) -> str:
    """Whether runs have a lower or a higher value than others, and how sure that is.

    On the seeds that both have: runs of a seed share their warm-up, and are compared seed by seed.
    The paper's analysis of variance, which does not know of the pairs, stands beside.
    """
    first, second = pairs(mine, base, value)
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


def pairs(mine: Rows, base: Rows, value: Value) -> tuple[list[float], list[float]]:
    """The values of two methods on the seeds that both have."""
    ours, theirs = ({row["seed"]: value(row) for row in rows} for rows in (mine, base))
    both = [seed for seed in ours if seed in theirs]
    return [ours[seed] for seed in both], [theirs[seed] for seed in both]


def undecided(rows: Rows) -> list[str]:
    """The methods of one size whose recall or distortion may differ from the baseline's, or not."""
    base, low, high = of(rows, method="frozen"), *UNDECIDED
    return [
        method
        for method in METHODS
        if method != "frozen"
        and any(
            low <= paired_p_value(*pairs(of(rows, method=method), base, value)) <= high
            for value in (recall, distortion)
        )
    ]


def holm(values: dict[Name, float]) -> dict[Name, float]:
    """p-values corrected for how many there are (Holm, 1979); those that are NaN are not counted.

    The i-th smallest of k is multiplied by k − i + 1, and none is below one before it.
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
    """One-way analysis of variance: how likely so different means are by chance."""
    if min(len(first), len(second)) < 2 or len({*first, *second}) == 1:
        return float("nan")
    return float(_tests().f_oneway(first, second).pvalue)


def paired_p_value(first: list[float], second: list[float]) -> float:
    """Student's test of the differences: the analysis of variance with a mean for each pair."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(set(differences)) < 2:
        return float("nan")
    return float(_tests().ttest_1samp(differences, 0.0).pvalue)


def _tests() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the p-values need scipy: pip install 'givens[paper]'") from error
    return stats


def slug(name: str) -> str:
    """A log's name as part of a file's."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def _digest(parts: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(name.encode())
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
