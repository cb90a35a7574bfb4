"""What is shown of a run: the bar inside a step, a line and a row for each, what is reported."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
import torch
from tests.oomb.trainers import CHUNKS, arguments, collate, model, rows

from oomb import OombTrainer
from oomb.eta import ModelWork
from oomb.plots import draw_loss, draw_memory
from oomb.progress import Progress, StepBar, StepRecord, format_bytes, utilization

PNG = b"\x89PNG\r\n\x1a\n"
RECORD = StepRecord(7, 3.25, 1.5, 0.01, 2.0, 8192.0, 3 << 29, 5 << 29, 0.416)


def trained(tmp_path, *, steps=3, **settings):
    lines, made = [], model()
    progress = Progress(ModelWork.of(made), tmp_path / "metrics.jsonl", lines.append)
    trainer = OombTrainer(
        made, arguments(tmp_path, max_steps=steps, **settings), train_dataset=rows(8), data_collator=collate,
        callbacks=[progress], chunk_config=CHUNKS, eval_dataset=rows(2),
    )  # fmt: skip
    return trainer, progress, lines


def test_every_step_is_shown_logged_and_reported(tmp_path):
    trainer, progress, lines = trained(tmp_path)
    trainer.train()
    assert len(lines) == 3 and all(word in lines[0] for word in ("step 1/3", "loss", "tokens/s", "peak"))
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert logged == [dataclasses.asdict(record) for record in progress.records]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry, record in zip(history, progress.records, strict=True):
        assert entry["loss"] == record.loss and entry["tokens_per_second"] == record.tokens_per_second > 0
        assert entry["host_peak_bytes"] == record.host_peak_bytes > 50 << 20


def test_tokens_of_all_batches_of_a_step_are_counted(tmp_path):
    trainer, progress, _ = trained(
        tmp_path, steps=1, gradient_accumulation_steps=4, train_sampling_strategy="sequential"
    )
    trainer.train()
    (record,) = progress.records
    assert record.tokens_per_second * record.seconds == pytest.approx(23 + 17 + 20 + 23)


def test_metrics_reach_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, progress, _ = trained(tmp_path, report_to="tensorboard")
    trainer.train()
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    read = EventAccumulator(str(events.parent))
    read.Reload()
    for name, values in (("train/loss", [r.loss for r in progress.records]), ("train/tokens_per_second", None)):
        shown = [event.value for event in read.Scalars(name)]
        assert len(shown) == 3 and (values is None or shown == pytest.approx(values))


def test_a_run_that_goes_on_keeps_the_rows_before(tmp_path):
    trained(tmp_path, save_strategy="steps", save_steps=2)[0].train()
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    trainer, progress, _ = trained(tmp_path, steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[:2] == before[:2] and [json.loads(line)["step"] for line in after] == [1, 2, 3, 4]
    assert len(progress.records) == 4


def test_evaluation_is_shown_and_does_not_move_the_bar(tmp_path):
    trainer, _, lines = trained(tmp_path, steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert sum(line.startswith("held out after step") for line in lines) == 2
    assert sum("tokens/s" in line for line in lines) == 2


@pytest.mark.parametrize("group", [1, 2])
def test_the_bar_moves_inside_a_step_and_never_back(tmp_path, monkeypatch, group):
    moves = []
    monkeypatch.setattr(
        StepBar, "show", lambda self, step, share, chunk, left: moves.append((step, share, chunk, left))
    )
    trained(tmp_path, steps=2, gradient_accumulation_steps=group)[0].train()
    first = [share for step, share, _, _ in moves if step == 1]
    assert len(first) == group * 7 - (group - 1) * 2 or len(first) >= 7 * group - 2
    assert 0 < first[0] < 0.5 and first[-1] == pytest.approx(1.0)
    assert all(left >= 0 for *_, left in moves)


def test_the_bar_shows_step_chunk_and_the_time_that_is_left():
    stream = io.StringIO()
    bar = StepBar(4, file=stream)
    bar._bar.mininterval = 0
    bar.show(2, 0.5, "chunk 3/7", 3725.0)
    bar._bar.refresh()
    assert re.search(r"step 2/4, chunk 3/7\s+38%.*1:02:05 left", stream.getvalue()), stream.getvalue()
    bar.show(2, 0.25, "chunk 4/7", 59.6)  # an estimate that was corrected
    assert bar._bar.n == 1.5
    bar.close()


def test_a_line_holds_what_a_person_looks_for():
    line = RECORD.line(120)
    for part in ("step   7/120", "loss 3.2500", "8,192 tokens/s", "mfu 42%", "peak 1.50 GiB (host 2.50 GiB)", "2.0 s"):
        assert part in line
    assert "host" not in dataclasses.replace(RECORD, peak_bytes=5 << 29, mfu=None).line(1)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.50 GiB"), (5 << 40, "5120.00 GiB")],
)
def test_bytes_are_shown_with_a_unit(count, text):
    assert format_bytes(count) == text


def test_pictures(tmp_path):
    records = [dataclasses.replace(RECORD, step=step) for step in (1, 2, 3)]
    draw_loss(tmp_path / "loss.png", records, "loss")
    draw_memory(tmp_path / "memory.png", records, "memory")
    assert all((tmp_path / name).read_bytes()[:8] == PNG for name in ("loss.png", "memory.png"))


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H200", 989), ("NVIDIA GH200 480GB", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40", None), ("NVIDIA L40S", 362),
        ("NVIDIA RTX A1000", None), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)  # fmt: skip
def test_a_device_is_measured_by_its_own_peak_or_not_at_all(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    used = utilization(1e12, 1.0, torch.device("cuda"))
    assert used is None if tflops is None else used == pytest.approx(1 / tflops)
