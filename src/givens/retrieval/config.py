"""What a training run does: everything that decides its outcome, but for the log."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from givens import distributed
from givens.checks import check_choice, check_number, check_sizes, check_whole
from givens.retrieval.data import Log
from givens.retrieval.towers import Pool

Method = Literal[
    "frozen",
    "cayley",
    "expm",
    "penalty",
    "gcd",
    "gcd-random",
    "gcd-greedy",
    "gcd-steepest",
    "post-hoc",
]
Start = Literal["opq", "identity", "random"]
Loss = Literal["softmax", "hinge"]

# A softmax over more items than this draws some of them.
MOST_ITEMS, SHARED = 10_000, 4096
# So many items take larger batches to be seen often enough, and higher rates, since they are moved
# only when they are seen.
LARGE = 50_000


@dataclass(frozen=True)
class Config:
    """The options of a run."""

    method: Method = "gcd"
    """How R is learned: GCD as it comes, or as the paper has it ("gcd-greedy" and its siblings);
    "post-hoc" trains without the index and leaves it to Faiss's OPQ."""
    start: Start = "opq"
    """Where R is when the index comes in."""
    exact: bool = False
    """Whether "gcd-steepest" is exactly that."""
    dim: int = 512
    subspaces: int = 32
    codewords: int = 256
    coarse: int = 0
    pool: Pool = "attention"
    history: int = 100
    """Items that the user tower looks back at; 0 where words are all."""
    ahead: int = 20
    """The target is one of so many items that come next."""
    dropout: float = 0.3
    """Part of the history that is hidden in training."""
    loss: Loss = "softmax"
    temperature: float = 0.07
    margin: float = 0.1
    negatives: int | None = None
    """Drawn alike, and shared by a batch beside its targets; None for all items."""
    batch: int = 1024
    """Examples of a step, on all ranks together."""
    lr: float = 1e-3
    """Of the towers, by Adam; it falls to 0 by a cosine in each phase."""
    joint_lr: float = 1e-3
    """Of towers and codebooks with the index."""
    angle: float = 1e-2
    """About how far R turns an axis in a step, in radians; falls likewise."""
    weight: float = 10.0
    """Of the distortion in the loss. A softmax divides by its temperature, so its gradients are
    large: at a weight of 1 R would follow them alone."""
    warmup: int = 1500
    """Steps without the index."""
    steps: int = 1500
    """Steps with it."""
    sample: int = 8192
    """Embeddings that are collected to start the index."""
    iterations: int = 200
    """Of OPQ on them, at most."""
    fixed_items: bool = False
    """Whether the item tower stays as it is once the index is in."""
    stream: bool = False
    """Whether the steps go through the log in order of time."""
    every: int = 100
    """Steps between two looks at the validation users."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
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
    def bytes(self) -> int:
        """Of an item's code, packed as Faiss packs it."""
        return -(-self.subspaces * (self.codewords - 1).bit_length() // 8)

    def check(self, log: Log) -> None:
        """Refuse a log that is too small for the index, and a batch that ranks cannot share."""
        for name in ("codewords", "coarse"):
            items, wanted = min(log.catalogue, self.sample), getattr(self, name)
            if items < wanted:
                raise ValueError(
                    f"{log.name} must have at least as many items as {name}, "
                    f"but has {items} to start from for {name}={wanted}"
                )
        if not self.history and log.words is None:
            raise ValueError("history must be at least 1 where a log has no words, but got 0")
        if self.batch % distributed.count():
            raise ValueError(
                f"batch must be divisible by the number of ranks, but got batch={self.batch} "
                f"for {distributed.count()}"
            )


def config_for(log: Log, *, small: bool = False, **options: Any) -> Config:
    """A configuration for a log: all that is not given is chosen by its size.

    Args:
        log: the log.
        small: for two cores and a few minutes.
        options: of `Config`; None counts as not given.
    """
    chosen: dict[str, Any] = {}
    if small:
        chosen |= {"dim": 64, "subspaces": 8, "history": 50, "warmup": 600, "steps": 600}
        chosen |= {"negatives": 512, "lr": 1e-2, "joint_lr": 1e-2, "temperature": 0.1}
        chosen |= {"weight": 1.0}
    elif log.catalogue > MOST_ITEMS:
        chosen["negatives"] = SHARED
        if log.catalogue > LARGE:
            chosen |= {"batch": 4096, "warmup": 3000, "steps": 1000}
            chosen |= {"lr": 2e-2, "joint_lr": 5e-3, "every": 200}
    chosen |= {name: value for name, value in options.items() if value is not None}
    return Config(**chosen)


def find_difference(saved: dict[str, Any], config: Config) -> str | None:
    """The first option in which a saved configuration is another one, in words."""
    for name, value in dataclasses.asdict(config).items():
        if saved.get(name) != value:
            return f"{name}={saved.get(name)!r}, but got {name}={value!r}"
    return None
