"""OombTrainer beside the stock Trainer on a GPU: float32, bfloat16 and float16, and a run that goes on."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.models import build
from tests.oomb.test_cuda import wide
from tests.oomb.trainers import Losses, arguments, collate, run
from transformers import Trainer

from oomb import ChunkConfig, OombTrainer, verify
from oomb.cli.main import main

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_gpu")]
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


def test_a_run_goes_on(tmp_path):
    """From the checkpoint in its middle: the same losses, weights and optimizer as without the break."""
    model = build(wide("qwen3", torch.float32), dtype=torch.float32)
    settings = {"use_cpu": False, "optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    whole, expected = run(OombTrainer, model, tmp_path, rows(8), settings=settings, chunk_config=CHUNKS)
    shutil.rmtree(tmp_path / "checkpoint-4")
    again, logged = run(OombTrainer, model, tmp_path, rows(8), settings=settings, chunk_config=CHUNKS, resume=True)
    assert again.state.global_step == 4
    assert logged.of("loss") == pytest.approx(expected.of("loss")[2:], rel=1e-5)
    for name, weight in whole.model.state_dict().items():
        assert (again.model.state_dict()[name] - weight).norm() <= 1e-3 * weight.norm(), name


def test_the_command_goes_on(tmp_path, capsys):
    pytest.importorskip("datasets", reason="oomb train reads its data through datasets")
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(400)))
    sizes = ["--context", "512", "--chunk-tokens", "128", "--page-tokens", "64", "--generate-tokens", "0"]
    arguments = ["train", "--data", str(tmp_path / "text.txt"), *sizes, "--device", "cuda", "--save-steps", "2"]
    arguments += ["--output", str(tmp_path / "out"), "--train-sampling-strategy", "sequential"]
    assert main([*arguments, "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "(host " in shown and ("mfu" in shown or "H200" not in torch.cuda.get_device_name())
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "checkpoint-4")
    assert main([*arguments, "--steps", "4", "--resume", "true"]) == 0
    again = capsys.readouterr().out
    assert "resume      from" in again and "step 3/4" in again and "step 2/4" not in again


@pytest.mark.parametrize("optimizer", ["adamw_torch_8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_optimizers_with_small_states(tmp_path, optimizer):
    package = "torchao" if "torch" in optimizer else "bitsandbytes"
    pytest.importorskip(package, reason=f"{optimizer} is {package}'s")
    both({"optim": optimizer, "learning_rate": 1e-3}, 1e-2)(tmp_path)


def test_optimizer_states_on_the_host(tmp_path):
    """torchao's CPUOffloadOptimizer, handed over as any optimizer is; its states never lie on the device."""
    torchao = pytest.importorskip("torchao.optim", reason="CPUOffloadOptimizer is torchao's")
    model = build(wide("qwen3", torch.float32), dtype=torch.float32, device="cuda")
    optimizer = torchao.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=1e-3), lambda _: 1.0)
    plain = build(wide("qwen3", torch.float32), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    settings = {"use_cpu": False, "optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    _, expected = run(OombTrainer, plain, tmp_path, rows(8), settings=settings, chunk_config=CHUNKS)
    trainer = OombTrainer(
        model=model, args=arguments(tmp_path, **settings), train_dataset=rows(8), data_collator=collate,
        callbacks=[losses := Losses()], chunk_config=CHUNKS, optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()
    assert losses.of("loss") == pytest.approx(expected.of("loss"), rel=1e-3)


def test_adapters_over_four_bits(tmp_path):
    """QLoRA: the base in 4 bits stays as it is, the adapters learn what the stock Trainer's learn."""
    pytest.importorskip("bitsandbytes", reason="the base in 4 bits is bitsandbytes'")
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    build(wide("qwen3", torch.float32), dtype=torch.float32).save_pretrained(tmp_path / "base")
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    losses = {}
    for kind, more in ((Trainer, {}), (OombTrainer, {"chunk_config": CHUNKS})):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=packed, device_map={"": 0}, dtype=torch.bfloat16
        )
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        settings = {"use_cpu": False, "learning_rate": 1e-3, "bf16": True}
        trainer = kind(
            model=model, args=arguments(tmp_path / kind.__name__, **settings), train_dataset=rows(8),
            data_collator=collate, callbacks=[seen := Losses()], **more,
        )  # fmt: skip
        trainer.train()
        losses[kind] = seen.of("loss")
    assert losses[OombTrainer] == pytest.approx(losses[Trainer], rel=2e-2)
