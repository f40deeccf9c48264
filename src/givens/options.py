"""The options of GCD, and the checks of what it is given: matrices, gradients and saved states.

Whatever passes these checks keeps a rotation a rotation.
"""

import math
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from givens import kernels
from givens.kernels import MOST_RATE
from givens.pairing import Pairing
from givens.rotation import check_dtype, check_orthogonal, largest

Adapt = Literal["adam", "matrix", "adagrad"]
# The default number of pairings per gradient, and the largest besides "all".
TURNS, MOST_TURNS = 16, 64
# With many pairings per step, rounding errors are corrected at every second step; with more than
# TIDY_ALWAYS pairings, at every step.
TIDY_OFTEN, TIDY_ALWAYS = 2, 32
# What a parameter group holds besides the matrices and the rate.
OPTIONS = ("pairing", "turns", "adapt", "betas", "exact", "seed", "maximize")
# The parts of a state that has statistics for every plane; one is of no use without the others.
BY_PLANE = ("planes", "ambient", "foresight")
# Up to this many axes "all" turns plane after plane, beyond it by matrix products.
FEW_AXES = 64


class Options(NamedTuple):
    """The options of a step on one matrix, as plain numbers."""

    lr: float | Tensor
    sign: int
    """−1 to descend, 1 to ascend."""
    pairing: Pairing
    turns: int
    all_planes: bool
    adapt: str | None
    betas: tuple[float, float]
    exact: bool
    seed: int
    stream: int

    @property
    def by_plane(self) -> bool:
        """Whether D is known for every plane, and the angles are proportional to it."""
        # Other pairings share axes, or are chosen without looking at the derivatives.
        if self.pairing not in ("greedy", "steepest"):
            return False
        return self.adapt == "adam" or (self.adapt is None and (self.turns > 1 or self.all_planes))

    def by_products(self, n: int) -> bool:
        """Whether all planes turn at once, by a matrix exponential."""
        return self.all_planes and n > FEW_AXES

    @property
    def momentum(self) -> bool:
        """Whether there is a momentum that turns with the frame."""
        return self.adapt in ("adam", "matrix") and self.betas[0] > 0 and not self.by_plane

    @property
    def memory(self) -> tuple[float, float]:
        """(decay, gain) in scale² ← decay·scale² + gain·mean(A_ij²)."""
        return (1.0, 1.0) if self.adapt == "adagrad" else (self.betas[1], 1 - self.betas[1])

    @property
    def tidy_every(self) -> int:
        """Steps between two corrections of rounding errors in W."""
        if self.turns == 1:
            return kernels.TIDY_EVERY
        return 1 if self.turns > TIDY_ALWAYS else TIDY_OFTEN

    @property
    def share(self) -> float:
        """∓1/√K, so that K pairings turn an axis as far as one does; the raw step adds 1/√2."""
        return self.sign / math.sqrt(self.turns * (2 if self.adapt is None else 1))

    def unbiased(self, t: int) -> float:
        """The bias correction of D = m/√v, since both running means start at zero."""
        if self.adapt not in ("adam", "matrix"):
            return 1.0
        beta1, beta2 = self.betas
        return math.sqrt(1 - beta2**t) / (1 - beta1**t)

    def rate(self, t: int) -> float | Tensor:
        """θ divided by D (or by the raw derivative if there is no D)."""
        return self.lr * (self.share * self.unbiased(t))


def options_for(group: dict[str, Any], W: Tensor, stream: int) -> Options:
    """The options of a step on one matrix of a parameter group."""
    every, turns = max(W.shape[-1] - 1, 1), group["turns"]
    all_planes = turns == "all" or 1 < every <= turns
    return Options(
        lr=group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"]),
        sign=1 if group["maximize"] else -1,
        pairing=group["pairing"],
        turns=every if all_planes else min(int(turns), every),
        all_planes=all_planes,
        adapt=group["adapt"],
        betas=tuple(group["betas"]),
        exact=group["exact"],
        seed=int(group["seed"]),
        stream=stream,
    )


def fill_in(group: dict[str, Any]) -> None:
    """Set the defaults that depend on other options, in the group, where schedulers find them."""
    name, adapt = group["pairing"], group["adapt"]
    if group["turns"] is None:
        group["turns"] = TURNS if name == "greedy" and adapt == "adam" else 1
    if group["betas"] is None:
        group["betas"] = (0.0 if str(name).endswith("random") else 0.9, 0.99)
    elif adapt not in ("adam", "matrix"):
        raise ValueError(f"betas go with adapt='adam' or 'matrix', but got adapt={adapt!r}")


