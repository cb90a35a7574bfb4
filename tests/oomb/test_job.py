"""What is checked before work starts, and three steps of a job against three dense ones."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config, Qwen2Config, Qwen2ForCausalLM

from oomb import trainer_checks
from oomb.checkpoint import save_checkpoint
from oomb.cli.train import make_trainer
from oomb.job import choose_device, prepare
from oomb.tiny import byte_tokenizer, tiny_model
from oomb.train_config import TrainConfig


def config(tmp_path, **settings):
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {i}: {i * i}\n" for i in range(200)))
    base = {"model": "tiny", "data": str(text), "context": 96, "chunk_tokens": 32, "page_tokens": 16, "steps": 3}
    base |= {"lr": 0.01, "output": str(tmp_path / "out"), "device": "cpu", "generate_tokens": 0}
    return TrainConfig.from_settings(base | settings)


def fit(job):
    trainer, progress = make_trainer(job)
    progress._report = lambda line: None
    trainer.train()
    return progress.records


def lr_factor(step, steps, warmup):
    """The learning rate rises, then falls as a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup + 1) / (steps - warmup)))


def test_three_steps_equal_three_dense_steps(tmp_path):
    settings = config(
        tmp_path, dtype="float64", warmup_steps=1, weight_decay=0.1, max_grad_norm=0.5,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    job = prepare(settings)
    twin = tiny_model(settings.context, settings.seed).double()
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    records = fit(job)
    text = (tmp_path / "text.txt").read_bytes()
    for step in range(3):
        ids = torch.tensor([list(text[96 * step : 96 * (step + 1)])])
        loss = torch.nn.functional.cross_entropy(twin(input_ids=ids).logits[0, :-1].double(), ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * lr_factor(step, 3, 1)
        optimizer.step()
        # The library's eager and SDPA softmax may run in float32 inside: judged to its precision.
        assert math.isclose(records[step].loss, loss.item(), rel_tol=1e-6)
        assert math.isclose(records[step].grad_norm, float(norm), rel_tol=1e-4)
        assert math.isclose(records[step].lr, optimizer.param_groups[0]["lr"], rel_tol=1e-6)
    for (name, ours), theirs in zip(job.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)


def test_one_pass_over_the_data_when_no_steps_are_given(tmp_path):
    job = prepare(config(tmp_path, steps=None))
    assert len(fit(job)) == len(job.data) > 10


def test_the_same_seed_gives_the_same_run(tmp_path):
    losses = [[r.loss for r in fit(prepare(config(tmp_path, seed=seed)))] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_mixed_keeps_float32_weights_and_computes_in_bfloat16(tmp_path):
    runs = {}
    for dtype in ("float32", "mixed"):
        job = prepare(config(tmp_path, dtype=dtype))
        assert {p.dtype for p in job.model.parameters()} == {torch.float32}
        runs[dtype] = [record.loss for record in fit(job)]
    assert runs["mixed"] != runs["float32"] and runs["mixed"] == pytest.approx(runs["float32"], rel=0.02)


def make_model(folder, *, vocabulary=300, positions=32768, width=16):
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=width, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=positions,
        )
    )  # fmt: skip
    save_checkpoint(folder, model, byte_tokenizer())
    return str(folder)


def test_a_model_of_ones_own_is_loaded(tmp_path):
    job = prepare(config(tmp_path, model=make_model(tmp_path / "mine")))
    assert job.model.config.hidden_size == 16 and job.model.training
    assert len(fit(job)) == 3


def test_adapters_are_trained_and_nothing_else(tmp_path):
    settings = {"adapter": "lora", "lora_rank": 3, "lora_targets": "q_proj, v_proj", "lora_dropout": 0.1}
    job = prepare(config(tmp_path, model=make_model(tmp_path / "mine"), **settings))
    before = {name: p.clone() for name, p in job.model.named_parameters()}
    fit(job)
    for name, p in job.model.named_parameters():
        assert p.requires_grad == ("lora" in name)
        assert "lora_A" not in name or p.shape[0] == 3
        assert torch.equal(p, before[name]) == ("lora_B" not in name and "lora_A" not in name), name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}),
        ({"rope_type": "linear", "rope_factor": 5.0}, {"rope_type": "linear", "factor": 5.0}),
        ({"rope_type": "dynamic"}, {"rope_type": "dynamic", "factor": 3.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    ],
)
def test_positions_beyond_the_models_own(tmp_path, settings, expected):
    """The setting reaches the model, trains, and is saved with it."""
    model = make_model(tmp_path / "mine", positions=32)
    job = prepare(config(tmp_path, model=model, dtype="float32", **settings))
    fit(job)
    save_checkpoint(tmp_path / "saved", job.model, job.tokenizer)
    for found in (job.model.config, AutoConfig.from_pretrained(tmp_path / "saved")):
        assert expected.items() <= found.rope_parameters.items()
    assert job.model.config.rope_parameters["rope_theta"] == settings.get("rope_theta", 10000.0)


