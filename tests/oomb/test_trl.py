"""The mixin over TRL's SFTTrainer: the same losses and gradient norms as SFTTrainer by itself."""

from __future__ import annotations

import pytest
import torch
from tests.models import build, configs
from tests.oomb.trainers import CHUNKS, Losses, rows

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402

from oomb import ChunkTrainerMixin  # noqa: E402
from oomb.tiny import byte_tokenizer  # noqa: E402


class LongSFTTrainer(ChunkTrainerMixin, trl.SFTTrainer):
    pass


def model():
    config = configs()["qwen3"]
    config.vocab_size = 300  # the tokenizer's padding is id 256
    return build(config, dtype=torch.float32)


def run(kind, tmp_path, settings, **more):
    losses = Losses()
    base = {
        "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.1, "bf16": False,
        "max_length": None,
    }  # fmt: skip
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows(12)])
    trainer = kind(
        model(), trl.SFTConfig(str(tmp_path), **(base | settings)), train_dataset=data,
        eval_dataset=data.select(range(3)), processing_class=byte_tokenizer(), callbacks=[losses], **more,
    )  # fmt: skip
    trainer.train()
    return losses, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"padding_free": True},
        {"packing": True, "max_length": 50},
        {"loss_type": "dft"},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_three_steps_equal_those_of_sft_trainer(settings, tmp_path):
    expected, expected_eval = run(trl.SFTTrainer, tmp_path, {"gradient_checkpointing": False} | settings)
    logged, evaluated = run(LongSFTTrainer, tmp_path, {"gradient_checkpointing": False} | settings, chunk_config=CHUNKS)
    for key in ("loss", "grad_norm"):
        assert len(logged.of(key)) == 3
        assert logged.of(key) == pytest.approx(expected.of(key), rel=1e-5), key
    assert evaluated == pytest.approx(expected_eval, rel=1e-5)
