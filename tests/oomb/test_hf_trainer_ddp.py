"""Two processes train as one with twice the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.oomb.trainers import model, run
from tests.oomb.two_processes import in_two_processes
from transformers import Trainer

from oomb import OombTrainer

GROUPS = [{}, {"gradient_accumulation_steps": 2}]
SETTINGS = {"train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.1}


def _trained(_rank: int, folder: Path) -> list[list[list[float]]]:
    logged = []
    for settings in GROUPS:
        trainer, losses = run(
            OombTrainer, model(), folder, settings=SETTINGS | settings | {"ddp_backend": "gloo"}
        )  # fmt: skip
        logged.append([losses.of("loss"), losses.of("grad_norm")])
        assert trainer.args.world_size == 2
    return logged


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(tmp_path):
    """Without accumulation and with it; the two take seconds to start, so they do both."""
    logged, _ = in_two_processes(_trained, tmp_path)
    for settings, (losses, norms) in zip(GROUPS, logged, strict=True):
        single = SETTINGS | settings | {"per_device_train_batch_size": 2}
        _, expected = run(Trainer, model(), tmp_path / "stock", settings=single)
        assert losses == pytest.approx(expected.of("loss"), rel=1e-5)
        assert norms == pytest.approx(expected.of("grad_norm"), rel=1e-5)