@pytest.mark.parametrize("kind", ["GPTNeoX", "Glm", "Phi"])
@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_a_model_that_turns_a_part_of_each_head_goes_on_to(tmp_path, kind, rope):
    """A factor of one is no change."""
    sizes = {
        "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.5, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    sizes |= {"head_dim": 8} if kind == "Glm" else {}
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    save_checkpoint(tmp_path / "mine", plain, byte_tokenizer())
    job = prepare(config(tmp_path, model=str(tmp_path / "mine"), dtype="float32", rope_type=rope, rope_factor=1.0))
    ids = torch.arange(40)[None]
    assert torch.allclose(job.model.eval()(ids).logits, plain(ids).logits, atol=1e-5)


def test_a_rope_that_could_not_be_saved_is_refused_before_training(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(Phi3Config(vocab_size=257, pad_token_id=0, **sizes))
    save_checkpoint(tmp_path / "mine", model, byte_tokenizer())
    with pytest.raises(ValueError, match="rope_type, rope_theta: Phi3Config takes no such setting"):
        prepare(config(tmp_path, model=str(tmp_path / "mine"), rope_type="yarn"))


def test_yarn_changes_the_rotary_frequencies(tmp_path):
    model = make_model(tmp_path / "mine", positions=32)
    plain, yarn = (
        prepare(config(tmp_path, model=model, **settings)).model.model.rotary_emb
        for settings in ({}, {"rope_type": "yarn"})
    )
    assert not torch.equal(plain.inv_freq, yarn.inv_freq)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"device": "cuda:99"}, r"device: cuda:99 was asked for, but"),
        ({"data": "/absent/text"}, "data: there is no file or folder '/absent/text'"),
        ({"eval_data": "/absent/text"}, "data: there is no file or folder '/absent/text'"),
        ({"eval_steps": 2}, "there is nothing to evaluate on: set eval_data"),
        ({"model": "./absent"}, "model: there is no folder 'absent'"),
        ({"model": "absent"}, "model: there is no folder 'absent'"),
        ({"model": "packages/absent"}, "model: there is no folder 'packages/absent'"),
        ({"model": "README.md"}, "model: there is no folder 'README.md'"),
        ({"context": 100_000}, r"found [\d,]+ tokens in 1 files, need 100,000"),
        ({"lr_scheduler_type": "magic"}, "transformers refuses the settings"),
        ({"optim": "lomo"}, "inside the backward pass"),
        ({"adapter": "qlora"}, "bitsandbytes|a saved model"),
        ({"adapter": "lora", "lora_targets": "absent"}, "lora_targets: "),
        ({"resume": True}, "no complete checkpoint"),
    ],
)
def test_what_can_be_known_before_is_said_before(tmp_path, monkeypatch, settings, complaint):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ValueError, match=complaint) as caught:
        prepare(config(tmp_path, **settings))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        ({"optim": "adamw_8bit"}, "qlora"),
        ({"optim": "paged_adamw_8bit"}, "qlora"),
        ({"optim": "adamw_torch_8bit"}, "torchao"),
        ({"report_to": "tensorboard"}, "tensorboard"),
        ({"adapter": "lora"}, "peft"),
        ({"use_liger_kernel": True}, "liger"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, settings, extra):
    find = trainer_checks.importlib.util.find_spec
    missing = {package for package, name in trainer_checks.EXTRAS.items() if name == extra}
    monkeypatch.setattr(
        trainer_checks.importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    with pytest.raises(ValueError, match=rf'pip install "oomb\[{extra}\]"'):
        make_trainer(prepare(config(tmp_path, **settings)))


@pytest.mark.parametrize("optimizer", ["adamw_torch_8bit", "adamw_torch_4bit", "adamw_8bit", "paged_adamw_8bit"])
def test_optimizers_with_small_states(tmp_path, optimizer):
    pytest.importorskip("torchao" if "torch" in optimizer else "bitsandbytes")
    plain = fit(prepare(config(tmp_path, steps=4)))
    small = fit(prepare(config(tmp_path, steps=4, optim=optimizer)))
    assert small[-1].loss == pytest.approx(plain[-1].loss, rel=0.05) and small[-1].loss < small[0].loss


def test_adapters_over_a_base_in_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    job = prepare(config(tmp_path, model=make_model(tmp_path / "mine", width=128), adapter="qlora"))
    kinds = {type(module).__name__ for module in job.model.modules()}
    assert "Linear4bit" in kinds
    records = fit(job)
    assert records[-1].loss < records[0].loss


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_cuda_that_is_absent_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sees no CUDA device"):
        prepare(config(tmp_path, device="cuda"))
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="output: cannot write to"):
            prepare(config(tmp_path, output=str(output)))


