"""A log that drifts in time: the recall of a served index, and the cost of keeping it fresh.

Training follows the order of time, at a constant rate. Every few steps the index is refreshed
(`givens.export.refresh`), and recall of the next clicks of held-out users is measured before and
after the refresh. There are four ways to keep an index:

    gcd      trained with the towers, R learned
    frozen   trained with the towers, R as it started
    refit    towers alone; Faiss's OPQ is fitted again at every refresh
    kept     towers alone; the first OPQ stays, and only items are encoded again
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from givens.paper.joint import (
    HIDDEN,
    Runs,
    check_log,
    describe_setting,
    label,
    p_value,
    paired_p_value,
    select,
)
from givens.paper.rates import ANGLES, tune
from givens.paper.rows import Rows, save_picture
from givens.quantizer import Quantizer
from givens.retrieval import evaluate
from givens.retrieval.batches import Examples, HeldOut
from givens.retrieval.config import Config
from givens.retrieval.data import Log, click_log
from givens.retrieval.readers import read
from givens.retrieval.state import DivergedError, State
from givens.retrieval.trainer import RAMP, Trainer, check_finite, fit_after

WAYS = {
    "gcd": "R learned",
    "frozen": "R frozen",
    "refit": "OPQ refitted",
    "kept": "first OPQ kept",
}
LOG = {"users": 20_000, "items": 10_000, "clicks": 600_000, "drift": 0.02}
SMOKE = {"users": 500, "items": 300, "clicks": 10_000, "drift": 0.02}
# The truth of a user at a time is this many next clicks.
NEXT, K = 20, 100


def log_for(data: Path | None, *, smoke: bool) -> Log:
    """The log of a folder, or the built-in one with drift."""
    if data is not None:
        return read(data)
    options: Any = SMOKE if smoke else LOG
    return click_log(**options)


def configure(config: Config) -> Config:
    """The configuration for training in order of time, with the next click as the target."""
    return dataclasses.replace(config, stream=True, ahead=1)


def run(runs: Runs, hidden: Runs, log: Log, configs: list[Config], angle: float | None) -> Rows:
    """Run all four ways for each seed, after choosing R's angle unless given."""
    check_log(log)
    learned = dataclasses.replace(configs[0], method="gcd")
    if angle is None:
        learned = tune(learned, "angle", ANGLES, lambda c: _explore(hidden, log, c))
        angle = learned.angle
    for seed in HIDDEN:
        hidden.forget(seed)
    rows = []
    for config in configs:
        for way in WAYS:
            rows.append(_run(runs, log, _configure_way(config, way, angle), way))
        runs.forget(config.seed)
    return rows


def _configure_way(config: Config, way: str, angle: float) -> Config:
    options: Any = {"method": way if way in ("gcd", "frozen") else "post-hoc"}
    if way == "gcd":
        options["angle"] = angle
    return dataclasses.replace(config, **options)


def _explore(runs: Runs, log: Log, config: Config) -> dict[str, Any]:
    """The row of a run on the validation users, for `tune`."""
    how = label(log, config, way="gcd", users="valid")
    if row := runs.find(how):
        return row
    try:
        row = {**how, **go_through(runs, log, config, "gcd", log.valid), "diverged": None}
        # The mean over the stream, not its best time.
        row["recall"] = [statistics.fmean(row["recall"])]
    except DivergedError as error:
        row = {**how, "recall": [], "final_distortion": 0.0, "diverged": str(error)}
    told = row["diverged"] or f"validation recall {100 * max(row['recall']):.2f} %"
    runs.tell(f"{log.name}, angle {config.angle:g}, seed {config.seed}: {told}")
    return runs.keep(row)


def _run(runs: Runs, log: Log, config: Config, way: str) -> dict[str, Any]:
    how = label(log, config, way=way)
    if row := runs.find(how):
        return row
    row = runs.keep({**how, **go_through(runs, log, config, way, log.test)})
    found, written = (100 * statistics.fmean(row[name]) for name in ("recall", "rewritten"))
    runs.tell(
        f"{log.name}, {WAYS[way]}, seed {config.seed}: recall@{K} {found:.2f} %, {written:.1f} % "
        f"of the codes rewritten in {statistics.fmean(row['seconds']):.2f} s"
    )
    return row


