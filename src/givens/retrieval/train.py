"""Towers, codebooks and rotation learned together (paper, section 3.2), in four phases.

    warm-up      the towers alone
    collect      embeddings of items
    warm start   of rotation and codebooks, by OPQ on them
    joint        towers, codebooks and rotation: retrieval loss + weight · distortion

Both learning phases end with the step that did best on the validation users. Where a process group
is there, its ranks do this together, as one would alone: the first writes, tells and measures.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from givens import distributed
from givens.quantizer import Quantizer
from givens.retrieval import checkpoint, evaluate
from givens.retrieval.config import Config
from givens.retrieval.data import Log
from givens.retrieval.run import Row, Run
from givens.retrieval.towers import Towers
from givens.storage import files

# Saving takes at most this part of the time, unless it takes no time at all.
SAVING, QUICK = 0.05, 0.5

# The file of a folder that a run goes on from.
CHECKPOINT = "checkpoint.safetensors"

Tell = Callable[[Row], object]


def unheard(row: Row) -> None:
    """Tell nobody."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run ends with."""

    towers: Towers
    quantizer: Quantizer
    start: Quantizer | None
    """The index as it was when the last phase began; none where that was not in this call."""
    rows: list[Row]
    """What every look at the validation users saw."""
    results: dict[str, Any]
    """Of the test users, by the index, by brute force on decoded items and in full precision."""


def train(
    log: Log,
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = False,
    towers: dict[str, Tensor] | None = None,
    start: Quantizer | None = None,
    device: torch.device | str = "cpu",
    tell: Tell = unheard,
) -> Trained:
    """Train towers and index, and measure them on the test users.

    Args:
        log: what to learn from.
        config: how.
        folder: where checkpoints, metrics and results go; none for no files.
        resume: whether to go on from the folder's checkpoint, if it has one.
        towers: from `warm_up` or `load_towers`, to go on from instead of the first phase.
        start: the index that another run began with from these towers, instead of the third phase.
        device: where to work.
        tell: is told of every look at the validation users, on the first rank.
    """
    # Before the work: a missing package.
    import givens.export.faiss  # noqa: F401

    run = Run(log, config, device, blank=towers is not None)
    run.start = start
    if towers is not None:
        run.adopt(towers)
    if resume and folder is not None and (folder / CHECKPOINT).exists():
        checkpoint.load(run, folder / CHECKPOINT)
    run.check_ranks()
    if not distributed.is_first():
        folder, tell = None, unheard
    saver = Saver(run, folder)
    with board(folder, run.step) as show:
        while run.step < config.total:
            if run.step == config.warmup:
                run.begin_joint()
                saver.keep_start()
                show(run.look())
                tell(run.rows[-1])
            run.advance()
            if run.step % config.every == 0 or run.step in (config.warmup, config.total):
                show(run.look())
                saver.save()
                tell(run.rows[-1])
        if config.steps == 0 and config.method != "post-hoc" and not run.joint:
            # No step with it: the index as it starts.
            run.begin_joint()
            saver.keep_start()
            show(run.look())
            saver.save()
            tell(run.rows[-1])
    quantizer = run.indexed()
    results = distributed.from_first(lambda: finished(run, quantizer, folder))
    return Trained(run.towers, quantizer, run.start, run.rows, results)


def warm_up(
    log: Log, config: Config, *, device: torch.device | str = "cpu", tell: Tell = unheard
) -> dict[str, Tensor]:
    """The first phase alone: its best towers, for runs that are to share them."""
    run = Run(log, config, device)
    while run.step < config.warmup:
        run.advance()
        if run.step % config.every == 0 or run.step == config.warmup:
            tell(run.look())
    return {name: part for name, part in run.best.parts.items() if name.startswith("towers.")}


def finished(run: Run, quantizer: Quantizer, folder: Path | None) -> dict[str, Any]:
    """The results, with all that is made of them in the folder, where there is one."""
    index, results = measured(run, quantizer)
    if folder is not None:
        from givens.export.faiss import save_index

        checkpoint.save_towers(run, folder / "towers.safetensors")
        held = run.examples.held(run.log.test)
        with torch.no_grad():
            users = run.towers.user(held.asked)
        checkpoint.save_users(users, held, folder / "users.safetensors")
        quantizer.save(folder / "quantizer.safetensors")
        if run.log.names is not None:
            with files.replacing(folder / "items.txt") as temporary:
                temporary.write_text("".join(f"{name}\n" for name in run.log.names), "utf-8")
        save_index(index, folder / "index.faiss", {"log": str(run.log), "step": run.best.step})
        files.write_json(folder / "results.json", results)
    return results


@torch.no_grad()
def measured(run: Run, quantizer: Quantizer) -> tuple[Any, dict[str, Any]]:
    """The index, and what test users find in it, in decoded items and in full precision."""
    from givens.export.faiss import to_faiss

    held = run.examples.held(run.log.test)
    users, items = run.towers.user(held.asked), run.towers.item()
    index = to_faiss(quantizer, items)
    decoded = evaluate.as_indexed(index, items, quantizer.decode(quantizer.encode(items)))
    k = min(max(evaluate.KS), run.log.catalogue)
    rankings = {
        "index": evaluate.search(index, users, held, k),
        "decoded": evaluate.brute_force(users, decoded, held, k),
        "full": evaluate.brute_force(users, items, held, k),
        "popularity": evaluate.brute_force(
            users.new_ones(len(users), 1), run.examples.popularity[:, None], held, k
        ),
    }
    results: dict[str, Any] = {
        name: evaluate.metrics(ranking.items, held, run.log.catalogue)
        for name, ranking in rankings.items()
    }
    results["agreement"] = evaluate.check_agreement(rankings["index"], rankings["decoded"])
    results["distortion"] = quantizer.distortion(items)
    results["best_step"] = run.best.step
    return index, results


class Saver:
    """Keeps a run's checkpoint and metrics in its folder, where there is one."""

    def __init__(self, run: Run, folder: Path | None) -> None:
        self.run, self.folder = run, folder
        self.spent, self.last = 0.0, time.perf_counter()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files.check_writable(folder / "metrics.jsonl")
            # Of a run that was here before, it would pass for this one's.
            (folder / "results.json").unlink(missing_ok=True)

    def keep_start(self) -> None:
        """Keep the index as it begins, to be compared with how it ends."""
        if self.folder is not None and self.run.start is not None:
            self.run.start.save(self.folder / "start.safetensors")

    def save(self) -> None:
        """Save, unless it takes too long to be done so often."""
        began = time.perf_counter()
        soon = SAVING * (began - self.last) < self.spent - QUICK
        if self.folder is None or (soon and self.run.step < self.run.config.total):
            return
        lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in self.run.rows)
        with files.replacing(self.folder / "metrics.jsonl") as temporary:
            temporary.write_text(lines)
        checkpoint.save(self.run, self.folder / CHECKPOINT)
        self.last = time.perf_counter()
        self.spent = self.last - began


@contextlib.contextmanager
def board(folder: Path | None, step: int) -> Iterator[Tell]:
    """Scalars for TensorBoard, where it is installed."""
    writer: Any = None
    if folder is not None:
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
    if writer is None:
        yield unheard
        return

    def show(row: Row) -> None:
        for name, value in row.items():
            if name not in ("step", "phase"):
                writer.add_scalar(f"{row['phase']}/{name}", value, row["step"])

    try:
        yield show
    finally:
        writer.close()
