"""The state of a training run: parameters, optimizers, and the best step so far."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from givens import distributed
from givens.baselines import optimizer_for
from givens.layer.layer import IndexLayer
from givens.quantizer import Codes, Quantizer
from givens.retrieval.config import LARGE, Config
from givens.retrieval.data import Log
from givens.retrieval.rows import Entry, RowFiles
from givens.retrieval.tables import RowWise, Table
from givens.retrieval.towers import Towers
from givens.rotation import project


class DivergedError(ValueError):
    """A loss or a rotation that is not finite."""


Row = dict[str, Any]
"""The measurements of one evaluation on the validation users."""


@dataclass
class Best:
    """The step with the best validation recall, and the parts at that step."""

    recall: float
    step: int
    parts: dict[str, Tensor]
    rows: list[Entry] = field(default_factory=list)
    """The files of the split tables, of which memory has no room for a copy."""


class State:
    """Towers, index layer and optimizers of a run, its step, and the rows measured so far.

    A checkpoint holds exactly this. `trainer` takes the steps, `evaluate` adds the rows.
    """

    def __init__(
        self,
        log: Log,
        config: Config,
        device: torch.device | str = "cpu",
        *,
        blank: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Initialize all parts.

        Args:
            log: the log to learn from.
            config: the options of the run.
            device: the device of all parts.
            blank: leave the towers uninitialized, for `skip_warm_up` to fill.
            folder: the folder for the rows of split tables; None for a temporary one.
        """
        config.check(log)
        self.log, self.config, self.device = log, config, torch.device(device)
        with torch.device("meta") if blank else contextlib.nullcontext():
            self.towers = Towers(
                log.catalogue,
                config.dim,
                history=config.history,
                pool=config.pool,
                vocabulary=log.vocabulary,
                # A step sees few of the items: tables are split over ranks.
                split=log.catalogue > LARGE and config.negatives is not None,
                seed=config.seed,
            )
        if blank:
            self.towers.to_empty(device=self.device)
        self.towers.to(self.device)
        sizes = (config.subspaces, config.codewords, config.coarse)
        self.layer = IndexLayer(config.dim, *sizes, metric="cosine", device=self.device)
        self.step = 0
        self.files = RowFiles(folder)
        self.rows: list[Row] = []
        self.best = Best(-1.0, 0, {})
        # The index at the beginning of the joint phase.
        self.start: Quantizer | None = None
        # The codes of all items, if training keeps them fixed.
        self.codes: Codes | None = None
        self.reset_optimizers(joint=False)
        self.mark_rotation()

    @property
    def joint(self) -> bool:
        """Whether the joint phase has begun, in which the index is trained."""
        return self.layer.warm

    @property
    def quantizer(self) -> Quantizer:
        """The index at this step; an R that is only nearly orthogonal is projected."""
        if self.config.exact_rotation:
            return self.layer.quantizer
        R = self.layer.rotation.matrix.detach()
        if not bool(R.isfinite().all()):
            raise DivergedError(
                f"R is not finite at step {self.step}; a lower angle than {self.config.angle:g} "
                "may help"
            )
        R = project(R)
        coarse = None if self.layer.coarse is None else self.layer.coarse.detach()
        return Quantizer(R, self.layer.codebooks.detach(), coarse, "cosine")

    @property
    def tables(self) -> dict[str, Table]:
        """The split tables by name; none for a small catalogue."""
        return {f"towers.{name}": table for name, table in self.towers.tables().items()}

    def parts(self) -> dict[str, Tensor]:
        """All tensors of towers and layer that every rank holds, by name."""
        towers = {f"towers.{name}": part for name, part in self.towers.state_dict().items()}
        layer = {f"layer.{name}": part for name, part in self.layer.state_dict().items()}
        for name in self.tables:
            del towers[f"{name}.weight"]
        fixed = {}
        if self.codes is not None:
            fixed["codes.fine"] = self.codes.fine
            if self.codes.coarse is not None:
                fixed["codes.coarse"] = self.codes.coarse
        return {**towers, **layer, **fixed}

    def columns(self, *, learning: bool = True) -> dict[str, Tensor]:
        """This rank's rows of split tables and, if `learning`, of their optimizer state."""
        found = {f"{name}.weight": table.weight.detach() for name, table in self.tables.items()}
        for name, table in self.tables.items() if learning else ():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(table.weight, {}).items():
                    found[f"{name}.{key}"] = value
        return found

    @property
    def first(self) -> int:
        """The first of this rank's rows."""
        return next((table.range.start for table in self.tables.values()), 0)

    def load_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Overwrite towers, layer and fixed codes with these parts.

        Split tables may be included, as a whole or as this rank's rows; otherwise they stay.
        """
        whole = {**self.columns(learning=False), **parts}
        if "codes.fine" in parts:
            coarse = parts.get("codes.coarse")
            coarse = None if coarse is None else coarse.to(self.device)
            self.codes = Codes(parts["codes.fine"].to(self.device), coarse)
        for name, table in self.tables.items():
            if len(rows := whole[f"{name}.weight"]) == table.num_embeddings:
                whole[f"{name}.weight"] = rows[table.range]
        for name, module in (("towers.", self.towers), ("layer.", self.layer)):
            if any(key.startswith(name) for key in parts):
                mine = {k.removeprefix(name): v for k, v in whole.items() if k.startswith(name)}
                module.load_state_dict(mine)

    def mark_best(self, recall: float) -> None:
        """Keep a copy of all parts at this step, which is the best so far."""
        rows = self.files.save(self.columns(), self.first, self.step)
        copied = {name: part.detach().clone() for name, part in self.parts().items()}
        self.best = Best(recall, self.step, copied, rows)
        self.files.keep(rows)

    def load_best(self) -> None:
        """Go back to the best step."""
        self.load_parts(self.best.parts)
        self.files.load(self.best.rows, self.columns(learning=False), self.first)

    def mark_rotation(self) -> None:
        """Remember R, to measure later how far it has turned since."""
        self.marked = self.layer.rotation.matrix.detach().clone()

    def skip_warm_up(self, towers: Mapping[str, Tensor]) -> None:
        """Continue after the warm-up, from towers of another run."""
        self.load_parts(towers)
        self.step = self.config.warmup
        self.mark_best(-1.0)

    def reset_optimizers(self, *, joint: bool) -> None:
        """Make fresh optimizers: Adam for towers and codebooks and, if `joint`, the one for R."""
        c, tables = self.config, self.towers.tables()
        self.towers.items.weight.requires_grad_(not (joint and c.items_stay))
        learned = [part for part in self.towers.parameters() if part.requires_grad]
        lr = c.joint_lr if self.step >= c.warmup else c.lr
        rare = [table.weight for table in tables.values() if table.weight.requires_grad]
        if joint:
            learned += self.layer.index_parameters()
        gpu = self.device.type == "cuda"
        often = [part for part in learned if all(part is not other for other in rare)]
        optimizers: list[Optimizer] = [Adam(often, lr, fused=gpu, capturable=gpu)]
        if rare:
            optimizers.append(RowWise(rare, lr))
        if joint:
            optimizers.append(make_rotation_optimizer(self.layer, c))
        self.capturable = gpu and not tables and can_capture(c, joint=joint)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["initial_lr"] = group["lr"]
            if self.capturable:
                # A CUDA graph reads the rate from this tensor.
                group["lr"] = torch.tensor(group["lr"], device=self.device)
        self.optimizers = optimizers

    def restore(
        self,
        step: int,
        rows: list[Row],
        parts: Mapping[str, Tensor],
        best: Best,
        optimizers: Mapping[int, Mapping[int, Mapping[str, Any]]],
        entries: list[Entry],
        *,
        joint: bool,
    ) -> None:
        """Continue from what a checkpoint holds.

        Args:
            step: the steps taken.
            rows: the rows of the evaluations so far.
            parts: the tensors that every rank holds, as of `parts`.
            best: the best step so far.
            entries: the files of the split tables.
            optimizers: the state of each parameter, by the number of its optimizer and its own.
            joint: whether the joint phase had begun.
        """
        self.step, self.rows = step, rows
        # An optimizer may parametrize R, so optimizers are made before parts are loaded.
        self.reset_optimizers(joint=joint)
        self.load_parts(parts)
        self.mark_rotation()
        moved = {name: part.to(self.device) for name, part in best.parts.items()}
        self.best = Best(best.recall, best.step, moved, best.rows)
        for number, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, RowWise):
                continue
            states = {key: dict(state) for key, state in optimizers.get(number, {}).items()}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        self.files.load(entries, self.columns(), self.first)
        self.files.kept = [*entries, *best.rows]


def can_capture(config: Config, *, joint: bool) -> bool:
    """Whether a step has no host synchronisation, so that a CUDA graph can capture it."""
    waits = config.method in ("expm", "pogo")
    waits = waits or (config.method == "gcd-steepest" and config.exact)
    return distributed.is_alone() and not (joint and waits)


def make_rotation_optimizer(layer: IndexLayer, config: Config) -> Optimizer:
    """The optimizer for R, at a rate that turns an axis by about the same angle for every method.

    GCD's rate is that angle. Adam moves each of the n entries of an axis by its rate, and the
    Cayley transform is I − 2S to first order. A step of POGO's VectorAdam has Frobenius norm 1.
    """
    n = layer.rotation.dim
    spread = {"cayley": 2 * math.sqrt(n), "expm": math.sqrt(n), "penalty": math.sqrt(n)}
    spread["pogo"] = 1 / math.sqrt(n)
    method: Any = "frozen" if config.method == "jpq" else config.method
    options: dict[str, Any] = {}
    if method.startswith("gcd"):
        options = {"seed": config.seed, "exact": config.exact}
    elif method in ("cayley", "expm", "penalty"):
        options = {"capturable": layer.codebooks.is_cuda}
    return optimizer_for(layer.rotation, method, config.angle / spread.get(method, 1.0), **options)