class Steady(Trainer):
    """A trainer whose rates do not decay: a stream has no end."""

    def find_factor(self) -> float:
        """The factor of the rates: a linear warm-up, then constant."""
        return min(1.0, (self.state.step - self.state.config.warmup + 1) / RAMP)


def go_through(
    runs: Runs, log: Log, config: Config, way: str, users: Int[np.ndarray, " b"]
) -> dict[str, Any]:
    """Train through the log, and refresh and measure the index along the way; returns the row."""
    from givens.export.faiss import to_faiss
    from givens.export.refresh import refresh

    towers, digest = runs.load_warm_up(log, config)
    # The first index is the same for all ways.
    trained = dataclasses.replace(config, method="frozen")
    state = State(log, config, runs.device, blank=True)
    state.skip_warm_up(towers)
    examples = Examples(log, history=config.history, ahead=config.ahead, seed=config.seed,
                        stream=True, device=state.device)  # fmt: skip
    trainer = Steady(state, examples)
    start = runs.load_start(log, trained)
    if start is None:
        first = State(log, trained, runs.device, blank=True)
        first.skip_warm_up(towers)
        Trainer(first, examples).begin_joint()
        start = first.quantizer
        runs.keep_start(log, trained, start)
    state.start = start
    trainer.begin_joint()
    served = to_faiss(start, state.towers.item().detach())
    told: dict[str, list[float]] = {name: [] for name in _TOLD}
    spent, distortion = 0.0, 0.0
    while state.step + config.every < config.total:
        began = time.perf_counter()
        for _ in range(config.every):
            trainer.advance()
        losses = trainer.take_losses()
        check_finite(state.step - len(losses), losses)
        spent += time.perf_counter() - began
        with torch.no_grad():
            now = find_time(examples, state.step / config.total, config)
            held = hold_out_at(examples, users, now)
            vectors, items = state.towers.user(held.inputs), state.towers.item()
            told["stale"].append(_measure_recall(served, vectors, held, log.catalogue))
            began = time.perf_counter()
            q = start if way == "kept" else _make_quantizer(state, items)
            fitted = time.perf_counter()
            written = refresh(served, q, items)
            ended = time.perf_counter()
            distortion = q.distortion(items)
        told["steps"].append(state.step - config.warmup)
        told["time"].append(now)
        told["recall"].append(_measure_recall(served, vectors, held, log.catalogue))
        told["rewritten"].append(len(written) / log.catalogue)
        told["fitting"].append(fitted - began)
        told["seconds"].append(ended - began)
    if not told["steps"]:
        raise ValueError(
            f"steps must be more than every={config.every} for a refresh, but got {config.steps}"
        )
    return {
        "name": log.name,
        "method": config.method,
        "bytes": config.bytes,
        "seed": config.seed,
        "warm_up": digest,
        "final_distortion": distortion,
        "step_seconds": spent / told["steps"][-1],
        **told,
    }


_TOLD = ("steps", "time", "stale", "recall", "rewritten", "fitting", "seconds")


def _make_quantizer(state: State, items: torch.Tensor) -> Quantizer:
    """The trained index, or one that Faiss fits to the present items."""
    if state.joint:
        return state.quantizer
    return fit_after(items, state.config).to(state.device)


def _measure_recall(index: Any, users: torch.Tensor, held: HeldOut, catalogue: int) -> float:
    k = min(K, catalogue)
    found = evaluate.search(index, users, held, k).items
    return evaluate.compute_metrics(found, held, catalogue, (k,))[f"recall@{k}"]


def find_time(examples: Examples, progress: float, config: Config) -> float:
    """The time of the log that training has reached."""
    from givens.retrieval.batches import STREAM_WINDOW

    count = max(int(STREAM_WINDOW * len(examples.places)), 1)
    last = int(progress * (len(examples.places) - count)) + count - 1
    return float(examples.log.times[int(examples.places[last])])


