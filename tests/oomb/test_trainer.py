"""The loop: schedule, clipping, what is checked before work starts, and what a step leaves behind."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from oomb import trainer
from oomb.checkpoint import save_checkpoint
from oomb.data import Windows
from oomb.progress import StepRecord, format_bytes
from oomb.tiny import byte_tokenizer, tiny_model
from oomb.train_config import TrainConfig
from oomb.trainer import Job, fit, lr_factor, prepare


def config(tmp_path, **settings):
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {i}: {i * i}\n" for i in range(200)))
    base = {"model": "tiny", "data": str(text), "context": 96, "chunk_tokens": 32, "page_tokens": 16, "steps": 3}
    base |= {"lr": 0.01, "output": str(tmp_path / "out"), "device": "cpu", "generate_tokens": 0}
    return TrainConfig.from_settings(base | settings)


def test_the_learning_rate_rises_falls_and_ends_at_a_tenth():
    factors = [lr_factor(step, 10, 3) for step in range(10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:] == sorted(factors[3:], reverse=True) and math.isclose(factors[-1], 0.1)
    assert lr_factor(0, 1, 0) == 1.0 and 0 < lr_factor(0, 1, 5) < 1


def test_three_steps_equal_three_dense_steps(tmp_path):
    settings = config(tmp_path, dtype="float64", warmup_steps=1, weight_decay=0.1, max_grad_norm=0.5)
    job = prepare(settings)
    twin = tiny_model(settings.context, settings.seed).double()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    records = fit(job, report=lambda line: None)
    text = (tmp_path / "text.txt").read_bytes()
    for step in range(3):
        ids = torch.tensor([list(text[96 * step : 96 * (step + 1)])])
        logits = twin(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * lr_factor(step, 3, 1)
        optimizer.step()
        # The library's eager and SDPA softmax may run in float32 inside: judged to its precision.
        assert math.isclose(records[step].loss, loss.item(), rel_tol=1e-6)
        assert math.isclose(records[step].grad_norm, float(norm), rel_tol=1e-4)
        assert records[step].lr == optimizer.param_groups[0]["lr"]
    for (name, ours), theirs in zip(job.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)


def test_every_step_is_reported_and_logged(tmp_path):
    lines = []
    records = fit(prepare(config(tmp_path)), report=lines.append)
    assert len(lines) == 3 and all(word in lines[0] for word in ("step 1/3", "loss", "tokens/s", "peak"))
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert logged == [dataclasses.asdict(record) for record in records]
    assert all(record.peak_bytes > 50 << 20 and record.tokens_per_second > 0 for record in records)


def test_the_bar_moves_inside_a_step(tmp_path, monkeypatch):
    moves = []
    monkeypatch.setattr(trainer.StepBar, "chunk", lambda self, done, total: moves.append((done, total)))
    fit(prepare(config(tmp_path, steps=2)), report=lambda line: None)
    total = moves[0][1]
    assert total >= 5  # two chunks filled, three walked back
    assert moves == [(done, total) for done in range(1, total + 1)] * 2


def test_one_pass_over_the_data_when_no_steps_are_given(tmp_path):
    job = prepare(config(tmp_path, steps=None))
    assert job.steps == len(job.windows) > 10


def test_the_same_seed_gives_the_same_run(tmp_path):
    losses = [[r.loss for r in fit(prepare(config(tmp_path, seed=s)), report=lambda _: None)] for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tmp_path):
    job = prepare(config(tmp_path, lr=1e30))  # the first step throws the weights far enough for the second to overflow
    after: list[list[torch.Tensor]] = []
    with pytest.raises(FloatingPointError, match=r"of step 2 is (nan|inf).*weights of step 1"):
        fit(job, report=lambda line: after.append([p.detach().clone() for p in job.model.parameters()]))
    assert len(after) == 1
    for one, other in zip(after[0], job.model.parameters(), strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


def test_mixed_keeps_float32_weights_and_computes_in_bfloat16(tmp_path):
    runs = {}
    for dtype in ("float32", "mixed"):
        job = prepare(config(tmp_path, dtype=dtype))
        assert {p.dtype for p in job.model.parameters()} == {torch.float32}
        runs[dtype] = [record.loss for record in fit(job, report=lambda line: None)]
    assert runs["mixed"] != runs["float32"]
    assert runs["mixed"] == pytest.approx(runs["float32"], rel=0.02)


def make_model(folder, *, vocabulary=300):
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1,
        )
    )  # fmt: skip
    save_checkpoint(folder, model, byte_tokenizer())
    return str(folder)


def test_a_model_of_ones_own_is_loaded(tmp_path):
    job = prepare(config(tmp_path, model=make_model(tmp_path / "mine")))
    assert job.model.config.hidden_size == 16 and job.model.training
    assert len(fit(job, report=lambda line: None)) == 3


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"device": "cuda:99"}, r"device: cuda:99 was asked for, but"),
        ({"data": "/absent/text"}, "data: there is no file or folder '/absent/text'"),
        ({"model": "./absent"}, "model: there is no folder 'absent'"),
        ({"model": "absent"}, "model: there is no folder 'absent'"),
        ({"model": "packages/absent"}, "model: there is no folder 'packages/absent'"),
        ({"model": "README.md"}, "model: there is no folder 'README.md'"),
        ({"context": 100_000}, r"found [\d,]+ tokens in 1 files, need 100,000"),
    ],
)
def test_what_can_be_known_before_is_said_before(tmp_path, monkeypatch, settings, complaint):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ValueError, match=complaint):
        prepare(config(tmp_path, **settings))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


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


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path):
    model = make_model(tmp_path / "mine", vocabulary=200)
    with pytest.raises(ValueError, match=r"ids up to 256, the model's vocabulary ends at 199"):
        prepare(config(tmp_path, model=model))


def test_a_folder_without_a_model_is_one_clear_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="model: cannot load a tokenizer from") as caught:
        prepare(config(tmp_path, model=str(tmp_path / "empty")))
    assert "\n" not in str(caught.value)


def test_a_job_can_be_put_together_by_hand(tmp_path):
    settings = config(tmp_path, steps=2)
    (tmp_path / "out").mkdir()
    ids = torch.randint(0, 256, (2, 96), dtype=torch.int32)
    job = Job(settings, tiny_model(96, 0), byte_tokenizer(), Windows(ids, 0, (), 0), torch.device("cpu"), False)
    assert len(fit(job, report=lambda line: None)) == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.50 GiB"), (5 << 40, "5120.00 GiB")],
)
def test_bytes_are_shown_with_a_unit(count, text):
    assert format_bytes(count) == text


def test_a_line_holds_what_a_person_looks_for():
    line = StepRecord(7, 3.25, 1.5, 0.01, 2.0, 8192.0, 3 << 29).line(120)
    assert "step   7/120" in line and "loss 3.2500" in line and "8,192 tokens/s" in line and "peak 1.50 GiB" in line
