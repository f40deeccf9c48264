"""The parts of a training run and what is done with them: a step, a look, the index's start."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim import Adam, Optimizer, SparseAdam

from givens import distributed
from givens.baselines import optimizer_for
from givens.fixed.fit import fit
from givens.kernels.gpu.replay import Replay
from givens.layer.layer import IndexLayer
from givens.quantizer import Quantizer
from givens.retrieval import evaluate
from givens.retrieval.batches import Asked, Examples
from givens.retrieval.config import LARGE, Config
from givens.retrieval.data import Log
from givens.retrieval.losses import hinge_loss, softmax_loss
from givens.retrieval.towers import Towers
from givens.rotation import orthogonality_error, project, random_rotation

K = 100
# The rates rise over so many steps before they fall.
RAMP = 100

Row = dict[str, Any]


@dataclass
class Best:
    """The step that did best on the validation users, and what the parts were then."""

    recall: float
    step: int
    parts: dict[str, Tensor]


class Run:
    """The parts of a run and where it stands."""

    def __init__(
        self, log: Log, config: Config, device: torch.device | str = "cpu", *, blank: bool = False
    ) -> None:
        """Make the parts; the towers `blank` where they are to be put in."""
        config.check(log)
        self.log, self.config, self.device = log, config, torch.device(device)
        self.examples = Examples(
            log,
            history=config.history,
            ahead=config.ahead,
            seed=config.seed,
            stream=config.stream,
            device=self.device,
        )
        self.valid = self.examples.held(log.valid)
        with torch.device("meta") if blank else contextlib.nullcontext():
            self.towers = Towers(
                log.catalogue,
                config.dim,
                history=config.history,
                pool=config.pool,
                vocabulary=log.vocabulary,
                # Where a step sees few of the items, it moves none but them.
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
        self.start: Quantizer | None = None
        # Where all items are candidates: a rank's part of them. One alone does without the list.
        self.everything = (
            None if distributed.alone() else torch.arange(log.catalogue, device=self.device)
        )
        # Losses that were not looked at yet: looking waits for the device.
        self.pending: list[Tensor] = []
        self.turned_from = self.layer.rotation.matrix.detach().clone()
        # Records a step, where it can be.
        self.replay: Replay | None = None
        self.optimizers = self.learners(joint=False)

    @property
    def joint(self) -> bool:
        """Whether the index is in."""
        return self.layer.warm

    @property
    def candidates(self) -> int:
        """How many items a step compares."""
        c = self.config
        return self.log.catalogue if c.negatives is None else c.batch + c.negatives

    def parts(self) -> dict[str, Tensor]:
        """All that is learned, by name."""
        towers = {f"towers.{name}": part for name, part in self.towers.state_dict().items()}
        layer = {f"layer.{name}": part for name, part in self.layer.state_dict().items()}
        return {**towers, **layer}

    def copied(self) -> dict[str, Tensor]:
        """The same, to be kept."""
        return {name: part.detach().clone() for name, part in self.parts().items()}

    def put(self, parts: dict[str, Tensor]) -> None:
        """Go back to parts that were kept."""
        for name, module in (("towers.", self.towers), ("layer.", self.layer)):
            mine = {k.removeprefix(name): v for k, v in parts.items() if k.startswith(name)}
            if mine:
                module.load_state_dict(mine)

    def learners(self, *, joint: bool) -> list[Optimizer]:
        """Adam for towers and codebooks and, with the index, what learns R."""
        c, table = self.config, self.towers.items
        table.weight.requires_grad_(not (joint and c.fixed_items))
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
            optimizers.append(rotation_learner(self.layer, c))
        recorded = gpu and not table.sparse and capturable(c, joint=joint)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["initial_lr"] = group["lr"]
            if recorded:
                # A recorded step reads it where it is.
                group["lr"] = torch.tensor(group["lr"], device=self.device)
        self.replay = Replay(self.device) if recorded else None
        return optimizers

    def adopt(self, towers: dict[str, Tensor]) -> None:
        """Skip the warm-up: go on from towers that had it already."""
        self.put(towers)
        self.step = self.config.warmup
        self.best = Best(-1.0, self.step, self.copied())

    def begin_joint(self) -> None:
        """Collect embeddings of items from the best towers, and start the index from them.

        Unless there is a `start` already, which another run from the same towers has found. Ranks
        embed a part of the items each, and the first starts the index for all.
        """
        c = self.config
        self.put(self.best.parts)
        if c.method != "post-hoc":
            if self.start is None:
                start_index(self.layer, self.sample(), c)
                self.start = self.layer.quantizer
            else:
                self.layer.start_from(self.start)
            self.best = Best(-1.0, self.step, {})
            self.turned_from = self.layer.rotation.matrix.detach().clone()
        self.optimizers = self.learners(joint=self.joint)

    @torch.no_grad()
    def sample(self) -> Float[Tensor, "N n"]:
        """Embeddings of items, drawn alike."""
        drawn = np.random.default_rng(self.config.seed).permutation(self.log.catalogue)
        ids = torch.from_numpy(np.sort(drawn[: self.config.sample])).to(self.device)
        return distributed.gather_rows(self.towers.item(ids[distributed.rows(len(ids))]), len(ids))

    def advance(self) -> None:
        """One step: every rank draws the whole batch, and works on its rows of it."""
        c, t = self.config, self.step
        self.set_rates()
        asked, target = self.examples.draw(t, c.batch, progress=t / c.total)
        asked = self.examples.kept(asked, c.dropout)
        mine = asked[distributed.rows(c.batch)]
        drawn = None if c.negatives is None else self.examples.uniform(c.negatives)
        batch = (mine.history, mine.words, target, drawn)
        losses = self.replay(self.update, *batch) if self.replay else self.update(*batch)
        self.pending.append(losses)
        self.step += 1

    def update(
        self,
        history: Int[Tensor, "rows h"],
        words: Int[Tensor, "rows w"] | None,
        target: Int[Tensor, " b"],
        drawn: Int[Tensor, " m"] | None,
    ) -> Float[Tensor, " 2"]:
        """Learn from a rank's rows of a batch: the batch's retrieval loss and its distortion."""
        retrieval, distortion = self.losses(self.towers.user(Asked(history, words)), target, drawn)
        losses = distributed.sum_ranks(torch.stack([retrieval.detach(), distortion.detach()]))
        if self.device.type == "cpu":
            check_finite(self.step, [losses])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (retrieval + self.config.weight * distortion).backward()  # type: ignore[no-untyped-call]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        distributed.add_gradients(part for group in groups for part in group["params"])
        for optimizer in self.optimizers:
            optimizer.step()
        return losses

    def losses(
        self,
        users: Float[Tensor, "rows n"],
        target: Int[Tensor, " b"],
        drawn: Int[Tensor, " m"] | None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The retrieval loss over candidates that the batch shares, and their distortion.

        Among ranks each has its rows of the batch, and its share of both. The candidates are of the
        whole batch: a rank embeds a part of them, and all gather them.
        """
        c, mine = self.config, distributed.rows(len(target))
        ids, column, log_q, same = self.everything, target[mine], None, None
        if drawn is not None:
            ids = torch.cat([target, drawn])
            column = torch.arange(len(target), device=self.device)[mine]
            same = target[mine, None] == ids
            # How often an item is expected among the candidates.
            often = c.batch * self.examples.popularity[ids] + len(drawn) / self.log.catalogue
            log_q = often.log()
        items = self.towers.item(None if ids is None else ids[distributed.rows(self.candidates)])
        distortion = users.new_zeros(())
        if self.joint:
            items, _, distortion = self.layer(items)
            distortion = distributed.share(distortion, len(items), self.candidates)
        items = distributed.gather_rows(items, self.candidates)
        if c.loss == "hinge":
            return hinge_loss(users, items, column, margin=c.margin, same=same), distortion
        loss = softmax_loss(users, items, column, temperature=c.temperature, log_q=log_q, same=same)
        return loss, distortion

    def set_rates(self) -> None:
        """Up in a line, down to 0 by a cosine, in each phase."""
        c = self.config
        first, length = (0, c.warmup) if self.step < c.warmup else (c.warmup, c.steps)
        at = self.step - first
        factor = min(1.0, (at + 1) / RAMP) * (1 + math.cos(math.pi * at / length)) / 2
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = factor * group["initial_lr"]
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    @torch.no_grad()
    def look(self) -> Row:
        """Measure on the validation users, and keep the parts if they did best.

        The first rank measures, and decides for all.
        """
        if self.joint:
            self.meet()
        row = distributed.from_first(self.seen)
        self.pending.clear()
        self.turned_from = self.layer.rotation.matrix.detach().clone()
        if row["recall"] > self.best.recall:
            self.best = Best(row["recall"], self.step, self.copied())
        self.rows.append(row)
        return row

    def check_ranks(self) -> None:
        """Refuse ranks that would not train the same model on the same draws."""
        if distributed.alone():
            return
        _, drawn = self.examples.draw(self.step, self.config.batch)
        stands: list[Tensor | str] = [
            self.log.fingerprint,
            repr(self.config),
            repr(self.step),
            drawn,
        ]
        distributed.check_same(
            "log, options, checkpoint and draws",
            stands,
            "give all the same options and a folder that they share, on machines of one kind",
        )

    def meet(self) -> None:
        """Count the codewords' use on all ranks, and make sure that they have the same index."""
        mine, usage = distributed.rows(self.candidates), self.layer.usage
        # A moving average of means: that over all is the mean of those over parts.
        usage.copy_(
            distributed.sum_ranks(distributed.share(usage, mine.stop - mine.start, self.candidates))
        )
        distributed.check_same(
            "R and codebooks",
            [self.layer.rotation.matrix, self.layer.codebooks],
            "train on machines of one kind, or go on from the last checkpoint",
        )

    def seen(self) -> Row:
        """What a look sees."""
        row: Row = {"step": self.step, "phase": "joint" if self.joint else "towers"}
        if self.pending:
            check_finite(self.step - len(self.pending), self.pending)
            retrieval, distortion = torch.stack(self.pending).double().mean(0).tolist()
            row["loss"] = retrieval + self.config.weight * distortion
            row["retrieval"] = retrieval
        users, items = self.towers.user(self.valid.asked), self.towers.item()
        row["recall_full"] = self.recall(users, items)
        row["recall"] = row["recall_full"]
        if self.joint:
            q = self.quantizer()
            row["recall"] = self.recall(users, q.decode(q.encode(items)))
            row["distortion"] = q.distortion(items)
            row["orthogonality"] = orthogonality_error(self.layer.rotation.matrix)
            row["perplexity"] = float(self.layer.perplexity.mean())
            row["dead"] = int(self.layer.dead.sum())
            R = self.layer.rotation.matrix
            # Root mean square over the axes, of all steps since the last look.
            row["angle"] = float((R - self.turned_from).norm()) / math.sqrt(len(R))
        return row

    def recall(self, users: Tensor, items: Tensor) -> float:
        """recall@100 of the validation users by brute force.

        In a small catalogue by fewer, lest whoever is given all items find everything.
        """
        k = min(K, max(1, self.log.catalogue // 5))
        found = evaluate.brute_force(users, items, self.valid, k).items
        return evaluate.metrics(found, self.valid, self.log.catalogue, (k,))[f"recall@{k}"]

    def quantizer(self) -> Quantizer:
        """The index as it is now; a penalty leaves R only nearly a rotation."""
        if self.config.method != "penalty":
            return self.layer.quantizer
        R = project(self.layer.rotation.matrix.detach())
        coarse = None if self.layer.coarse is None else self.layer.coarse.detach()
        return Quantizer(R, self.layer.codebooks.detach(), coarse, "cosine")

    @torch.no_grad()
    def indexed(self) -> Quantizer:
        """The index of the best step, or what Faiss makes of it afterwards."""
        self.put(self.best.parts)
        if self.joint:
            return self.quantizer()
        from givens.export.faiss import fit_opq

        c, items = self.config, self.towers.item().cpu()
        sizes = (c.subspaces, c.codewords, c.coarse)
        return distributed.from_first(lambda: fit_opq(items, *sizes, metric="cosine")).to(
            self.device
        )


def capturable(config: Config, *, joint: bool) -> bool:
    """Whether a step waits for nothing, so that it can be recorded."""
    waits = config.method == "expm" or (config.method == "gcd-steepest" and config.exact)
    return distributed.alone() and not (joint and waits)


def rotation_learner(layer: IndexLayer, config: Config) -> Optimizer:
    """What learns R, at a rate that turns an axis about as far in a step whatever the method.

    GCD's rate is that angle. Adam moves all n of an axis's entries, each by its rate, and Cayley's
    transform is I − 2S at first.
    """
    n = layer.rotation.dim
    spread = {"cayley": 2 * math.sqrt(n), "expm": math.sqrt(n), "penalty": math.sqrt(n)}
    options: dict[str, Any] = {}
    if config.method.startswith("gcd"):
        options = {"seed": config.seed, "exact": config.exact}
    elif config.method != "frozen":
        options = {"capturable": layer.codebooks.is_cuda}
    rate = config.angle / spread.get(config.method, 1.0)
    return optimizer_for(layer.rotation, config.method, rate, **options)  # type: ignore[arg-type]


def start_index(layer: IndexLayer, sample: Float[Tensor, "N n"], config: Config) -> None:
    """R by OPQ, the identity or at random, and codebooks for it."""
    if config.start == "opq":
        layer.warm_start(sample, config.iterations, seed=config.seed)
        return
    if not distributed.is_first():
        layer.start_from(None)
        return
    R = torch.eye(config.dim, dtype=sample.dtype, device=sample.device)
    if config.start == "random":
        R = random_rotation(config.dim, config.seed).to(sample.device)
    how: dict[str, Any] = {"method": "pq", "metric": "cosine", "seed": config.seed}
    how |= {"codewords": config.codewords, "coarse": config.coarse}
    q = fit(sample @ R, config.subspaces, max_iter=config.iterations, sample=0, **how)
    layer.start_from(Quantizer(R, q.codebooks, q.coarse, "cosine"))


def check_finite(step: int, losses: list[Float[Tensor, " 2"]]) -> None:
    """Stop at the first loss that is not finite; `step` is that of the first of them."""
    table = torch.stack(losses).cpu()
    bad = (~table.isfinite().all(1)).nonzero()
    if len(bad):
        at = int(bad[0])
        retrieval, distortion = table[at].tolist()
        raise ValueError(
            f"the loss is not finite at step {step + at}: retrieval {retrieval:g}, distortion "
            f"{distortion:g}; a lower lr or a higher temperature may help"
        )
