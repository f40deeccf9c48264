"""Checks of arguments: vectors, whole numbers, numbers and choices.

Vectors are compared in float32, whose squares overflow beyond about 1e19 and vanish below 1e-19.
So none may be longer than `LONGEST`; for cosine, none but zero may be shorter than `SHORTEST`; and
to fit a quantizer, at least one must be that long.
"""

import functools
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

LONGEST, SHORTEST = 1e14, 1e-12
# The default upper limit of counts.
MOST = (1 << 31) - 1
# Seeds leave room for offsets that are added to them.
SEEDS = 1 << 62
# The most characters of a value in a message.
WIDE = 60


P = ParamSpec("P")
T = TypeVar("T")


def accept_old_calls(
    *positional: str, **renamed: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept the earlier signature of a function, with a warning that shows the new call.

    Args:
        *positional: keywords that were positional, after those that still are.
        **renamed: earlier names of keywords, and their new names.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
        first = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> T:
            late = dict(zip(positional, args[first:], strict=False))
            old = {renamed[name]: options.pop(name) for name in renamed if name in options}
            now = {**late, **old}
            if now:
                how = ", ".join(f"{name}={_show(value)}" for name, value in now.items())
                message = (
                    f"call {function.__name__} with {how}: the earlier signature is deprecated"
                )
                warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args[:first], *args[first + len(late) :], **now, **options)

        return call

    return decorate


def check_table(name: str, x: Any, dim: int | None = None) -> None:
    """Raise unless x is a table (N, n) of real numbers; with `dim`, n must be that."""
    kind = _kind(x)
    if kind is None:
        raise TypeError(
            f"{name} must be a tensor, an array or a file from givens.storage.vectors.read, "
            f"but got {type(x).__name__}; numpy.asarray makes an array of lists and frames"
        )
    wanted = "n" if dim is None else dim
    if len(x.shape) != 2 or x.shape[1] < 1 or (dim is not None and x.shape[1] != dim):
        raise ValueError(f"{name} must have shape (N, {wanted}), but got {tuple(x.shape)}")
    if kind not in "fiu":
        raise TypeError(f"{name} must hold real numbers, but got {x.dtype}")


def check_tensor(name: str, x: Any) -> None:
    """Raise unless x is a dense tensor."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        got = f"a {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a dense tensor, but got {got}")


def check_lengths(
    name: str,
    x: Tensor,
    metric: str = "l2",
    *,
    first: int = 0,
    rows: Any = None,
    holes: bool = False,
) -> None:
    """Raise for vectors (m, n) that float32 cannot compare; the error names the first.

    Args:
        name: the argument's name.
        x: floats, as given or as float32.
        metric: "cosine" rejects vectors close to 0, but not 0 itself.
        first: the position of x among more rows.
        rows: the positions of all rows, instead.
        holes: whether to accept NaN and infinite values.
    """
    least = SHORTEST if metric == "cosine" else 0.0
    lengths = torch.linalg.vector_norm(x, dim=1)
    odd = ~((lengths >= least) & (lengths <= LONGEST))
    if least:
        odd |= lengths == 0
    at = odd.nonzero()[:, 0]
    if not len(at):
        return
    exact = torch.linalg.vector_norm(x[at], dim=1, dtype=torch.float64)
    bad = ~(((exact >= least) | (exact == 0)) & (exact <= LONGEST))
    if holes:
        bad &= x[at].isfinite().all(1)
    if not bad.any():
        return
    row, length = int(at[bad][0]), float(exact[bad][0])
    place = first + row if rows is None else int(rows[row])
    check_finite(name, x[row : row + 1], first=place)
    rule = f"be no longer than {LONGEST:g}"
    if least:
        rule = f"have length 0 or {least:g} to {LONGEST:g}"
    raise ValueError(
        f"{name} must {rule} to be compared in float32, but row {place} has length {length:.1e}; "
        f"multiply {name} by a constant first"
    )


def check_finite(name: str, x: Tensor, *, first: int = 0, rows: Any = None) -> None:
    """Raise for rows with NaN or infinite values; arguments as in `check_lengths`."""
    bad = (~x.isfinite().all(1)).nonzero()
    if len(bad):
        row = int(bad[0])
        place = first + row if rows is None else int(rows[row])
        raise ValueError(f"{name} must be finite, but row {place} has NaN or infinite values")


def check_scale(name: str, longest: float) -> None:
    """Raise if even the longest vector is too short for float32 to tell them apart."""
    if 0 < longest < SHORTEST:
        raise ValueError(
            f"{name} must have a vector of length {SHORTEST:g} or more to be told apart in "
            f"float32, but the longest has {longest:.1e}; multiply {name} by a constant first"
        )


def check_integer(name: str, value: Any) -> int:
    """Return an integer, given in any integer type; bool and float raise."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        raise TypeError(f"{name} must be an integer, but got {name}={_show(value)}")
    return number


