"""Processes that train one model together, and what they exchange; one alone exchanges nothing.

Every rank holds all that is learned, and works on its part of the rows. A loss is a rank's share of
the mean over all rows, so that losses add up over ranks, and their gradients too: each rank then
takes the same step from the same sums.
"""

import contextlib
import datetime
import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# What the first rank does while others wait, such as the index's start, has to end by then.
PATIENCE = datetime.timedelta(hours=2)

# Gradients of no more numbers than this are sent in one message.
BUNDLED = 1 << 20

Made = TypeVar("Made")


def alone() -> bool:
    """Whether there is no process group."""
    return not (distributed.is_available() and distributed.is_initialized())


def count() -> int:
    """How many ranks there are."""
    return 1 if alone() else distributed.get_world_size()


def is_first() -> bool:
    """Whether this is the rank that writes and tells."""
    return alone() or distributed.get_rank() == 0


def rows(total: int) -> slice:
    """Which of so many rows are this rank's: as many as any other's, or one less or more."""
    return slice(0, total) if alone() else _rows(total, distributed.get_rank())


def share(mean: Tensor, part: int, total: int) -> Tensor:
    """What the mean over a part of the rows adds to the mean over all."""
    return mean if alone() else mean * (part / total)


def sum_ranks(x: Tensor) -> Tensor:
    """The sum over ranks, without a gradient."""
    if alone():
        return x
    x = x.detach().clone()
    with _exchange():
        distributed.all_reduce(x)
    return x


def gather_rows(x: Float[Tensor, "part n"], total: int) -> Float[Tensor, "all n"]:
    """The rows of all ranks; what they are used for on any rank flows back to the one they are of.

    Args:
        x: the rows of this rank, `rows(total)` of them.
        total: how many all ranks have.
    """
    if alone():
        return x
    everything: Tensor = _Gathered.apply(x, total)  # type: ignore[no-untyped-call]
    return everything


def add_gradients(parameters: Iterable[Tensor]) -> None:
    """Put the sum over ranks in the place of each gradient."""
    if alone():
        return
    gradients = []
    for part in parameters:
        if part.grad is not None and part.grad.is_sparse:
            part.grad = _rows_of_all(part.grad)
        elif part.grad is not None:
            gradients.append(part.grad)
    large = [gradient for gradient in gradients if gradient.numel() > BUNDLED]
    small = [gradient for gradient in gradients if gradient.numel() <= BUNDLED]
    # Small ones travel together: sending takes longer than what is sent.
    bundle = torch.cat([gradient.flatten() for gradient in small]) if small else None
    with _exchange():
        for sent in [*large, bundle]:
            if sent is not None:
                distributed.all_reduce(sent)
    if bundle is not None:
        for gradient, part in zip(
            small, bundle.split_with_sizes([g.numel() for g in small]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))


def copy_from_first(*parts: Tensor | None) -> None:
    """Put the first rank's parts in the place of this one's."""
    if not alone():
        with _exchange():
            for part in parts:
                if part is not None:
                    distributed.broadcast(part, 0)


def from_first(make: Callable[[], Made]) -> Made:
    """What the first rank makes, or the error that it ends with, on all of them."""
    if alone():
        return make()
    made: list[Any] = [None, None]
    if is_first():
        try:
            made[0] = make()
        except Exception as error:
            made[1] = error
    with _exchange():
        distributed.broadcast_object_list(made, 0)
    if made[1] is not None:
        raise made[1]
    result: Made = made[0]
    return result


def together(make: Callable[[], Made]) -> Made:
    """What each rank makes for itself; an error on any of them ends all, with its line."""
    if alone():
        return make()
    made: Made | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as failure:
        error = failure
    errors: list[Any] = [None] * count()
    with _exchange():
        distributed.all_gather_object(errors, error)
    for one in errors:
        if one is not None:
            raise one
    return cast(Made, made)


