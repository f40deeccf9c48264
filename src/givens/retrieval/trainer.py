"""The steps of both training phases, and the start of the index between them."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from givens import distributed
from givens.fixed.fit import fit
from givens.kernels.gpu.replay import Replay
from givens.layer.layer import IndexLayer
from givens.quantizer import Codes, Quantizer
from givens.retrieval.batches import Examples, Inputs
from givens.retrieval.config import Config
from givens.retrieval.losses import hinge_loss, softmax_loss
from givens.retrieval.state import Best, DivergedError, State
from givens.rotation import random_rotation

# Items of a split table that a post-hoc index is fitted to; Faiss samples no more.
FITTED = 1 << 16

# Steps of the linear warm-up of the rates.
RAMP = 100


class Trainer:
    """Trains a state step by step; all ranks take the same steps."""

    def __init__(self, state: State, examples: Examples) -> None:
        self.state, self.examples = state, examples
        # The ids of all items, if all are candidates; without ranks the list is not needed.
        self.everything: Tensor | None = None
        if state.config.negatives is None and not distributed.is_alone():
            self.everything = torch.arange(state.log.catalogue, device=state.device)
        # Losses since the last evaluation; reading them synchronises with the device.
        self.pending: list[Tensor] = []
        self.replay = self._make_replay()

    @property
    def candidates(self) -> int:
        """The number of candidates in a step."""
        c = self.state.config
        return self.state.log.catalogue if c.negatives is None else c.batch + c.negatives

    def advance(self) -> None:
        """Take one step; every rank works on its rows of the batch."""
        state, c = self.state, self.state.config
        self.set_rates()
        mine, target = self.examples.draw(
            state.step, c.batch, progress=state.step / c.total, dropout=c.dropout
        )
        drawn = None if c.negatives is None else self.examples.draw_items(c.negatives)
        batch = (mine.history, mine.words, target, drawn)
        losses = self.replay(self.update, *batch) if self.replay else self.update(*batch)
        self.pending.append(losses)
        state.step += 1

    def update(
        self,
        history: Int[Tensor, "rows h"],
        words: Int[Tensor, "rows w"] | None,
        target: Int[Tensor, " b"],
        drawn: Int[Tensor, " m"] | None,
    ) -> Float[Tensor, " 2"]:
        """Train on a rank's rows of a batch; returns retrieval loss and distortion of the batch."""
        state = self.state
        users = state.towers.user(Inputs(history, words))
        retrieval, distortion = self.compute_losses(users, target, drawn)
        losses = distributed.sum_ranks(torch.stack([retrieval.detach(), distortion.detach()]))
        if state.device.type == "cpu":
            check_finite(state.step, [losses])
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        (retrieval + state.config.weight * distortion).backward()  # type: ignore[no-untyped-call]
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        distributed.add_gradients(part for group in groups for part in group["params"])
        for optimizer in state.optimizers:
            optimizer.step()
        return losses

    def compute_losses(
        self,
        users: Float[Tensor, "rows n"],
        target: Int[Tensor, " b"],
        drawn: Int[Tensor, " m"] | None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """This rank's share of the retrieval loss and of the distortion of the candidates.

        The whole batch shares its candidates: each rank embeds a part of them, and all ranks gather
        them.
        """
        state, c, mine = self.state, self.state.config, distributed.rows(len(target))
        ids, column, log_q, same = self.everything, target[mine], None, None
        if drawn is not None:
            ids = torch.cat([target, drawn])
            column = torch.arange(len(target), device=state.device)[mine]
            same = target[mine, None] == ids
            # The expected count of each item among the candidates.
            often = c.batch * self.examples.popularity[ids] + len(drawn) / state.log.catalogue
            log_q = often.log()
        part = None if ids is None else ids[distributed.rows(self.candidates)]
        distortion = users.new_zeros(())
        if state.codes is not None:
            items = decode_fixed(state.layer, state.codes, part)
        else:
            items = state.towers.item(part)
            if state.joint:
                items, _, distortion = state.layer(items)
                distortion = distributed.share(distortion, len(items), self.candidates)
        items = distributed.gather_rows(items, self.candidates)
        if c.loss == "hinge":
            return hinge_loss(users, items, column, margin=c.margin, same=same), distortion
        loss = softmax_loss(users, items, column, temperature=c.temperature, log_q=log_q, same=same)
        return loss, distortion

    def set_rates(self) -> None:
        """Set the learning rates of the next step."""
        factor = self.find_factor()
        for optimizer in self.state.optimizers:
            for group in optimizer.param_groups:
                rate = factor * group["initial_lr"]
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def find_factor(self) -> float:
        """The factor of the rates: in each phase a linear warm-up, then a cosine decay."""
        state, c = self.state, self.state.config
        first, length = (0, c.warmup) if state.step < c.warmup else (c.warmup, c.steps)
        at = state.step - first
        return min(1.0, (at + 1) / RAMP) * (1 + math.cos(math.pi * at / length)) / 2

    def take_losses(self) -> list[Float[Tensor, " 2"]]:
        """The retrieval losses and distortions of all steps since the last call.

        In the joint phase, ranks check that they have the same index, and average its usage.
        """
        if self.state.joint:
            self._synchronise()
        losses, self.pending = self.pending, []
        return losses

    def begin_joint(self) -> None:
        """Go back to the best towers, and start the index from a sample of their items.

        If the state has a `start` already, from another run with the same towers, it is used. Each
        rank embeds a part of the sample, and the first rank fits the index for all.
        """
        state, c = self.state, self.state.config
        state.load_best()
        if not c.after:
            if state.start is None:
                start_index(state.layer, self.collect(c.sample), c)
                state.start = state.layer.quantizer
            else:
                state.layer.start_from(state.start)
            if c.method == "jpq":
                state.codes = self.encode_items()
            state.best = Best(-1.0, state.step, {})
            state.mark_rotation()
        state.reset_optimizers(joint=state.joint)
        self.replay = self._make_replay()

    @torch.no_grad()
    def collect(self, count: int) -> Float[Tensor, "N n"]:
        """The embeddings of a uniform sample of items."""
        state, m = self.state, self.state.log.catalogue
        generator = np.random.default_rng(state.config.seed)
        # A permutation of a large catalogue is slow.
        few = bool(state.tables) and count < m
        drawn = generator.choice(m, count, replace=False) if few else generator.permutation(m)
        ids = torch.from_numpy(np.sort(drawn[:count])).to(state.device)
        mine = ids[distributed.rows(len(ids))]
        return distributed.gather_rows(state.towers.item(mine), len(ids))

    @torch.no_grad()
    def encode_items(self) -> Codes:
        """The codes of all items, on every rank."""
        q, m = self.state.layer.quantizer, self.state.log.catalogue
        blocks = [q.encode(items) for _, items in self.state.towers.part().blocks()]
        fine = torch.cat([codes.fine for codes in blocks])
        lists = [codes.coarse for codes in blocks if codes.coarse is not None]
        coarse = distributed.gather_rows(torch.cat(lists), m) if lists else None
        return Codes(distributed.gather_rows(fine, m), coarse)

    @torch.no_grad()
    def finish(self) -> Quantizer:
        """Go back to the best step; returns its index, or one that is fitted post-hoc."""
        state, c = self.state, self.state.config
        state.load_best()
        if state.joint:
            return state.quantizer
        items = self.collect(FITTED) if state.tables else state.towers.item()
        return distributed.from_first(lambda: fit_after(items, c)).to(state.device)

    def check_ranks(self) -> None:
        """Raise if ranks would not train the same model on the same draws."""
        if distributed.is_alone():
            return
        state = self.state
        _, drawn = self.examples.draw(state.step, state.config.batch)
        parts: list[Tensor | str] = [
            state.log.fingerprint,
            repr(state.config),
            repr(state.step),
            drawn,
        ]
        distributed.check_same(
            "log, options, checkpoint and draws",
            parts,
            "give all the same options and a folder that they share, on machines of one kind",
        )

    @torch.no_grad()
    def _synchronise(self) -> None:
        """Average the usage of codewords over ranks, and check that their indexes are equal."""
        layer, mine = self.state.layer, distributed.rows(self.candidates)
        # Usage is a moving average of means, so the one over all is the mean over ranks.
        layer.usage.copy_(
            distributed.sum_ranks(
                distributed.share(layer.usage, mine.stop - mine.start, self.candidates)
            )
        )
        distributed.check_same(
            "R and codebooks",
            [layer.rotation.matrix, layer.codebooks],
            "train on machines of one kind, or continue from the last checkpoint",
        )

    def _make_replay(self) -> Replay | None:
        """The capture of a step as a CUDA graph, or None if it is not possible."""
        return Replay(self.state.device) if self.state.capturable else None


def start_index(layer: IndexLayer, sample: Float[Tensor, "N n"], config: Config) -> None:
    """Start the index: R by OPQ, the identity or at random, with codebooks fitted to it."""
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


def fit_after(items: Float[Tensor, "N n"], config: Config) -> Quantizer:
    """The post-hoc index of trained items, by Faiss's OPQ or `givens.fit`."""
    c = config
    if c.method == "post-hoc-fit":
        how: dict[str, Any] = {"codewords": c.codewords, "coarse": c.coarse, "seed": c.seed}
        return fit(items, c.subspaces, metric="cosine", **how)
    from givens.export.faiss import fit_opq

    return fit_opq(items.cpu(), c.subspaces, c.codewords, c.coarse, metric="cosine")


def decode_fixed(
    layer: IndexLayer, codes: Codes, ids: Int[Tensor, " m"] | None
) -> Float[Tensor, "m n"]:
    """Items decoded from fixed codes, with gradients to codebooks and centroids."""
    D, K, w = layer.codebooks.shape
    fine = codes.fine if ids is None else codes.fine[ids]
    places = fine.long() + K * torch.arange(D, device=fine.device)
    # Not by indexing: its gradient is summed by threads in no fixed order.
    Y = functional.embedding(places, layer.codebooks.view(D * K, w)).flatten(1)
    if layer.coarse is not None and codes.coarse is not None:
        Y = Y + functional.embedding(
            codes.coarse if ids is None else codes.coarse[ids], layer.coarse
        )
    decoded: Tensor = Y @ layer.rotation.matrix.mT.detach()
    return decoded


def check_finite(step: int, losses: list[Float[Tensor, " 2"]]) -> None:
    """Raise if a loss is not finite; `step` is the number of the first one."""
    table = torch.stack(losses).cpu()
    bad = (~table.isfinite().all(1)).nonzero()
    if len(bad):
        at = int(bad[0])
        retrieval, distortion = table[at].tolist()
        raise DivergedError(
            f"the loss is not finite at step {step + at}: retrieval {retrieval:g}, distortion "
            f"{distortion:g}; a lower lr or a higher temperature may help"
        )