def hold_out_at(examples: Examples, users: Int[np.ndarray, " b"], now: float) -> HeldOut:
    """Held-out users, with the clicks up to a time as the history and the next ones as the truth.

    Users without clicks before or after it are left out.
    """
    log, m = examples.log, examples.log.catalogue
    begin, end = log.starts[users], log.starts[users + 1]
    until = [
        np.searchsorted(log.times[b:e], now, side="right") for b, e in zip(begin, end, strict=True)
    ]
    places = begin + np.array(until, begin.dtype)
    there = (places > begin) & (places < end)
    if not there.any():
        raise ValueError(f"{log.name} has no held-out user with clicks before and after {now:.2f}")
    users, begin, places, end = users[there], begin[there], places[there], end[there]
    last = np.minimum(places + NEXT, end)
    seen, truth = (
        np.unique(np.concatenate([row * m + log.items[a:b].astype(np.int64)
                                  for row, (a, b) in enumerate(zip(*spans, strict=True))]))
        for spans in ((begin, places), (places, last))
    )  # fmt: skip
    truth = truth[~np.isin(truth, seen)]
    sizes = np.bincount(truth // m, minlength=len(users))
    who, where = (torch.from_numpy(part).to(examples.device) for part in (users, places))
    parts = (torch.from_numpy(part).to(examples.device) for part in (seen, truth, sizes))
    return HeldOut(examples.build_inputs(who, where), *parts)


def plot(pyplot: Any, rows: Rows, path: Path) -> list[str]:
    """Draw recall, the share of codes rewritten and seconds spent against the step."""
    rows = [row for row in rows if row.get("way") in WAYS and row.get("users") != "valid"]
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.9))
    for number, way in enumerate(WAYS):
        mine = select(rows, way=way)
        if not mine:
            continue
        cost = [{**row, "spent": list(np.cumsum(row["seconds"]))} for row in mine]
        curves = (("recall", 100, mine), ("rewritten", 100, mine), ("spent", 1, cost))
        for axes, (name, scale, some) in zip(panels, curves, strict=True):
            values = scale * np.array([row[name] for row in some])
            steps, color = mine[0]["steps"], f"C{number}"
            axes.plot(steps, values.mean(0), "-o", ms=3, color=color, label=WAYS[way])
            axes.fill_between(steps, values.min(0), values.max(0), alpha=0.12, color=color)
    panels[0].set(ylabel="%", title=f"recall@{K} after a refresh")
    panels[1].set(ylabel="% of the items", title="codes rewritten by a refresh")
    panels[2].set(ylabel="seconds", title="refreshes so far, all together")
    panels[2].set_yscale("log")
    for axes in panels:
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    config = rows[0]["config"]
    caption = (
        f"{rows[0]['name']}, n = {config['dim']}, {rows[0]['bytes']} bytes, mean and range of "
    )
    save_picture(pyplot, figure, caption + describe_setting(rows), path)
    return table(rows)


def table(rows: Rows) -> list[str]:
    """Means over time and seeds, with p-values against a frozen R, in Markdown."""
    rows = [row for row in rows if row.get("way") in WAYS and row.get("users") != "valid"]
    lines = [
        f"| | recall@{K} % | before the refresh | p | by seed | codes rewritten % "
        "| s a refresh | of it fitting | ms a training step |",
        "|---" * 9 + "|",
    ]
    base = [statistics.fmean(row["recall"]) for row in _select_way(rows, "frozen")]
    for way in WAYS:
        mine = _select_way(rows, way)
        if not mine:
            continue
        found = [statistics.fmean(row["recall"]) for row in mine]
        spread = f" ± {100 * statistics.stdev(found):.2f}" if len(found) > 1 else ""
        chances = ["", ""]
        if way != "frozen" and len(found) == len(base) > 1:
            chances = [f"{p:.2g}" for p in (p_value(found, base), paired_p_value(found, base))]
        means = {
            name: statistics.fmean(statistics.fmean(row[name]) for row in mine)
            for name in ("stale", "rewritten", "seconds", "fitting")
        }
        step = statistics.fmean(row["step_seconds"] for row in mine)
        cells = (
            WAYS[way],
            f"{100 * statistics.fmean(found):.2f}{spread}",
            f"{100 * means['stale']:.2f}",
            *chances,
            f"{100 * means['rewritten']:.1f}",
            f"{means['seconds']:.3f}",
            f"{means['fitting']:.3f}",
            f"{1000 * step:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _select_way(rows: Rows, way: str) -> Rows:
    return sorted(select(rows, way=way), key=lambda row: row["seed"])
