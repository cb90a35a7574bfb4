"""Two processes under DistributedDataParallel: the mean of the single gradients, reduced once a step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tests.chunk_recur import ddp_worker
from tests.chunk_recur.cases import Recurrent, assert_same, take_grads

from chunk_recur import State, reference

ROOT = Path(__file__).parents[2]


def test_two_processes_equal_the_mean_of_one(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *sys.path])
    outputs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, ddp_worker.__file__, str(rank), str(tmp_path / "rendezvous"), str(output)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()

    torch.manual_seed(5)
    model = Recurrent()
    model.initial.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    losses, grads = [], []
    for rank in range(2):
        x = ddp_worker.data(rank)
        loss = reference.chunk_recurrent(model.step, [x], State(torch.zeros(2, 4, dtype=torch.float64)))
        loss.backward()
        losses.append(loss)
        grads.append(take_grads(params))
    mean = [(a + b) / 2 for a, b in zip(*grads)]
    for rank, output in enumerate(outputs):
        results = torch.load(output)
        assert len(results) == 2 * len(ddp_worker.CHUNK_LENGTHS)
        for loss, got, reductions in results.values():
            assert_same([loss, *got], [losses[rank], *mean])
            assert reductions == 1
