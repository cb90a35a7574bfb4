"""OombTrainer beside the stock Trainer on a GPU: float32, bfloat16 and float16, and a run that goes on."""

from __future__ import annotations

import pytest
import torch
from tests.models import build
from tests.oomb.test_cuda import wide
from tests.oomb.trainers import run
from transformers import Trainer

from oomb import ChunkConfig, OombTrainer, verify
from oomb.cli.main import main

pytestmark = pytest.mark.cuda
CHUNKS = ChunkConfig(chunk_tokens=128, page_tokens=64)


def rows(count):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(61, (length,), generator=generator).tolist() for length in (300, 500, 411)]
    return [{"input_ids": ids[i % 3], "labels": ids[i % 3]} for i in range(count)]


def both(settings, tolerance, chunks=CHUNKS):
    def compare(tmp_path, name="qwen3"):
        model = build(wide(name, torch.float32), dtype=torch.float32)
        base = {"use_cpu": False, "optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": 1} | settings
        _, expected = run(Trainer, model, tmp_path, rows(8), settings=base)
        _, logged = run(OombTrainer, model, tmp_path, rows(8), settings=base, chunk_config=chunks)
        for key in ("loss", "grad_norm"):
            assert logged.of(key) == pytest.approx(expected.of(key), rel=tolerance), key

    return compare


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_three_steps_in_float32(tmp_path, name):
    both({"gradient_accumulation_steps": 2}, 1e-4)(tmp_path, name)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_three_steps_in_16_bits_over_float32_weights(tmp_path, kind):
    """With float16 the Trainer scales the loss, clips what was scaled back and may skip a step: ours must agree."""
    both({kind: True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, 2e-2)(tmp_path)


def test_adam_fused(tmp_path):
    both({"optim": "adamw_torch_fused", "learning_rate": 1e-3}, 1e-3)(tmp_path)


def test_verify_passes_in_bfloat16():
    model = build(wide("qwen3", torch.bfloat16), dtype=torch.bfloat16, device="cuda")
    found = verify(model, config=CHUNKS, tokens=400)
    assert found.passed, "\n".join(found.lines())


def test_a_run_goes_on(tmp_path, capsys):
    pytest.importorskip("datasets", reason="oomb train reads its data through datasets")
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(400)))
    sizes = ["--context", "512", "--chunk-tokens", "128", "--page-tokens", "64", "--generate-tokens", "0"]
    arguments = ["train", "--data", str(tmp_path / "text.txt"), *sizes, "--device", "cuda", "--save-steps", "2"]
    arguments += ["--output", str(tmp_path / "out"), "--train-sampling-strategy", "sequential"]
    assert main([*arguments, "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "(host " in shown and ("mfu" in shown or "H200" not in torch.cuda.get_device_name())
    import shutil

    shutil.rmtree(tmp_path / "out" / "checkpoints" / "checkpoint-4")
    assert main([*arguments, "--steps", "4", "--resume", "true"]) == 0
    again = capsys.readouterr().out
    assert "resume      from" in again and "step 3/4" in again and "step 2/4" not in again


@pytest.mark.parametrize("optimizer", ["adamw_torch_8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_optimizers_with_small_states(tmp_path, optimizer):
    pytest.importorskip("torchao" if "torch" in optimizer else "bitsandbytes")
    both({"optim": optimizer, "learning_rate": 1e-3}, 1e-2)(tmp_path)
