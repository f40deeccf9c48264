"""What ranks exchange (gloo, on a CPU), against one process that has it all."""

import pytest
import torch
from ranks import finish, start

from givens import distributed

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist

from givens import distributed

store, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
mixed = torch.linspace(1, 2, world)
for total in (1, world, 10, 11):
    X = torch.randn(total, 4, generator=torch.Generator().manual_seed(total))
    # The loss of all ranks: each uses all rows in its own way, and every row is of one rank.
    whole = X.clone().requires_grad_()
    (whole.sin().square() * mixed.sum()).sum().backward()
    part = X[distributed.rows(total)].clone().requires_grad_()
    everything = distributed.gather_rows(part.sin(), total)
    torch.testing.assert_close(everything, X.sin(), rtol=0, atol=0)
    (everything.square() * mixed[rank]).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[distributed.rows(total)])
    # Shares of means over parts, even of none, add up to the mean over all.
    mean = part.detach().sum() / max(len(part), 1) / 4
    added = distributed.sum_ranks(distributed.share(mean, len(part), total))
    torch.testing.assert_close(added, X.mean())

# Rows to whom they are for, and their gradients back; from some nothing, to some nothing.
for counts in ([0, 0, 0], [0, 2, 1], [3, 0, 0]):
    sent = [counts[(rank + to) % world] for to in range(world)]
    taken = [counts[(rank + of) % world] for of in range(world)]
    x = (torch.arange(sum(sent) * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    came = distributed.exchange(x, sent, taken)
    first = [sum(counts[(of + to) % world] for to in range(rank)) for of in range(world)]
    wanted = [
        torch.arange(100 * of + 2.0 * first[of], 100 * of + 2.0 * (first[of] + taken[of]))
        for of in range(world)
    ]
    torch.testing.assert_close(came.flatten(), torch.cat(wanted), rtol=0, atol=0)
    (came * (rank + 1)).sum().backward()
    weights = torch.repeat_interleave(torch.arange(1.0, world + 1), torch.tensor(sent))
    torch.testing.assert_close(x.grad, weights[:, None].expand(-1, 2))

# Of any layout, and one without a gradient.
sizes = ((3, 7), (5,), (), (2, 2))
parts = [torch.zeros(size, requires_grad=True) for size in sizes] + [torch.zeros(2)]
parts[3].grad = torch.arange(4.0).view(2, 2).mT * (rank + 1)
for part in parts[:3]:
    part.grad = torch.full_like(part, rank + 1.0)
distributed.add_gradients(parts)
times = world * (world + 1) / 2
for part in parts[:3]:
    torch.testing.assert_close(part.grad, torch.full_like(part, times))
torch.testing.assert_close(parts[3].grad, torch.arange(4.0).view(2, 2).mT * times)

# A gradient of rows is whole already.
parts = [torch.zeros(2, 2, requires_grad=True)]
parts[0].grad = torch.sparse_coo_tensor([[rank % 2]], torch.ones(1, 2), (2, 2)).coalesce()
distributed.add_gradients(parts)
if parts[0].grad._nnz() != 1:
    sys.exit("a gradient of rows was added up")

mine = torch.full((3,), float(rank))
distributed.copy_from_first(mine, None)
torch.testing.assert_close(mine, torch.zeros(3))
if distributed.from_first(lambda: f"made by {rank}") != "made by 0":
    sys.exit("made by another")
distributed.check_same("numbers", [mine, "and words"], "")
try:
    distributed.check_same("numbers", [str(rank)], "look")
except ValueError as error:
    if f"numbers must be the same on all ranks, but rank 1 of {world}" not in str(error):
        raise
else:
    sys.exit("other numbers were not seen")
if distributed.from_all(lambda: rank) != [*range(world)]:
    sys.exit("not what all have made")
try:
    distributed.from_all(lambda: 1 / (rank - 1))
except ZeroDivisionError:
    pass
else:
    sys.exit("the second rank's error was lost")
try:
    distributed.from_first(lambda: 1 / 0)
except ZeroDivisionError:
    pass
else:
    sys.exit("the first rank's error was lost")
dist.barrier()
dist.destroy_process_group()
# All is checked; gloo's threads may still race with the interpreter's end.
os._exit(0)
"""


def test_three_ranks_exchange_what_one_has(tmp_path):
    finish(start(SCRIPT, 3, tmp_path / "store"))


def test_one_alone_exchanges_nothing():
    x = torch.randn(3, 2)
    assert distributed.count() == 1
    assert distributed.is_first()
    assert distributed.rows(3) == slice(0, 3)
    assert (
        distributed.gather_rows(x, 3) is distributed.sum_ranks(x) is distributed.share(x, 3, 3) is x
    )
    assert distributed.join(torch.device("cpu")) == torch.device("cpu")
    distributed.leave()


def test_a_gpu_for_each_rank(monkeypatch):
    for name, value in (("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # Without torchrun its variables mean nothing.
    assert distributed.join(torch.device("cuda", 1)) == torch.device("cuda", 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(ValueError, match=r"at most the number of GPUs .*, but got 4 ranks for 2"):
        distributed.join(torch.device("cuda"))
    with pytest.raises(ValueError, match=r"each rank takes a GPU of its own, but got cuda:1"):
        distributed.join(torch.device("cuda", 1))
