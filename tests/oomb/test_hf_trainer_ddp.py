"""Two processes train as one with twice the batch."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from tests.oomb.trainers import model, run
from transformers import Trainer

from oomb import OombTrainer

SETTINGS = {"train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.1}


def worker(rank: int, port: int, folder: str, settings: dict) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    trainer, losses = run(OombTrainer, model(), Path(folder), settings=SETTINGS | settings | {"ddp_backend": "gloo"})
    if rank == 0:
        Path(folder, "logged.json").write_text(json.dumps([losses.of("loss"), losses.of("grad_norm")]))
    assert trainer.args.world_size == 2


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}])
def test_two_processes_are_one_with_twice_the_batch(tmp_path, settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path), settings), nprocs=2)
    losses, norms = json.loads((tmp_path / "logged.json").read_text())
    single = SETTINGS | settings | {"per_device_train_batch_size": 2}
    _, expected = run(Trainer, model(), tmp_path / "stock", settings=single)
    assert losses == pytest.approx(expected.of("loss"), rel=1e-5)
    assert norms == pytest.approx(expected.of("grad_norm"), rel=1e-5)
