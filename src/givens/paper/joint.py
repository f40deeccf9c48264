"""Runs of towers and index trained together, for figure 3, table 1 and the figure of when it pays.

All runs of a seed go on from the same warm-up. A run is a row, kept as soon as it is there: a rerun
goes on from the rows, and figure 3 and table 1 share theirs.
"""

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from givens.paper.rows import Rows, environment, machine, read, write
from givens.quantizer import Quantizer
from givens.retrieval import checkpoint
from givens.retrieval.config import LABELS, Config, Method
from givens.retrieval.data import Log, click_log
from givens.retrieval.readers import read as read_log
from givens.retrieval.train import train, warm_up

SEEDS, SIGNIFICANT = 5, 0.05
# Options that play no part before the joint steps.
JOINT = ("method", "exact", "angle", "weight", "joint_lr", "fixed_items")
METHODS: tuple[str, ...] = get_args(Method)
# The paper's log of its industry has 10 million clicks of a million queries.
INDUSTRIAL = {"users": 1_000_000, "items": 1_500_000, "clicks": 10_000_000, "words": 50_000}
SMOKE = {"users": 2000, "items": 600, "clicks": 40_000}


def log_for(data: Path | None, *, smoke: bool) -> Log:
    """The log of a folder, or the built-in one at the paper's industrial size."""
    if data is not None:
        return read_log(data)
    return click_log(**(SMOKE if smoke else INDUSTRIAL))


class Runs:
    """The rows of a figure or table: a run that is there is not run again."""

    def __init__(self, path: Path, device: str, tell: Callable[[str], None]) -> None:
        self.path, self.device, self.tell = path, device, tell
        self.about = environment(device)
        self.rows: Rows = read(path) if path.exists() else []
        # The towers of a seed and their digest, and an index as fitted to them: all methods begin
        # with the same.
        self.towers: dict[Path, tuple[dict[str, Tensor], str]] = {}
        self.starts: dict[Config, Quantizer | None] = {}

    def run(self, log: Log, config: Config, **labels: Any) -> dict[str, Any]:
        """Train from the shared warm-up, unless it was done before."""
        if log.catalogue < 100:
            raise ValueError(
                f"{log.name} must have at least 100 items for recall@100, but has {log.catalogue}"
            )
        how = {"log": log.fingerprint, "config": dataclasses.asdict(config), **labels}
        for row in self.rows:
            if all(row.get(name) == value for name, value in how.items()):
                return row
        towers, digest = self.warmed(log, config)
        alike = _neutral(config, *JOINT)
        start = self.starts.get(alike)
        done = train(log, config, towers=towers, start=start, device=self.device)
        self.starts[alike] = done.start
        joint = [row for row in done.rows if row["phase"] == "joint"]
        row = {
            **how,
            "name": log.name,
            "method": config.method,
            "bytes": config.bytes,
            "seed": config.seed,
            "warm_up": digest,
            "steps": [row["step"] - config.warmup for row in joint],
            "distortion": [row["distortion"] for row in joint],
            "recall": [row["recall"] for row in joint],
            "final_distortion": joint[-1]["distortion"] if joint else done.results["distortion"],
            "results": done.results,
            **self.about,
        }
        self.rows.append(row)
        write(self.path, self.rows)
        self.tell(
            f"{log.name}, {config.bytes} bytes, {LABELS[config.method]}, seed {config.seed}: "
            f"recall@100 {100 * recall(row):.2f} %, distortion {row['final_distortion']:.4f}"
        )
        return row

    def warmed(self, log: Log, config: Config) -> tuple[dict[str, Tensor], str]:
        """The towers of a seed and their digest, learned once and kept in a file until `forget`."""
        first = _neutral(config, "start", *JOINT)
        sizes = dataclasses.replace(first, subspaces=1)
        key = hashlib.sha256(f"{sizes}{log.fingerprint}".encode()).hexdigest()[:16]
        file = self.path.with_name(f"warm-up-{key}.safetensors")
        if not file.exists():
            checkpoint.save_parts(warm_up(log, first, device=self.device), file)
            self.tell(f"{log.name}, seed {config.seed}: warmed up")
        if file not in self.towers:
            towers = checkpoint.load_towers(file)
            self.towers[file] = towers, _digest(towers)
        return self.towers[file]

    def forget(self) -> None:
        """Delete towers and starts, once all runs of theirs are done."""
        self.starts.clear()
        for file in self.towers:
            file.unlink(missing_ok=True)
        self.towers.clear()


def _neutral(config: Config, *names: str) -> Config:
    """The configuration with some options at their defaults."""
    return dataclasses.replace(config, **{name: getattr(Config, name) for name in names})


def comparable(rows: Rows, log: Log, config: Config) -> Rows:
    """The rows of a log that differ from a configuration in method, size and seed alone."""

    def common(options: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in options.items() if k not in ("method", "subspaces", "seed")}

    wanted = common(dataclasses.asdict(config))
    return [
        row for row in rows if row["log"] == log.fingerprint and common(row["config"]) == wanted
    ]


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


def verdict(
    mine: Rows, base: Rows, value: Callable[[dict[str, Any]], float], *, lower: bool
) -> str:
    """Whether runs have a lower or a higher value than others, and how sure that is.

    On the seeds that both have: runs of a seed share their warm-up, and are compared seed by seed.
    The paper's analysis of variance, which does not know of the pairs, stands beside.
    """
    ours, theirs = ({row["seed"]: value(row) for row in rows} for rows in (mine, base))
    both = [seed for seed in ours if seed in theirs]
    if not both:
        return "not shown (no seed has both)"
    first, second = ([values[seed] for seed in both] for values in (ours, theirs))
    change = statistics.mean(first) - statistics.mean(second)
    told = f"{100 * change / statistics.mean(second):+.2f} %"
    if len(both) == 1:
        return f"not shown ({told}, one seed)"
    p = paired_p_value(first, second)
    told += f", p = {p_value(first, second):.2g}, seed by seed p = {p:.2g}"
    word = "not shown"
    if p < SIGNIFICANT:
        word = "holds" if (change < 0) == lower else "does not hold"
    return f"{word} ({told})"


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
