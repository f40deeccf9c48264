"""Fit a quantizer to fixed embeddings: assignment, centroids and rotation in turn.

Every iteration passes over the vectors once, assigns them and adds up their clusters; the rotation
is learned from those sums (`turns`) and the codewords follow it. Early iterations use a sixteenth
and a quarter of the sample.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from givens.checks import (
    accept_old_calls,
    check_choice,
    check_number,
    check_seed,
    check_sizes,
    check_table,
    check_whole,
)
from givens.fixed import turns
from givens.fixed.sample import Sample
from givens.kmeans import Clusters, kmeans, pass_over, update_centroids
from givens.quantizer import Metric, Quantizer
from givens.rotation import check_orthogonal, determinant, full_precision, random_rotation
from givens.storage import files
from givens.storage.given import as_vectors

Method = Literal["pq", turns.Learned]
METHODS: tuple[str, ...] = get_args(Method)
Init = Literal["auto", "identity", "eigen", "random"]
KIND = "fit"

# The default sample: 256 vectors for each of 256 codewords.
SAMPLE = 65_536
# The sample grows by this factor, from at least this many vectors per codeword and per axis.
GROWTH = 4
PER_CODEWORD, PER_AXIS = 16, 8
# Passes over each size of the sample, and for each start that is tried.
PASSES = 16
TRIAL = 8
# Turns of n/2 planes after a pass: with exact angles, and as in the paper. n of them visit about
# every plane once; each costs n²K, so this number over n costs little beside the pass at any n.
EXACT_STEPS, RAW_STEPS = 8192, 5
# A stage ends when a pass lowers the distortion by less than this fraction; early ones sooner.
TOLERANCE, EARLY = 2e-4, 5
COARSE_PASSES = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """The state of a fit, as its callback receives it and `resume` continues from it."""

    iteration: int
    """The number of passes so far."""
    iterations: int
    """The maximum number of passes."""
    vectors: int
    """The number of vectors in the last pass."""
    distortion: float
    """Their mean squared error, before the turn that followed."""
    rotation: Float[Tensor, "n n"]
    codebooks: Float[Tensor, "D K w"]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically."""
        parts = dataclasses.asdict(self)
        tensors = {name: parts.pop(name).contiguous() for name in ("rotation", "codebooks")}
        files.save(path, KIND, tensors, parts)

    @classmethod
    def load(cls, path: str | Path) -> "Progress":
        """Load a file that `save` wrote. Raises ValueError if it is damaged."""
        contents = files.load(path, KIND)
        parts: dict[str, Any] = {**contents.metadata, **contents.tensors}
        return cls(**parts)


