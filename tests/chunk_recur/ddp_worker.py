"""One of two processes that train one model with DistributedDataParallel: argv is rank, rendezvous file, output."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from tests.chunk_recur.cases import Recurrent
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward

CHUNK_LENGTHS = (2, 3, 9)


def data(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 7, 3, dtype=torch.float64, generator=generator)


def run(ddp: nn.Module, x: Tensor, chunk: int, entry: str) -> Tensor:
    def step(index, part, h, phase):
        # Every walk but the last one, which is chunk 0's, only accumulates.
        with nullcontext() if (index, phase) == (0, "walk") else ddp.no_sync():
            return ddp(part, h)

    state = State(torch.zeros(2, 4, dtype=torch.float64))
    if entry == "whole":
        return chunk_recurrent_backward(step, x.split(chunk, 1), state)
    loss = chunk_recurrent(step, x.split(chunk, 1), state, params=ddp.parameters())
    loss.backward()
    return loss.detach()


def main(rank: int, rendezvous: str, output: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(5)
    model = Recurrent()
    model.initial.requires_grad_(False)  # this test starts from zeros, and DDP waits for every parameter
    ddp = DistributedDataParallel(model)
    reductions = []

    def count(state, bucket):
        reductions.append(1)
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

    ddp.register_comm_hook(None, count)
    results = {}
    for chunk in CHUNK_LENGTHS:
        for entry in ("loss", "whole"):
            reductions.clear()
            loss = run(ddp, data(rank), chunk, entry)
            grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
            model.zero_grad()
            results[chunk, entry] = (loss, grads, len(reductions))
    torch.save(results, output)
    dist.barrier()
    # Nothing is torn down: what torch does to a group at the end can hang, or end the process by abort().
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