def check_whole(name: str, value: Any, least: int, most: int = MOST) -> int:
    """Return an integer in least..most."""
    number = check_integer(name, value)
    if not least <= number <= most:
        rule = f"at least {least}" if most == MOST and number < least else f"in {least}..{most}"
        raise ValueError(f"{name} must be {rule}, but got {name}={_show(value)}")
    return number


def check_seed(value: Any) -> int:
    """Return a seed in 0..2⁶²−1."""
    try:
        return check_whole("seed", value, 0, SEEDS - 1)
    except ValueError as error:
        raise ValueError(f"seed must be in 0..2⁶²−1, but got seed={_show(value)}") from error


def check_sizes(dim: int, subspaces: int, codewords: int, coarse: int) -> None:
    """Check that the sizes of a quantizer fit together."""
    for name, value in (("dim", dim), ("subspaces", subspaces)):
        check_whole(name, value, 1)
    if dim % subspaces:
        divisors = ", ".join(str(d) for d in range(1, dim + 1) if dim % d == 0)
        raise ValueError(
            f"dim must be divisible by subspaces, but got dim={dim}, subspaces={subspaces}; "
            f"its divisors are {divisors}"
        )
    check_whole("codewords", codewords, 2, 256)
    check_whole("coarse", coarse, 0)


def check_number(
    name: str, value: Any, least: float, most: float = math.inf, *, above: bool = False
) -> float:
    """Return a finite number of at least `least`, or `above` it, and at most `most`; not bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, but got {name}={_show(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    good = (least < number if above else least <= number) and number <= most
    if not (good and math.isfinite(number)):
        low = f"above {least:g}" if above else f"at least {least:g}"
        high = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be finite, {low}{high}, but got {name}={_show(value)}")
    return number


def check_choice(name: str, value: Any, known: Iterable[str], others: str = "") -> None:
    """Raise unless value is one of the known words; `others` names further ways for the message."""
    listed = tuple(known)
    if not isinstance(value, str) or value not in listed:
        words = ", ".join(map(repr, listed))
        raise ValueError(f"{name} must be one of {words}{others}, but got {_show(value)}")


def _show(value: Any) -> str:
    """A value in one short line, for a message."""
    line = " ".join(repr(value).split())
    return line if len(line) <= WIDE else f"{line[:WIDE]}…"


def _kind(x: Any) -> str | None:
    """The kind of a table's numbers, as numpy's letter; None if x is not a table."""
    if isinstance(x, Tensor):
        if x.layout != torch.strided or x.is_quantized:
            return None
        if x.is_complex():
            return "c"
        return "b" if x.dtype == torch.bool else "f" if x.is_floating_point() else "i"
    # Masked and sparse arrays would be read as if they were plain ones.
    if isinstance(x, np.ma.MaskedArray) or hasattr(x, "tocsr"):
        return None
    if not all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__", "__len__")):
        return None
    return str(getattr(x.dtype, "kind", "O"))
