"""Model folders that are not what they seem, and what libraries raise: one line, and nothing overwritten."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BartForConditionalGeneration

from oomb import hf_trainer
from oomb.cli import train as command
from oomb.cli.main import main
from oomb.tiny import byte_tokenizer, tiny_model


@pytest.fixture
def run(tmp_path, capsys):
    """Train a folder for one step. Returns the exit code and what stderr held of errors."""
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(400)))

    def start(model, *more: str) -> tuple[int, list[str]]:
        paths = ["--model", str(model), "--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
        sizes = ["--context", "256", "--chunk-tokens", "64", "--page-tokens", "32", "--steps", "1"]
        code = main(["train", *paths, *sizes, "--device", "cpu", "--generate-tokens", "0", *more])
        return code, [line for line in capsys.readouterr().err.splitlines() if "error" in line]

    return start


def folder(path, *, tokenizer: bool = True):
    tiny_model(256, 0).save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return path


def test_a_folder_without_a_tokenizer(run, tmp_path):
    code, errors = run(folder(tmp_path / "model", tokenizer=False))
    assert code == 2 and len(errors) == 1 and "no tokens" in errors[0]


def test_what_reads_no_text_needs_no_tokenizer(tmp_path, capsys):
    """A plan not even weights: a config is enough."""
    sizes = ["--context", "128", "--chunk-tokens", "64", "--page-tokens", "32", "--steps", "1", "--device", "cpu"]
    model = ["--model", str(folder(tmp_path / "model", tokenizer=False))]
    for name in ("plan", "verify", "bench"):
        assert main([name, *model, *sizes]) == 0, capsys.readouterr().err
    for path in (tmp_path / "model").iterdir():
        if path.name != "config.json":
            path.unlink()
    assert main(["plan", *model, *sizes]) == 0
    assert "longest context here" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1])
def test_what_goes_wrong_while_data_are_streamed_is_one_line(run, tmp_path, workers):
    """Though a worker would hand over its whole traceback."""
    rows = "".join(json.dumps({"text": f"row {i} " * 9}) + "\n" for i in range(40))
    (tmp_path / "rows.jsonl").write_text(rows + '{"text": 5}\n' * 40)
    data = ["--data", str(tmp_path / "rows.jsonl"), "--streaming", "true", "--dataloader-num-workers", str(workers)]
    code, errors = run(folder(tmp_path / "model"), *data)
    assert code == 2 and len(errors) == 1
    assert "oomb: error: data: " in errors[0] and "rows.jsonl" in errors[0] and "Traceback" not in errors[0]


def test_weights_that_are_missing_or_of_another_shape(run, tmp_path):
    model = folder(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for changed in ({}, {name: weights[name][:5].clone()}):
        kept = {key: value for key, value in weights.items() if key != name} | changed
        save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
        code, errors = run(model)
        assert code == 2 and len(errors) == 1 and name in errors[0], errors


def test_an_encoder_decoder(run, tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForConditionalGeneration(BartConfig(vocab_size=300, d_model=8, **sizes, **heads))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    code, errors = run(tmp_path / "model")
    assert code == 2 and len(errors) == 1 and "encoder-decoder" in errors[0]


def test_a_run_that_is_refused_leaves_the_metrics_of_the_one_before(run, tmp_path):
    model = folder(tmp_path / "model")
    assert run(model)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    code, errors = run(model, "--backend", "cudnn")
    assert code == 2 and len(errors) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()} == before


def test_memory_of_the_gpu(run, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(hf_trainer, "chunked_backward", full)
    code, errors = run(folder(tmp_path / "model"))
    assert code == 2 and len(errors) == 1 and "out of GPU memory" in errors[0] and "chunk_tokens" in errors[0]


def test_a_full_disk_as_safetensors_reports_it(run, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*_args, **_kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(command, "save_checkpoint", full)
    code, errors = run(folder(tmp_path / "model"))
    assert code == 2 and len(errors) == 1 and "No space left" in errors[0]


def test_help_needs_no_libraries():
    script = (
        "import sys; from oomb.cli.main import main\n"
        "try:\n    main([])\nexcept SystemExit:\n    pass\nprint('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_key_twice_in_a_file(run, tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 1\nsteps: 2\n")
    code, errors = run(folder(tmp_path / "model"), "--config", str(tmp_path / "run.yaml"))
    assert code == 2 and "set twice" in errors[0]