def test_an_output_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint" / "notes.txt").write_text("not ours")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        prepare(config(tmp_path))


def test_checkpoints_of_an_earlier_run_are_neither_mixed_nor_deleted(tmp_path):
    fit(prepare(config(tmp_path, save_steps=2)))
    with pytest.raises(ValueError, match=r"holds checkpoint-3 of an earlier run: go on with it \(--resume true\)"):
        prepare(config(tmp_path))
    assert prepare(config(tmp_path, resume=True, eval_data=str(tmp_path / "text.txt"))).resume_from is not None
    for changed, was in (
        ({"seed": 5}, "seed was 0"),
        ({"lr": 0.5}, "lr was 0.01"),
        ({"optim": "sgd"}, "optim was None"),
    ):
        with pytest.raises(ValueError, match=f"resume: {was} in the run"):
            prepare(config(tmp_path, resume=True, **changed))


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path):
    model = make_model(tmp_path / "mine", vocabulary=200)
    with pytest.raises(ValueError, match=r"ids up to 256, the model's vocabulary ends at 199"):
        prepare(config(tmp_path, model=model))


def test_a_folder_without_a_model_is_one_clear_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="model: cannot load a tokenizer from") as caught:
        prepare(config(tmp_path, model=str(tmp_path / "empty")))
    assert "\n" not in str(caught.value)


@pytest.fixture
def driver(monkeypatch):
    """Two CUDA devices, as far as torch.cuda asks; the first question to CUDA settles which of them there are."""
    settled = []

    def count():
        settled[:] = settled or os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        return len(settled)

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", count, raising=False)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.setattr(torch.cuda, "init", lambda: setattr(torch.cuda, "_initialized", True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return settled


@pytest.mark.parametrize("name, seen", [("cuda:1", "1"), ("cuda:0", "0"), ("cuda", "0"), ("auto", "0")])
def test_the_device_that_is_asked_for_is_the_one_that_is_seen(driver, name, seen):
    assert choose_device(name) == torch.device("cuda:0")
    assert driver == [seen] and torch.cuda.device_count() == 1


def test_what_cuda_sees_already_cannot_be_changed(driver, monkeypatch):
    assert torch.cuda.is_available()
    assert choose_device("auto") == torch.device("cuda:0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="start it with CUDA_VISIBLE_DEVICES=1"):
        choose_device("cuda:1")


def test_devices_that_are_not_there(driver, monkeypatch):
    with pytest.raises(ValueError, match="there are 2 CUDA devices"):
        choose_device("cuda:2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one of WORLD_SIZE=2"):
        choose_device("auto")