def check_same(name: str, parts: Iterable[Tensor | str], hint: str) -> None:
    """Refuse to go on where the parts are not the same on all ranks, bit for bit."""
    if alone():
        return
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().contiguous().numpy().data)
        else:
            digest.update(part.encode())
    found: list[Any] = [None] * count()
    with _exchange():
        distributed.all_gather_object(found, digest.hexdigest())
    other = [rank for rank, each in enumerate(found) if each != found[0]]
    if other:
        raise ValueError(
            f"{name} must be the same on all ranks, but rank {other[0]} of {count()} and the first "
            f"differ; {hint}"
        )


def join(device: torch.device) -> torch.device:
    """Join the processes that torchrun started; gives the device of this one.

    By gloo on CPUs, by nccl on GPUs, one for each rank.
    """
    if not distributed.is_torchelastic_launched():
        return device
    options: dict[str, Any] = {"backend": "gloo", "timeout": PATIENCE}
    if device.type == "cuda":
        device = _own_gpu(device)
        options |= {"backend": "nccl", "device_id": device}
    store, rank, world = _store(PATIENCE)
    with _exchange():
        distributed.init_process_group(**options, store=store, rank=rank, world_size=world)
    return device


def leave() -> None:
    """End the process of a rank, its work done; one alone goes on.

    At once, since gloo's threads may race with the interpreter's end.
    """
    if alone():
        return
    with _exchange():
        distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def is_told(what: str) -> bool:
    """Whether another rank has told of an error that several have; else this one is to."""
    if not distributed.is_torchelastic_launched():
        return False
    # Once a rank has failed, torchrun stops the others, which are ending themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        # By the store that torchrun keeps for all of them.
        store, _, _ = _store(datetime.timedelta(seconds=5))
        return int(store.add(f"told: {what}", 1)) > 1
    except RuntimeError:
        # The store is gone with its machine.
        return False


def _own_gpu(device: torch.device) -> torch.device:
    """The GPU of this rank among those of its machine."""
    if device.index is not None:
        raise ValueError(
            "--device must be cuda under torchrun, where each rank takes a GPU of its own, "
            f"but got {device}"
        )
    wanted, there = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if wanted > there:
        raise ValueError(
            f"--nproc-per-node must be at most the number of GPUs with --device cuda, "
            f"but got {wanted} ranks for {there} of them"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _store(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """The store that torchrun keeps, this rank and how many there are."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    # After a restart it still has what ranks wrote that are no more.
    return PrefixStore(f"givens {os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, world


def _rows(total: int, rank: int) -> slice:
    return slice(rank * total // count(), (rank + 1) * total // count())


@contextlib.contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # "Connection closed by peer", without the place in gloo's code and its advice.
        why = re.sub(r"^\[\S+\] ", "", f"{error}").split(". ")[0]
        raise ConnectionError(
            f"a rank was lost ({why}); run again with --resume to go on from the last checkpoint"
        ) from error


def _rows_of_all(gradient: Tensor) -> Tensor:
    """A sparse gradient with the rows of all ranks, each of which has its part of them."""
    indices, values = gradient._indices()[0], gradient._values()
    total = int(sum_ranks(values.new_tensor(len(values))))
    parts = gather_rows(indices, total)[None], gather_rows(values, total)
    return torch.sparse_coo_tensor(*parts, gradient.shape)


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: int) -> Tensor:
        ctx.rows = rows(total)
        # All send as many rows.
        mine = x.new_zeros(-(-total // count()), *x.shape[1:])
        mine[: len(x)] = x
        parts = [torch.empty_like(mine) for _ in range(count())]
        with _exchange():
            distributed.all_gather(parts, mine)
        whose = [_rows(total, rank) for rank in range(count())]
        return torch.cat([part[: w.stop - w.start] for part, w in zip(parts, whose, strict=True)])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        g = g.clone(memory_format=torch.contiguous_format)
        with _exchange():
            distributed.all_reduce(g)
        return g[ctx.rows], None
