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

GROUPS = [{}, {"gradient_accumulation_steps": 2}]
SETTINGS = {"train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.1}


def worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logged = []
    for settings in GROUPS:
        trainer, losses = run(
            OombTrainer, model(), Path(folder), settings=SETTINGS | settings | {"ddp_backend": "gloo"}
        )  # fmt: skip
        logged.append([losses.of("loss"), losses.of("grad_norm")])
        assert trainer.args.world_size == 2
    if rank == 0:
        Path(folder, "logged.json").write_text(json.dumps(logged))


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(tmp_path):
    """Without accumulation and with it; the two take seconds to start, so they do both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    logged = json.loads((tmp_path / "logged.json").read_text())
    for settings, (losses, norms) in zip(GROUPS, logged, strict=True):
        single = SETTINGS | settings | {"per_device_train_batch_size": 2}
        _, expected = run(Trainer, model(), tmp_path / "stock", settings=single)
        assert losses == pytest.approx(expected.of("loss"), rel=1e-5)
        assert norms == pytest.approx(expected.of("grad_norm"), rel=1e-5)
