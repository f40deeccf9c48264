"""Under DistributedDataParallel every rank ends with the same R, bit for bit (gloo, on a CPU)."""

import pytest
from ranks import finish, start

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import givens

store, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
n = 16
for pairing in ("random", "greedy", "steepest", "overlapping-random"):
    torch.manual_seed(0)
    model = nn.Sequential(givens.Rotation(n, givens.random_rotation(n)), nn.Linear(n, n))
    ddp = DistributedDataParallel(model)
    turn = givens.GCD(model[0].parameters(), 0.02, pairing=pairing, exact=False, seed=7)
    other = torch.optim.Adam(model[1].parameters())
    start = model[0].weight.detach().clone()
    torch.manual_seed(100 + rank)
    for _ in range(30):
        x = torch.randn(8, n)
        loss = (ddp(x) - x.flip(1)).square().mean()
        turn.zero_grad()
        other.zero_grad()
        loss.backward()
        turn.step()
        other.step()
    W = model[0].weight.detach()
    everywhere = [torch.empty_like(W) for _ in range(world)]
    dist.all_gather(everywhere, W)
    if not all(torch.equal(W, V) for V in everywhere):
        sys.exit("ranks differ")
    if torch.allclose(W, start, atol=1e-3) or givens.orthogonality_error(W) > 1e-5:
        sys.exit("nothing learned, or not a rotation")
    del ddp
dist.barrier()
dist.destroy_process_group()
# All is checked; gloo's threads may still race with the interpreter's end.
os._exit(0)
"""


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_to_the_last_bit(world, tmp_path):
    finish(start(SCRIPT, world, tmp_path / "store"))
