"""Where a training run stands: what is learned, the optimizers, and the best step so far."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer, SparseAdam

from givens import distributed
from givens.baselines import optimizer_for
from givens.layer.layer import IndexLayer
from givens.quantizer import Codes, Quantizer
from givens.retrieval.config import LARGE, Config
from givens.retrieval.data import Log
from givens.retrieval.towers import Towers
from givens.rotation import project


class DivergedError(ValueError):
    """A loss or a rotation that is not finite."""


Row = dict[str, Any]
"""What one evaluation on the validation users measured."""


@dataclass
class Best:
    """The step that did best on the validation users, and the parts at that step."""

    recall: float
    step: int
    parts: dict[str, Tensor]


class State:
    """Towers, index layer and optimizers of a run, its step, and the rows measured so far.

    A checkpoint holds exactly this. `trainer` changes it by steps, `evaluate` adds rows.
    """

    def __init__(
        self, log: Log, config: Config, device: torch.device | str = "cpu", *, blank: bool = False
    ) -> None:
        """Initialize all parts.

        Args:
            log: the log to learn from.
            config: the options of the run.
            device: where the parts are.
            blank: leave the towers uninitialized, for `skip_warm_up` to fill.
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
                # Where a step sees few of the items, only those are updated.
                sparse=log.catalogue > LARGE and config.negatives is not None,
                seed=config.seed,
            )
        if blank:
            self.towers.to_empty(device=self.device)
        self.towers.to(self.device)
        sizes = (config.subspaces, config.codewords, config.coarse)
        self.layer = IndexLayer(config.dim, *sizes, metric="cosine", device=self.device)
        self.step = 0
        self.rows: list[Row] = []
        self.best = Best(-1.0, 0, {})
        # The index at the beginning of the joint phase.
        self.start: Quantizer | None = None
        # Of all items, where training leaves them as they start.
        self.codes: Codes | None = None
        self.reset_optimizers(joint=False)
        self.mark_rotation()

    @property
    def joint(self) -> bool:
        """Whether the index is trained along."""
        return self.layer.warm

    @property
    def quantizer(self) -> Quantizer:
        """The index at this step; an R that is only close to a rotation is projected."""
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

    def parts(self) -> dict[str, Tensor]:
        """Everything that is learned, by name."""
        towers = {f"towers.{name}": part for name, part in self.towers.state_dict().items()}
        layer = {f"layer.{name}": part for name, part in self.layer.state_dict().items()}
        fixed = {}
        if self.codes is not None:
            fixed["codes.fine"] = self.codes.fine
            if self.codes.coarse is not None:
                fixed["codes.coarse"] = self.codes.coarse
        return {**towers, **layer, **fixed}

    def load_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Overwrite the towers, the layer and fixed codes by the parts of these names."""
        if "codes.fine" in parts:
            coarse = parts.get("codes.coarse")
            coarse = None if coarse is None else coarse.to(self.device)
            self.codes = Codes(parts["codes.fine"].to(self.device), coarse)
        for name, module in (("towers.", self.towers), ("layer.", self.layer)):
            mine = {k.removeprefix(name): v for k, v in parts.items() if k.startswith(name)}
            if mine:
                module.load_state_dict(mine)

    def copy_parts(self) -> dict[str, Tensor]:
        """The parts as they are now, which later steps leave alone."""
        return {name: part.detach().clone() for name, part in self.parts().items()}

    def mark_rotation(self) -> None:
        """Remember R, to tell later how far it has turned since."""
        self.marked = self.layer.rotation.matrix.detach().clone()

    def skip_warm_up(self, towers: Mapping[str, Tensor]) -> None:
        """Continue after the warm-up, from towers that went through it in another run."""
        self.load_parts(towers)
        self.step = self.config.warmup
        self.best = Best(-1.0, self.step, self.copy_parts())

    def reset_optimizers(self, *, joint: bool) -> None:
        """Make fresh optimizers: Adam for towers and codebooks and, if `joint`, the one for R."""
        c, table = self.config, self.towers.items
        table.weight.requires_grad_(not (joint and c.items_stay))
        learned = [part for part in self.towers.parameters() if part.requires_grad]
        lr = c.joint_lr if self.step >= c.warmup else c.lr
        rare = [part for part in learned if part is table.weight and table.sparse]
        if joint:
            learned += self.layer.index_parameters()
        gpu = self.device.type == "cuda"
        often = [part for part in learned if all(part is not other for other in rare)]
        optimizers: list[Optimizer] = [Adam(often, lr, fused=gpu, capturable=gpu)]
        if rare:
            optimizers.append(SparseAdam(rare, lr))
        if joint:
            optimizers.append(make_rotation_optimizer(self.layer, c))
        self.capturable = gpu and not table.sparse and can_capture(c, joint=joint)
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
        *,
        joint: bool,
    ) -> None:
        """Continue from what a checkpoint holds.

        Args:
            step: the steps taken.
            rows: of the evaluations so far.
            parts: everything that is learned.
            best: the best step so far.
            optimizers: the state of each parameter, by the number of its optimizer and its own.
            joint: whether the index was trained along.
        """
        self.step, self.rows = step, rows
        # R may be parametrized in the joint phase, so optimizers are made before parts are loaded.
        self.reset_optimizers(joint=joint)
        self.load_parts(parts)
        self.mark_rotation()
        moved = {name: part.to(self.device) for name, part in best.parts.items()}
        self.best = Best(best.recall, best.step, moved)
        for number, optimizer in enumerate(self.optimizers):
            states = {key: dict(state) for key, state in optimizers.get(number, {}).items()}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def can_capture(config: Config, *, joint: bool) -> bool:
    """Whether a step has no host synchronisation, so that a CUDA graph can capture it."""
    waits = config.method in ("expm", "pogo")
    waits = waits or (config.method == "gcd-steepest" and config.exact)
    return distributed.alone() and not (joint and waits)


def make_rotation_optimizer(layer: IndexLayer, config: Config) -> Optimizer:
    """The optimizer for R, at a rate that turns an axis about equally far with every method.

    GCD's rate is that angle. Adam moves all n entries of an axis, each by its rate, and Cayley's
    transform is I − 2S to first order. A step of POGO's VectorAdam has length 1 in all n axes.
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