def check_options(group: dict[str, Any]) -> None:
    """Refuse options that a step cannot use."""
    name, adapt = group["pairing"], group["adapt"]
    _check_choice("pairing", name, get_args(Pairing))
    _check_choice("adapt", adapt, (*get_args(Adapt), None))
    _check_turns(group)
    if not _are_betas(group["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), but got {group['betas']!r}")
    seed = group["seed"]
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 1 << 63:
        raise ValueError(f"seed must be in 0..2⁶³−1, but got seed={seed!r}")
    for flag in ("exact", "maximize"):
        if not isinstance(group[flag], bool):
            raise ValueError(f"{flag} must be True or False, but got {flag}={group[flag]!r}")


def check_rate(lr: float | Tensor, *, wait: bool) -> None:
    """Refuse a rate that would damage R; a rate on a GPU is only read with `wait`."""
    if isinstance(lr, bool) or not isinstance(lr, (Real, Tensor)):
        raise ValueError(f"lr must be a number or a tensor of one, but got lr={lr!r}")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a tensor of one number, but got shape {tuple(lr.shape)}")
    known = wait or not isinstance(lr, Tensor) or lr.device.type == "cpu"
    if known and not is_rate(lr):
        raise ValueError(
            f"lr must be finite and not negative, at most {MOST_RATE:g}, but got lr={float(lr)}"
        )


def is_rate(lr: float | Tensor) -> bool:
    """Whether a step can use this rate; synchronises with its device."""
    return 0 <= float(lr) <= MOST_RATE


def check_matrix(name: str, W: Tensor) -> None:
    """Refuse a parameter that GCD cannot turn."""
    if W.ndim not in (2, 3) or W.shape[-1] != W.shape[-2] or W.numel() == 0:
        raise ValueError(
            f"GCD turns square matrices, (n, n) or stacks (b, n, n), but {name} has shape "
            f"{tuple(W.shape)}; leave it to another optimizer, or, if its columns are to stay "
            f"orthonormal, train a square givens.Rotation and use part of its columns"
        )
    if hasattr(W, "to_local"):
        raise ValueError(
            f"GCD turns whole matrices, but {name} is a DTensor, of which a rank has a part; "
            "leave it out of fully_shard (ignored_params), and average its gradient over ranks"
        )
    check_dtype(name, W)
    check_orthogonal(name, W)


def check_layout(W: Tensor, G: Tensor, state: dict[str, Any]) -> None:
    """Refuse a gradient, or a state, that the loops cannot read."""
    check_dtype("the matrix", W)
    check_shapes(state, W)
    if G.dtype != W.dtype or G.layout != torch.strided:
        raise ValueError(f"the gradient must be dense and {W.dtype}, but got {G.layout} {G.dtype}")


def check_state(state: dict[str, Any], W: Tensor) -> None:
    """Refuse a state that would damage W."""
    for name, value in state.items():
        if name in ("step", "skipped"):
            if not _is_count(value):
                raise ValueError(f"{name} of a state must be in 0..2³¹−1, but got {value!r}")
        elif isinstance(value, Tensor):
            if not value.isfinite().all():
                raise ValueError(
                    f"the state must be finite, but {name} has NaN or infinite entries"
                )
        elif name in (*BY_PLANE, "momentum", "scale"):
            raise ValueError(f"{name} of a state must be a tensor, but got {type(value).__name__}")
    known = [name for name in BY_PLANE if name in state]
    if known and len(known) < len(BY_PLANE):
        missing = next(name for name in BY_PLANE if name not in state)
        raise ValueError(f"the state must have all of {', '.join(BY_PLANE)}, but has no {missing}")
    check_shapes(state, W)


def check_shapes(state: dict[str, Any], W: Tensor) -> None:
    """Refuse the state of another matrix: the compiled loops do not check any bounds."""
    count = 1 if W.ndim == 2 else len(W)
    shapes = dict.fromkeys(("planes", "ambient", "momentum"), W.shape)
    for name, shape in {**shapes, "foresight": (count, 2), "scale": (count,)}.items():
        if name in state and state[name].shape != shape:
            raise ValueError(
                f"the state must be of a {tuple(W.shape)} matrix, but {name} has shape "
                f"{tuple(state[name].shape)}; make a new GCD for another matrix"
            )


def check_group(group: dict[str, Any]) -> None:
    """Refuse the parameter group of another optimizer."""
    missing = [name for name in ("lr", *OPTIONS) if name not in group]
    if missing:
        raise ValueError(
            f"state_dict must be of a GCD, but a parameter group has no {', '.join(missing)}"
        )


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    number = float(value) if isinstance(value, Real) else math.nan
    return number.is_integer() and 0 <= number < 1 << 31


def check_gradient(W: Tensor, G: Tensor, how: Options) -> None:
    """On a CPU, refuse a gradient that would damage W; a GPU is not synchronised with."""
    if W.device.type != "cpu":
        return
    most = largest(G)
    if not most < math.inf:
        raise ValueError(
            f"the gradient of the {tuple(W.shape)} matrix has NaN or infinite entries; "
            "no matrix was turned"
        )
    if most > gradient_limit(W, how):
        raise ValueError(
            f"the gradient of the {tuple(W.shape)} matrix has an entry of {most:.0e}, with which "
            "derivatives overflow; no matrix was turned"
        )


def gradient_limit(W: Tensor, how: Options) -> float:
    """The largest entry of a gradient for which neither derivatives nor angles overflow."""
    limit = torch.finfo(W.dtype).max / (8 * math.sqrt(W.shape[-1]))
    if how.adapt or (isinstance(how.lr, Tensor) and how.lr.device.type != "cpu"):
        return limit
    # The angles of the raw step are proportional to the gradient.
    return limit / max(1.0, float(how.lr))


def _are_betas(betas: Any) -> bool:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return False
    return all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        listed = ", ".join(repr(choice) for choice in known if choice is not None)
        listed += " or None" if None in known else ""
        raise ValueError(f"{name} must be one of {listed}, but got {value!r}")


def _check_turns(group: dict[str, Any]) -> None:
    """Refuse a number of pairings that the other options do not support."""
    turns, name, adapt = group["turns"], group["pairing"], group["adapt"]
    if turns != "all" and (
        isinstance(turns, bool)
        or not isinstance(turns, Integral)
        or not 1 <= int(turns) <= MOST_TURNS
    ):
        raise ValueError(f"turns must be in 1..{MOST_TURNS} or 'all', but got turns={turns!r}")
    if turns != 1 and name not in ("greedy", "random"):
        raise ValueError(
            f"turns={turns!r} goes with pairing='greedy' or 'random', but got pairing={name!r}"
        )
    if turns != 1 and name == "greedy" and adapt not in ("adam", None):
        raise ValueError(f"turns={turns!r} goes with adapt='adam' or None, but got adapt={adapt!r}")
