"""Train towers, codebooks and rotation together (paper, section 3.2), in four phases.

    warm-up      train the towers alone
    collect      embed a sample of the items
    warm start   fit rotation and codebooks to them, by OPQ
    joint        train towers, codebooks and rotation: retrieval loss + weight · distortion

Both training phases keep the step with the best validation recall. The ranks of a process group
train one model, with the results of a single process; the first rank writes the files.
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
from givens.retrieval import checkpoint
from givens.retrieval.batches import open_examples
from givens.retrieval.config import Config
from givens.retrieval.data import Log, write_names
from givens.retrieval.evaluate import Evaluator, count_distinct, hash_codes
from givens.retrieval.state import Row, State
from givens.retrieval.towers import Towers
from givens.retrieval.trainer import Trainer
from givens.storage import files

# Saving takes at most this share of the time, but a save of under QUICK seconds is always allowed.
SAVING, QUICK = 0.05, 0.5

# The file in a run's folder from which the run resumes.
CHECKPOINT = "checkpoint.safetensors"
# The folder in a run's folder for rows of split tables.
TABLES = "tables"

Tell = Callable[[Row], object]


def ignore(value: object) -> None:
    """Ignore a row or a step."""


@dataclass(frozen=True, eq=False)
class Trained:
    """The outcome of a run."""

    towers: Towers
    quantizer: Quantizer
    start: Quantizer | None
    """The index at the start of the joint phase; None if that was before this call."""
    rows: list[Row]
    """The rows of all evaluations on the validation users."""
    results: dict[str, Any]
    """The metrics of the test users, by the index and by exact search."""


def train(
    log: Log,
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = False,
    towers: dict[str, Tensor] | None = None,
    start: Quantizer | None = None,
    device: torch.device | str = "cpu",
    tell: Tell = ignore,
    progress: Callable[[int], object] = ignore,
) -> Trained:
    """Train towers and index, and evaluate them on the test users.

    Args:
        log: the log to learn from.
        config: the options of the run.
        folder: the folder for checkpoints, metrics and results; None for no files.
        resume: whether to continue from the folder's checkpoint, if it has one.
        towers: from `warm_up` or `load_towers`, to continue from instead of the first phase.
        start: the start of the index in another run with these towers, instead of the third phase.
        device: the device to train on.
        tell: called on the first rank with the row of every evaluation on the validation users.
        progress: called on the first rank with the number of every step.
    """
    # A missing package raises before the work.
    import givens.export.faiss  # noqa: F401

    place = None if folder is None else folder / TABLES
    state = State(log, config, device, blank=towers is not None, folder=place)
    state.start = start
    if towers is not None:
        state.skip_warm_up(towers)
    if resume and folder is not None and (folder / CHECKPOINT).exists():
        checkpoint.load(state, folder / CHECKPOINT)
    trainer, evaluator = _prepare(state)
    trainer.check_ranks()
    if not distributed.is_first():
        tell, progress = ignore, ignore
    saver = Saver(state, folder)
    with open_board(folder if distributed.is_first() else None, state.step) as show:

        def keep(row: Row) -> None:
            show(row)
            saver.save()
            tell(row)

        _learn(trainer, evaluator, config.warmup, keep, progress)
        # Without joint steps, the start is the index.
        has_index = config.steps > 0 or not config.after
        if state.step == config.warmup and not state.joint and has_index:
            trainer.begin_joint()
            saver.save_start()
            row = evaluator.evaluate(trainer.take_losses())
            show(row)
            if not config.steps:
                saver.save()
            tell(row)
        _learn(trainer, evaluator, config.total, keep, progress)
    quantizer = trainer.finish()
    results = _write_results(evaluator, quantizer, folder)
    return Trained(state.towers, quantizer, state.start, state.rows, results)


def warm_up(
    log: Log, config: Config, *, device: torch.device | str = "cpu", tell: Tell = ignore
) -> dict[str, Tensor]:
    """Run the first phase only; returns its best towers, for runs that share them."""
    state = State(log, config, device)
    _learn(*_prepare(state), config.warmup, tell)
    state.load_best()
    learned = {**state.parts(), **state.columns(learning=False)}
    return {name: part for name, part in learned.items() if name.startswith("towers.")}


def explore(
    log: Log,
    config: Config,
    towers: dict[str, Tensor],
    *,
    start: Quantizer | None = None,
    device: torch.device | str = "cpu",
) -> tuple[list[Row], Quantizer | None]:
    """Run the other phases without the test users; returns the rows, and the start of the index."""
    state = State(log, config, device, blank=True)
    state.start = start
    state.skip_warm_up(towers)
    trainer, evaluator = _prepare(state)
    trainer.begin_joint()
    evaluator.evaluate(trainer.take_losses())
    _learn(trainer, evaluator, config.total, ignore)
    if state.joint:
        with torch.no_grad():
            part = state.towers.part()
            codes = evaluator.encode(state.quantizer, part, part.first)
        state.rows[-1]["distinct"] = count_distinct([hash_codes(codes)]) / log.catalogue
    return state.rows, state.start


def _prepare(state: State) -> tuple[Trainer, Evaluator]:
    """The trainer and the evaluator of a state, on the same examples."""
    c = state.config
    examples = open_examples(
        state.log,
        history=c.history,
        ahead=c.ahead,
        seed=c.seed,
        stream=c.stream,
        device=state.device,
    )
    return Trainer(state, examples), Evaluator(state, examples)


def _learn(
    trainer: Trainer,
    evaluator: Evaluator,
    until: int,
    tell: Tell,
    progress: Callable[[int], object] = ignore,
) -> None:
    """Take steps up to `until`, with evaluations at intervals and at the end of a phase."""
    state, c = trainer.state, trainer.state.config
    while state.step < until:
        trainer.advance()
        progress(state.step)
        if state.step % c.every == 0 or state.step in (c.warmup, c.total):
            tell(evaluator.evaluate(trainer.take_losses()))


def _write_results(
    evaluator: Evaluator, quantizer: Quantizer, folder: Path | None
) -> dict[str, Any]:
    """Evaluate the test users, and write results, index, towers and users into the folder."""
    index, results = evaluator.test(quantizer)
    if folder is None:
        return results
    from givens.export.shards import save_parts

    state = evaluator.state
    held = evaluator.examples.hold_out(state.log.test)
    with torch.no_grad():
        users = state.towers.user(held.inputs)
    about = {"log": str(state.log), "step": state.best.step}
    first = state.towers.part().first
    save_parts(index, quantizer, folder / "index.faiss", about, first=first, device=state.device)

    def write() -> None:
        checkpoint.save_towers(state, folder / "towers.safetensors")
        checkpoint.save_users(users, held, folder / "users.safetensors")
        quantizer.save(folder / "quantizer.safetensors")
        if state.log.names is not None:
            with files.replacing(folder / "items.txt") as temporary:
                write_names(temporary, state.log.names)
        files.write_json(folder / "results.json", results)

    distributed.from_first(write)
    return results


class Saver:
    """Saves the checkpoint and metrics of a run in its folder, if it has one."""

    def __init__(self, state: State, folder: Path | None) -> None:
        self.state, self.folder = state, folder
        self.spent, self.last = 0.0, time.perf_counter()
        if folder is not None:
            distributed.from_first(lambda: _clear(folder))

    def save_start(self) -> None:
        """Save the start of the index, for reports."""
        start, folder = self.state.start, self.folder
        if folder is not None and start is not None:
            distributed.from_first(lambda: start.save(folder / "start.safetensors"))

    def save(self) -> None:
        """Save the checkpoint and metrics, unless this would take too large a share of the time."""
        folder = self.folder
        if folder is None:
            return
        began = time.perf_counter()
        soon = SAVING * (began - self.last) < self.spent - QUICK
        if distributed.from_first(lambda: soon) and self.state.step < self.state.config.total:
            return
        lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in self.state.rows)

        def write_rows() -> None:
            with files.replacing(folder / "metrics.jsonl") as temporary:
                temporary.write_text(lines)

        distributed.from_first(write_rows)
        checkpoint.save(self.state, folder / CHECKPOINT)
        self.last = time.perf_counter()
        self.spent = self.last - began


def _clear(folder: Path) -> None:
    """Create a run's folder, and remove the results of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    files.check_writable(folder / "metrics.jsonl")
    (folder / "results.json").unlink(missing_ok=True)


@contextlib.contextmanager
def open_board(folder: Path | None, step: int) -> Iterator[Tell]:
    """Write scalars for TensorBoard, if it is installed."""
    writer: Any = None
    if folder is not None:
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
    if writer is None:
        yield ignore
        return

    def show(row: Row) -> None:
        for name, value in row.items():
            if name not in ("step", "phase"):
                writer.add_scalar(f"{row['phase']}/{name}", value, row["step"])

    try:
        yield show
    finally:
        writer.close()
