"""Training on several ranks; without a process group, every function here is local.

Every rank holds all parameters, except the rows of large tables, which are split, and works on its
part of the batch. A loss is a rank's share of the mean over all rows, so losses and gradients add
up over ranks, and each rank takes the same step from the same sums.
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

# The timeout for work of the first rank while others wait, such as the start of the index.
PATIENCE = datetime.timedelta(hours=2)

Made = TypeVar("Made")


def is_alone() -> bool:
    """Whether there is no process group."""
    return not (distributed.is_available() and distributed.is_initialized())


def count() -> int:
    """The number of ranks."""
    return 1 if is_alone() else distributed.get_world_size()


def is_first() -> bool:
    """Whether this is the rank that writes files and output."""
    return is_alone() or distributed.get_rank() == 0


def rows(total: int) -> slice:
    """This rank's range of `total` rows; the sizes of ranges differ by at most one."""
    if is_alone():
        return slice(0, total)
    return slice(*bounds(total)[distributed.get_rank() :][:2])


def bounds(total: int) -> list[int]:
    """The first row of each rank, followed by `total`."""
    return [rank * total // count() for rank in range(count() + 1)]


def sizes(total: int) -> list[int]:
    """The number of rows of each rank."""
    return [stop - first for first, stop in pairwise(bounds(total))]


def share(mean: Tensor, part: int, total: int) -> Tensor:
    """The contribution of the mean over `part` rows to the mean over `total` rows."""
    return mean if is_alone() else mean * (part / total)


def sum_ranks(x: Tensor) -> Tensor:
    """The sum over ranks, without a gradient."""
    if is_alone():
        return x
    x = x.detach().clone()
    with _exchange():
        distributed.all_reduce(x)
    return x


def gather_rows(x: Float[Tensor, "part n"], total: int) -> Float[Tensor, "all n"]:
    """The rows of all ranks. Gradients from every rank flow back to the rank that owns a row.

    Args:
        x: the rows of this rank, `rows(total)` of them.
        total: the number of rows of all ranks.
    """
    if is_alone():
        return x
    return exchange(x.repeat(count(), *[1] * (x.ndim - 1)), [len(x)] * count(), sizes(total))


def exchange(x: Tensor, sent: list[int], taken: list[int]) -> Tensor:
    """Send the first `sent[0]` rows to the first rank, and so on; returns the rows from all ranks.

    The first `taken[0]` of these are from the first rank. Gradients flow back to the senders.
    """
    if is_alone():
        return x
    came: Tensor = _Exchanged.apply(x, sent, taken)  # type: ignore[no-untyped-call]
    return came


def add_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each gradient by its sum over ranks; those of split tables are complete already."""
    gradients = [part.grad for part in parameters if part.grad is not None]
    gradients = [gradient for gradient in gradients if not gradient.is_sparse]
    if is_alone() or not gradients:
        return
    # One message: latency outweighs its size.
    bundle = torch.cat([gradient.flatten() for gradient in gradients])
    with _exchange():
        distributed.all_reduce(bundle)
    added = bundle.split_with_sizes([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, added, strict=True):
        gradient.copy_(part.view_as(gradient))


def copy_from_first(*parts: Tensor | None) -> None:
    """Overwrite the parts by those of the first rank."""
    if not is_alone():
        with _exchange():
            for part in parts:
                if part is not None:
                    distributed.broadcast(part, 0)


def from_first(make: Callable[[], Made]) -> Made:
    """Call `make` on the first rank; all ranks return its result or raise its error."""
    return cast(Made, from_all(lambda: make() if is_first() else None)[0])


def from_all(make: Callable[[], Made]) -> list[Made]:
    """Call `make` on every rank; all return the list of results or raise the first error."""
    if is_alone():
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


def run_together(make: Callable[[], Made]) -> Made:
    """Call `make` on every rank; each returns its own result, and all raise the first error."""
    made: list[Made] = []
    from_all(lambda: made.append(make()))
    return made[0]


def check_same(name: str, parts: Iterable[Tensor | str], hint: str) -> None:
    """Raise if the parts are not bit for bit the same on all ranks."""
    if is_alone():
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
    """Join the process group of torchrun, if there is one; returns the device of this rank.

    The backend is gloo on CPUs and nccl on GPUs, of which each rank takes one.
    """
    if not distributed.is_torchelastic_launched():
        return device
    options: dict[str, Any] = {"backend": "gloo", "timeout": PATIENCE}
    if device.type == "cuda":
        device = _choose_gpu(device)
        options |= {"backend": "nccl", "device_id": device}
    store, rank, world = _open_store(PATIENCE)
    with _exchange():
        distributed.init_process_group(**options, store=store, rank=rank, world_size=world)
    return device


def leave() -> None:
    """End the process of a rank after its work; without a process group, do nothing.

    It ends at once, since gloo's threads may race with the interpreter's shutdown.
    """
    if is_alone():
        return
    with _exchange():
        distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def is_told(what: str) -> bool:
    """Whether another rank has already reported this error; if not, this rank is to do so."""
    if not distributed.is_torchelastic_launched():
        return False
    # Once a rank has failed, torchrun sends SIGTERM to the others, which are ending already.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        # torchrun's store is shared by all ranks.
        store, _, _ = _open_store(datetime.timedelta(seconds=5))
        return int(store.add(f"told: {what}", 1)) > 1
    except RuntimeError:
        # The machine of the store is gone.
        return False


def _choose_gpu(device: torch.device) -> torch.device:
    """The GPU of this rank, among those of its machine."""
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


def _open_store(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """The store of torchrun, this rank, and the number of ranks."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    # After a restart the store still holds entries of earlier ranks.
    return PrefixStore(f"givens {os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, world


@contextlib.contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # "Connection closed by peer", without the line of gloo's source and its advice.
        why = re.sub(r"^\[\S+\] ", "", f"{error}").split(". ")[0]
        raise ConnectionError(
            f"a rank was lost ({why}); run again with --resume to continue from the last checkpoint"
        ) from error


class _Exchanged(torch.autograd.Function):
    """`exchange`, with its gradient; torch's versions are deprecated or private."""

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
