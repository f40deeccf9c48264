"""The options of a training run. Options and log determine the outcome."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from givens import distributed
from givens.checks import check_choice, check_number, check_sizes, check_whole
from givens.retrieval.data import Log
from givens.retrieval.towers import Pool

Method = Literal[
    "frozen",
    "cayley",
    "expm",
    "pogo",
    "penalty",
    "gcd",
    "gcd-random",
    "gcd-greedy",
    "gcd-steepest",
    "jpq",
    "post-hoc",
    "post-hoc-fit",
]
LABELS: dict[str, str] = {
    "frozen": "frozen (the baseline)",
    "cayley": "Cayley",
    "expm": "matrix exponential",
    "pogo": "POGO",
    "penalty": "penalty",
    "gcd": "GCD",
    "gcd-random": "GCD-R",
    "gcd-greedy": "GCD-G",
    "gcd-steepest": "GCD-S",
    "jpq": "JPQ (codes fixed)",
    "post-hoc": "Faiss OPQ afterwards",
    "post-hoc-fit": "givens.fit afterwards",
}
"""The names of the methods in tables and pictures."""
Start = Literal["opq", "identity", "random"]
Loss = Literal["softmax", "hinge"]
Size = Literal["small", "medium", "large"]

# With more items than this, the softmax is over SHARED of them, drawn at random.
MOST_ITEMS, SHARED = 10_000, 4096
# More items than this need larger batches, to be seen often enough, and higher rates, since an item
# moves only in steps that see it. Their tables are split over ranks.
LARGE = 50_000
# The options that the sizes of `config_for` and `givens train` set.
SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "dim": 64,
        "subspaces": 8,
        "history": 50,
        "warmup": 600,
        "steps": 600,
        "negatives": 512,
        "lr": 1e-2,
        "joint_lr": 1e-2,
        "temperature": 0.1,
        "weight": 1.0,
    },
    "medium": {
        "dim": 128,
        "subspaces": 16,
        "history": 100,
        "warmup": 1500,
        "steps": 1500,
        "negatives": 1024,
        "lr": 1e-2,
        "joint_lr": 1e-2,
        "temperature": 0.1,
        "weight": 1.0,
    },
    "large": {},
}


@dataclass(frozen=True)
class Help:
    """The help text of an option of `givens train`, and its panel."""

    text: str
    panel: str


INDEX = partial(Help, panel="Index")
TOWERS = partial(Help, panel="Towers")
LEARNING = partial(Help, panel="Learning")


@dataclass(frozen=True)
class Config:
    """The options of a run. Each is an option of `givens train`, with this text."""

    method: Annotated[
        Method,
        INDEX(
            "How R is learned: gcd (as in givens.GCD), the paper's gcd-random, gcd-greedy and "
            "gcd-steepest, cayley, expm, pogo, penalty; frozen: R stays as it starts; jpq: R and "
            "codes stay as they start; post-hoc, post-hoc-fit: no index in training, Faiss OPQ or "
            "givens.fit afterwards."
        ),
    ] = "gcd"
    start: Annotated[Start, INDEX("The start of R: opq, identity or random.")] = "opq"
    exact: Annotated[bool, INDEX("Exact maximum-weight pairings for gcd-steepest.")] = True
    dim: Annotated[int, INDEX("Dimension of the embeddings.")] = 512
    subspaces: Annotated[
        int, INDEX("Subspaces of the codes: bytes of an item at 256 codewords.")
    ] = 32
    codewords: Annotated[int, INDEX("Codewords of each subspace, 2 to 256.")] = 256
    coarse: Annotated[int, INDEX("Lists of an inverted file; 0 for none.")] = 0
    sample: Annotated[int, INDEX("Item embeddings for the warm start of the index.")] = 8192
    iterations: Annotated[int, INDEX("The most iterations of OPQ in the warm start.")] = 200
    pool: Annotated[Pool, TOWERS("Pooling of the history: mean or attention.")] = "attention"
    history: Annotated[int, TOWERS("Latest items that the user tower sees; 0 for words only.")] = (
        100
    )
    ahead: Annotated[int, TOWERS("The target is one of this many next items.")] = 20
    dropout: Annotated[float, TOWERS("Share of the history that is hidden in training.")] = 0.3
    loss: Annotated[Loss, LEARNING("Retrieval loss: softmax or hinge.")] = "softmax"
    temperature: Annotated[float, LEARNING("Temperature of the softmax.")] = 0.07
    margin: Annotated[float, LEARNING("Margin of the hinge loss.")] = 0.1
    negatives: Annotated[
        int | None,
        LEARNING("Uniformly drawn negatives that a batch shares; if left out, all items."),
    ] = None
    batch: Annotated[int, LEARNING("Examples in a step, on all ranks together.")] = 1024
    lr: Annotated[
        float, LEARNING("Adam's rate for the towers; each phase has a cosine decay to 0.")
    ] = 1e-3
    joint_lr: Annotated[
        float, LEARNING("Adam's rate for towers and codebooks in the joint phase.")
    ] = 1e-3
    angle: Annotated[
        float, LEARNING("Typical angle by which a step turns an axis, in radians; decays likewise.")
    ] = 1e-2
    # The softmax divides by its temperature, so its gradients are large; at a weight of 1, R would
    # follow only them.
    weight: Annotated[float, LEARNING("Weight of the distortion in the loss.")] = 10.0
    warmup: Annotated[int, LEARNING("Warm-up steps, without the index.")] = 1500
    steps: Annotated[int, LEARNING("Joint steps, with the index.")] = 1500
    fixed_items: Annotated[bool, LEARNING("Keep the item tower fixed in the joint phase.")] = False
    stream: Annotated[bool, LEARNING("Train in order of time.")] = False
    every: Annotated[int, LEARNING("Steps between evaluations on the validation users.")] = 100
    seed: Annotated[int, LEARNING("Seed of all random draws.")] = 0

    def __post_init__(self) -> None:
        """Check the options."""
        for name, kind in (("method", Method), ("start", Start), ("loss", Loss), ("pool", Pool)):
            check_choice(name, getattr(self, name), get_args(kind))
        check_sizes(self.dim, self.subspaces, self.codewords, self.coarse)
        for name in ("ahead", "batch", "warmup", "sample", "iterations", "every"):
            check_whole(name, getattr(self, name), 1)
        for name in ("history", "steps", "seed"):
            check_whole(name, getattr(self, name), 0)
        if self.negatives is not None:
            check_whole("negatives", self.negatives, 0)
        for name in ("angle", "weight", "margin"):
            check_number(name, getattr(self, name), 0)
        for name in ("lr", "joint_lr", "temperature"):
            check_number(name, getattr(self, name), 0, above=True)
        if self.method == "post-hoc" and self.codewords & (self.codewords - 1):
            raise ValueError(
                f"codewords must be a power of two for Faiss, but got codewords={self.codewords}"
            )
        if check_number("dropout", self.dropout, 0) >= 1:
            raise ValueError(f"dropout must be in [0, 1), but got {self.dropout}")

    @property
    def total(self) -> int:
        """Steps of both phases."""
        return self.warmup + self.steps

    @property
    def after(self) -> bool:
        """Whether the index is built only after training (post-hoc)."""
        return self.method.startswith("post-hoc")

    @property
    def exact_rotation(self) -> bool:
        """Whether training keeps R exactly orthogonal, not only close to it."""
        return self.method not in ("penalty", "pogo")

    @property
    def items_stay(self) -> bool:
        """Whether the item tower is fixed in the joint phase."""
        return self.fixed_items or self.method == "jpq"

    @property
    def bytes(self) -> int:
        """The bytes of an item's code, packed as in Faiss."""
        return -(-self.subspaces * (self.codewords - 1).bit_length() // 8)

    def check(self, log: Log) -> None:
        """Raise if the log is too small for the index, or ranks cannot share the batch equally."""
        for name in ("codewords", "coarse"):
            items, wanted = min(log.catalogue, self.sample), getattr(self, name)
            if items < wanted:
                raise ValueError(
                    f"{log.name} must have at least as many items as {name}, "
                    f"but has {items} to start from for {name}={wanted}"
                )
        if not self.history and log.words is None:
            raise ValueError("history must be at least 1 where a log has no words, but got 0")
        self.check_order(log.name, streamed=log.streamed)
        if self.batch % distributed.count():
            raise ValueError(
                f"batch must be divisible by the number of ranks, but got batch={self.batch} "
                f"for {distributed.count()}"
            )

    def check_order(self, name: str, *, streamed: bool) -> None:
        """Raise if the order of time is asked of a log that is read user by user."""
        if self.stream and streamed:
            raise ValueError(
                f"stream must be left out for {name}: Parquet files are read user by user, not in "
                "order of time"
            )


def config_for(log: Log | None, *, size: Size = "large", **options: Any) -> Config:
    """A configuration for a log.

    Args:
        log: the log to train on; None checks the options before a log is read.
        size: "small" and "medium" are for CPUs; "large" is for GPUs and depends on the number of
            items of the log.
        options: options of `Config` that override those of the size; None counts as not given.
    """
    check_choice("size", size, SIZES)
    chosen = dict(SIZES[size])
    if size == "large" and log is not None and log.catalogue > MOST_ITEMS:
        chosen["negatives"] = SHARED
        if log.catalogue > LARGE:
            chosen |= {"batch": 4096, "warmup": 3000, "steps": 1000}
            chosen |= {"lr": 2e-2, "joint_lr": 5e-3, "every": 200}
    chosen |= {name: value for name, value in options.items() if value is not None}
    return Config(**chosen)


def find_difference(saved: dict[str, Any], given: dict[str, Any]) -> str | None:
    """The first given option that differs from the saved one, in words; None if there is none."""
    for name, value in given.items():
        if saved.get(name) != value:
            return f"{name}={saved.get(name)!r}, but got {name}={value!r}"
    return None
