"""A function in two processes that reduce with each other through gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[[int, Path], object]


def in_two_processes(work: Work, folder: Path) -> list:
    """What `work(rank, folder)` returned in either. work: a function of a module, since processes start anew"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, args=(port, work, folder), nprocs=2)
    return [torch.load(_result(folder, rank)) for rank in range(2)]


def _process(rank: int, port: int, work: Work, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.save(work(rank, folder), _result(folder, rank))
    dist.barrier()
    # Nothing is torn down: torch frees a group under the interpreter's lock, and waits for a thread that wants it.
    os._exit(0)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"process_{rank}.pt"