@accept_old_calls("codewords", "coarse", iterations="max_iter", tolerance="tol")
def fit(
    x: Any,
    subspaces: int = 8,
    *,
    codewords: int = 256,
    coarse: int = 0,
    method: Method = "gcd-greedy",
    metric: Metric = "l2",
    init: Init | Tensor | Quantizer = "auto",
    seed: int = 0,
    max_iter: int | None = None,
    sample: int | None = SAMPLE,
    grow: bool = True,
    tol: float = TOLERANCE,
    rate: float | None = None,
    steps: int | None = None,
    callback: Callable[[Progress], None] | None = None,
    resume: Progress | None = None,
    device: torch.device | str | None = None,
) -> Quantizer:
    """Learn a rotation, codebooks and coarse centroids for vectors (N, n).

    Computes in float32, also under autocast. The same seed gives the same quantizer. With
    init="auto" the distortion on the sample is never above that of method="pq".

    Args:
        x: a tensor, an array or a memory-mapped file of any real type; lists, an Arrow column, a
            column or frame of pandas or polars, or the path of a file. No vector may be longer than
            1e14, and the longest must reach 1e-12; for cosine all but zero vectors must.
        subspaces: D, the bytes of a code; must divide n.
        codewords: K, for each subspace, 2 to 256.
        coarse: number of coarse centroids of an inverted file; the codebooks then encode the
            residuals. 0 for none.
        method: "pq" does not rotate; "opq" learns R by SVD, "cayley" by the Cayley transform;
            "gcd-random", "gcd-greedy", "gcd-steepest" and the ablations "overlapping-random" and
            "overlapping-greedy" by Givens rotations.
        metric: "l2", "ip" or "cosine"; the latter normalises vectors.
        init: the initial R: "identity"; "eigen", which deals the eigenvalues to the subspaces;
            "random"; a rotation; or a quantizer, whose codebooks are used as well. "auto" tries the
            first two.
        seed: for all random draws.
        max_iter: maximum number of passes; stops earlier by `tol`. 48 by default, 16 if the sample
            does not grow.
        sample: number of vectors to learn from, drawn once; 0 (or None) for all, which are then
            read again in every pass.
        grow: whether early passes use only a part of the sample.
        tol: stop when a pass lowers the distortion by less than this fraction; −1 for never.
        rate: the paper's λ, for its raw steps with codewords held fixed; it depends on the square
            of the data's scale. By default angles are exact, and the codewords follow.
        steps: turns of n/2 planes after a pass; by default the lesser of n and 8192/n, or 5 with a
            rate.
        callback: called with a `Progress` after every pass. It may raise to stop the fit.
        resume: a `Progress` to continue from. With the same vectors and options, the result is that
            of an uninterrupted run.
        device: where to compute; the device of x by default.
    """
    x = as_vectors(x)
    _check(x, subspaces, codewords, coarse, sample)
    _check_choices(method, metric, rate, steps, max_iter, tol, seed)
    # Any integer type is accepted, but torch's generators need Python's.
    subspaces, codewords, coarse, seed = map(int, (subspaces, codewords, coarse, seed))
    _check_init(init, subspaces, codewords, x.shape[1])
    _check_resume(resume, (x.shape[1], x.shape[1]), (subspaces, codewords, x.shape[1] // subspaces))
    device = torch.device(device or (x.device if isinstance(x, Tensor) else "cpu"))
    data = Sample(x, device)
    if sample:
        data = data.draw(sample, seed)
    with full_precision(device):
        data.check(metric)
        if metric == "cosine":
            data = data.transform(normalise=True)
        centroids = None
        if coarse:
            centroids = _coarse(data, coarse, metric, seed, init)
            data = data.transform(centroids=centroids)
        run = Run(data, subspaces, codewords, method, seed, rate, steps, max_iter, grow, tol)
        W, C = run.finish(init, callback, resume)
        return Quantizer(W.mT, C, None if centroids is None else centroids @ W.mT, metric)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The alternation, on W = Rᵀ and codebooks C."""

    data: Sample
    subspaces: int
    codewords: int
    method: Method
    seed: int
    rate: float | None
    steps: int | None
    max_iter: int | None
    grow: bool
    tol: float

    def finish(
        self,
        init: Init | Tensor | Quantizer,
        callback: Callable[[Progress], None] | None = None,
        resume: Progress | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Start or resume, and alternate until `tol` or `max_iter`."""
        stages = self.stages(1 if isinstance(init, Quantizer) else 3)
        last = sum(passes for _, passes in stages)
        if resume is None:
            at, W, C = self.begin(init, self.part(stages[0][0]), stages[0][1])
            before = torch.inf
        else:
            at, before = resume.iteration, resume.distortion
            W = resume.rotation.mT.to(self.data.device).contiguous()
            C = resume.codebooks.to(self.data.device)
        end = 0
        for size, passes in stages:
            begin, end = end, end + passes
            if at >= end:
                continue
            sample = self.part(size)
            while at < end:
                error, turned, moved = self.alternate(sample, W, C, at)
                enough = self.tol * (1 if sample is self.data else EARLY)
                pays = at == begin or error < before * (1 - enough)
                at, before, W, C = at + 1 if pays else end, error, turned, moved
                if callback:
                    callback(Progress(at, last, size, error, W.mT.clone(), C.clone()))
        if isinstance(init, str) and init == "auto" and self.method != "pq":
            return min((W, C), self.fit_pq(), key=self.error)
        return W, C

    def part(self, size: int) -> Sample:
        """Draw `size` vectors into memory; the whole sample is returned as it is."""
        return self.data if size == len(self.data) else self.data.draw(size, self.seed)

    def stages(self, most: int) -> list[tuple[int, int]]:
        """(vectors, passes) of each size of the sample; the last is all of it."""
        sizes = [len(self.data)]
        least = max(PER_CODEWORD * self.codewords, PER_AXIS * self.data.dim)
        while self.grow and len(sizes) < most and sizes[0] // GROWTH >= least:
            sizes.insert(0, sizes[0] // GROWTH)
        total = PASSES * len(sizes) if self.max_iter is None else self.max_iter
        share = total // len(sizes)
        rest = total - share * (len(sizes) - 1)
        return [(size, share) for size in sizes[:-1] if share] + [(sizes[-1], rest)]

    def begin(
        self, init: Init | Tensor | Quantizer, sample: Sample, passes: int
    ) -> tuple[int, Tensor, Tensor]:
        """The first pass to do, with W and C."""
        device, n = self.data.device, self.data.dim
        if isinstance(init, Quantizer):
            return 0, init.rotation.mT.to(device).contiguous(), init.codebooks.to(device)
        if isinstance(init, Tensor):
            W = init.detach().mT.to(device, torch.float32).contiguous()
        elif init == "random":
            W = random_rotation(n, self.seed).mT.to(device).contiguous()
        elif init == "eigen":
            W = eigen_allocation(sample, self.subspaces)
        else:
            W = torch.eye(n, dtype=torch.float32, device=device)
        if init != "auto" or self.method == "pq":
            return 0, W, self.codebooks(sample, W)
        tried = []
        trial = min(TRIAL, passes - 1)
        for start in (W, eigen_allocation(sample, self.subspaces)):
            error, W, C = torch.inf, start, self.codebooks(sample, start)
            for at in range(trial):
                error, W, C = self.alternate(sample, W, C, at)
            tried.append((error, W, C))
        _, W, C = min(tried, key=lambda one: one[0])
        return trial, W, C

    def codebooks(self, sample: Sample, W: Tensor) -> Tensor:
        """The initial codebooks, of sampled vectors."""
        X = torch.cat(list(sample.draw(self.codewords, self.seed).chunks())) @ W.mT
        return X.view(self.codewords, self.subspaces, -1).transpose(0, 1).contiguous()

    def alternate(
        self, sample: Sample, W: Tensor, C: Tensor, at: int
    ) -> tuple[float, Tensor, Tensor]:
        """Assign vectors and update C and W; returns the distortion before, W and C."""
        rotates = self.method != "pq"
        # PQ leaves R at its initial value, by default the identity.
        eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
        turned_before = rotates or not torch.equal(W, eye)
        parts = (part @ W.mT if turned_before else part for part in sample.chunks())
        clusters = pass_over(parts, C, whole=rotates)
        turned = self.turn(clusters, W, at, len(sample)) if rotates else W
        if rotates:
            # Exact turns assume that the codewords follow; raw steps leave them in place.
            follow = W @ turned.mT if self.exact else None
            clusters = _cut_sums(clusters, follow)
        return float(clusters.error), turned, update_centroids(C, clusters, self.seed + at)

    def turn(self, clusters: Clusters, W: Tensor, at: int, N: int) -> Tensor:
        """W after the turns of one iteration."""
        W, Z = W.clone(), turns.roots(clusters)
        if self.rate is None:
            Z = turns.scale_to_one(Z)
        if self.exact:
            steps = self.steps or min(len(W), max(EXACT_STEPS // len(W), 8))
            turns.turn_best_(W, Z, self.method, steps=steps, seed=self.seed, step=at * steps)
            return W
        T, steps = turns.cross_products(Z) / N, self.steps or RAW_STEPS
        if self.method == "opq":
            turns.turn_procrustes_(W, T)
        elif self.method == "cayley":
            turns.turn_cayley_(W, T, rate=self.rate, steps=steps)
        elif self.rate is not None:
            how = {"steps": steps, "seed": self.seed, "step": at * steps}
            turns.turn_raw_(W, T, self.method, rate=self.rate, **how)
        return W

    @property
    def exact(self) -> bool:
        """Whether planes turn by their best angle, and codewords follow."""
        return self.rate is None and self.method.startswith(("gcd-", "overlapping-"))

    def fit_pq(self) -> tuple[Tensor, Tensor]:
        """The result of method="pq"."""
        return dataclasses.replace(self, method="pq", rate=None, steps=None).finish("identity")

    def error(self, found: tuple[Tensor, Tensor]) -> float:
        """The distortion of all vectors for W and C."""
        W, C = found
        return float(pass_over((part @ W.mT for part in self.data.chunks()), C).error)


def eigen_allocation(sample: Sample, subspaces: int) -> Float[Tensor, "n n"]:
    """W with the data's principal axes, dealt to balance the products of the subspaces' variances.

    The largest remaining eigenvalue goes to the subspace with the smallest product so far.
    """
    n, count = sample.dim, len(sample)
    first = torch.zeros(n, dtype=torch.float64, device=sample.device)
    second = torch.zeros(n, n, dtype=torch.float64, device=sample.device)
    for part in sample.chunks():
        first += part.sum(0, dtype=torch.float64)
        second += part.mT @ part
    mean = first / count
    values, vectors = torch.linalg.eigh(second / count - mean[:, None] * mean)
    logs = values.clamp_min(float(values[-1].clamp_min(1e-300)) * 1e-12).log().tolist()
    rows: list[list[int]] = [[] for _ in range(subspaces)]
    products = [0.0] * subspaces
    for axis in range(n - 1, -1, -1):
        free = [d for d in range(subspaces) if len(rows[d]) < n // subspaces]
        d = min(free, key=lambda d: products[d])
        rows[d].append(axis)
        # Above 0, so that every axis increases its subspace's product.
        products[d] += logs[axis] - logs[0]
    W: Tensor = vectors.mT[[axis for row in rows for axis in row]]
    W[0] *= determinant(W)
    return W.to(torch.float32).contiguous()


def _cut_sums(clusters: Clusters, follow: Tensor | None) -> Clusters:
    """The sums of sub-vectors, from those of whole vectors, rotated by Q if given."""
    D, _, n = clusters.sums.shape
    eye = torch.eye(n, dtype=torch.float64, device=clusters.sums.device)
    Q = eye if follow is None else follow.double()
    sums = clusters.sums @ Q.view(n, D, n // D).transpose(0, 1)
    return dataclasses.replace(clusters, sums=sums)


def _coarse(
    data: Sample, coarse: int, metric: Metric, seed: int, init: Init | Tensor | Quantizer
) -> Float[Tensor, "L n"]:
    """Coarse centroids in the space of x.

    For inner products all have the same length, so that it does not affect the comparison: the
    length that minimises the residuals.
    """
    start: Any = "sampled"
    if isinstance(init, Quantizer) and init.coarse is not None and len(init.coarse) == coarse:
        start = (init.coarse @ init.rotation.mT)[None].to(data.device)
    x = data.draw(max(SAMPLE, 64 * coarse), seed).x
    if metric != "l2":
        x = torch.nn.functional.normalize(x)
    C = kmeans(x[:, None], coarse, iterations=COARSE_PASSES, seed=seed, start=start)[0]
    if metric == "l2":
        return C
    C = torch.nn.functional.normalize(C)
    total = sum(float((part @ C.mT).amax(1).sum()) for part in data.chunks())
    return C * max(total / len(data), 1e-30)


def _check(x: Any, subspaces: int, codewords: int, coarse: int, sample: int | None) -> None:
    check_table("x", x)
    check_sizes(int(x.shape[1]), subspaces, codewords, coarse)
    count = int(x.shape[0])
    if sample is not None:
        count = min(count, check_whole("sample", sample, 0) or count)
    for name, centroids in (("codewords", codewords), ("coarse", coarse)):
        if centroids > count:
            raise ValueError(
                f"x must have at least as many vectors as {name}, "
                f"but got {count} for {name}={centroids}"
            )


def _check_choices(
    method: str,
    metric: str,
    rate: float | None,
    steps: int | None,
    max_iter: int | None,
    tol: float,
    seed: int,
) -> None:
    check_choice("method", method, METHODS)
    check_choice("metric", metric, get_args(Metric))
    if rate is not None:
        check_number("rate", rate, 0, above=True)
    for name, value in (("rate", rate), ("steps", steps)):
        if value is not None and method in ("pq", "opq"):
            raise ValueError(
                f"{name} goes with cayley, gcd and overlapping methods, "
                f"but got {name}={value} for method={method!r}"
            )
    for name, number in (("steps", steps), ("max_iter", max_iter)):
        if number is not None:
            check_whole(name, number, 1)
    check_number("tol", tol, -1, 1)
    check_seed(seed)


def _check_init(init: Any, subspaces: int, codewords: int, n: int) -> None:
    if isinstance(init, Quantizer):
        shape, wanted = tuple(init.codebooks.shape), (subspaces, codewords, n // subspaces)
        if shape != wanted:
            raise ValueError(f"init must have codebooks of shape {wanted}, but got {shape}")
    elif isinstance(init, Tensor):
        if init.shape != (n, n) or not init.is_floating_point():
            raise ValueError(
                f"init must be floats of shape ({n}, {n}), "
                f"but got {init.dtype} of shape {tuple(init.shape)}"
            )
        check_orthogonal("init", init)
        if determinant(init) < 0:
            raise ValueError(
                "init must have determinant +1, but got −1; flip the sign of one column, "
                "or call givens.project(init) first"
            )
    else:
        check_choice("init", init, get_args(Init), ", a rotation or a Quantizer")


def _check_resume(resume: Any, *wanted: tuple[int, ...]) -> None:
    if resume is None:
        return
    if not isinstance(resume, Progress):
        raise TypeError(f"resume must be a Progress, but got {type(resume).__name__}")
    shapes = tuple(resume.rotation.shape), tuple(resume.codebooks.shape)
    if shapes != wanted:
        raise ValueError(
            f"resume must have rotation and codebooks of shapes {wanted}, but got {shapes}"
        )
