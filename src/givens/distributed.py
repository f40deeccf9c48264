"""Processes that train one model together, and what they exchange; one alone exchanges nothing.

Every rank holds all that is learned but the rows of large tables, which are split, and works on its
part of the batch. A loss is a rank's share of the mean over all rows, so that losses add up over
ranks, and their gradients too: each rank then takes the same step from the same sums.
"""

import contextlib
import datetime
import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# What the first rank does while others wait, such as the index's start, has to end by then.
PATIENCE = datetime.timedelta(hours=2)

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
    if alone():
        return slice(0, total)
    return slice(*bounds(total)[distributed.get_rank() :][:2])


def bounds(total: int) -> list[int]:
    """Where each rank's rows begin, and where those of the last end."""
    return [rank * total // count() for rank in range(count() + 1)]


def sizes(total: int) -> list[int]:
    """How many of so many rows each rank has."""
    return [stop - first for first, stop in pairwise(bounds(total))]


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
    return exchange(x.repeat(count(), *[1] * (x.ndim - 1)), [len(x)] * count(), sizes(total))


def exchange(x: Tensor, sent: list[int], taken: list[int]) -> Tensor:
    """Send the first `sent[0]` rows to the first rank, and so on; gives what came, in their order.

    Gradients go back the way that the rows came.
    """
    if alone():
        return x
    came: Tensor = _Exchanged.apply(x, sent, taken)  # type: ignore[no-untyped-call]
    return came


def add_gradients(parameters: Iterable[Tensor]) -> None:
    """Put the sum over ranks in the place of each gradient; those of split tables are whole."""
    gradients = [part.grad for part in parameters if part.grad is not None]
    gradients = [gradient for gradient in gradients if not gradient.is_sparse]
    if alone() or not gradients:
        return
    # They travel together: sending takes longer than what is sent.
    bundle = torch.cat([gradient.flatten() for gradient in gradients])
    with _exchange():
        distributed.all_reduce(bundle)
    added = bundle.split_with_sizes([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, added, strict=True):
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
    return cast(Made, from_all(lambda: make() if is_first() else None)[0])


def from_all(make: Callable[[], Made]) -> list[Made]:
    """What each rank makes, in their order, or the first of their errors, on all of them."""
    if alone():
        return [make()]
    mine: tuple[Made | None, Exception | None]
    try:
        mine = make(), None
    except Exception as error:
        mine = None, error
    everything: list[Any] = [None] * count()
    with _exchange():
        distributed.all_gather_object(everything, mine)
    for _, failure in everything:
        if failure is not None:
            raise failure
    return [made for made, _ in everything]


def together(make: Callable[[], Made]) -> Made:
    """What each rank makes for itself; an error on any of them is raised on all."""
    made: list[Made] = []
    from_all(lambda: made.append(make()))
    return made[0]


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
    found = from_all(digest.hexdigest)
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


class _Exchanged(torch.autograd.Function):
    """`exchange`; torch's own with a gradient is deprecated in one place, private in the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        ctx.sizes = taken, sent
        came = x.new_empty(sum(taken), *x.shape[1:])
        with _exchange():
            distributed.all_to_all_single(came, x.contiguous(), taken, sent)
        return came

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        back: Tensor = _Exchanged.apply(g, *ctx.sizes)  # type: ignore[no-untyped-call]
        return back, None, None
