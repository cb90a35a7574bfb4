"""`oomb train` from the outside: what it writes, what it says, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb import trainer
from oomb.cli import train as command
from oomb.cli.main import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(400)))
    return [
        "train", "--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--context", "256",
        "--chunk-tokens", "64", "--page-tokens", "32", "--steps", "4", "--device", "cpu", "--generate-tokens", "5",
    ]  # fmt: skip


def test_a_run_leaves_a_checkpoint_a_picture_and_its_numbers(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.count("tokens/s") == 4 and "step 4/4" in shown.out and "reloaded" in shown.out
    assert "chunk/s" in shown.err or "s/chunk" in shown.err or "chunk" in shown.err
    out = tmp_path / "out"
    assert (out / "loss.png").read_bytes()[:8] == PNG
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(out / "checkpoint")
    prompt = tokenizer("7 squared is", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert ids.shape[1] == len("7 squared is") + 4
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint", "loss.png", "metrics.jsonl", "settings.yaml"]


@pytest.mark.slow
def test_the_demo_learns(tmp_path, capsys):
    """The embedded default at an eighth of its context: the loss falls by two nats a byte and more."""
    assert main(["train", "--context", "2048", "--output", str(tmp_path), "--device", "cpu"]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 16 and losses[0] - losses[-1] > 2
    assert "stdlib" in capsys.readouterr().out


def test_the_written_settings_repeat_the_run(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    first = (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes()
    settings = yaml.safe_load((tmp_path / "out" / "settings.yaml").read_text())
    assert settings["chunk_tokens"] == 64 and settings["steps"] == 4
    assert main(["train", str(tmp_path / "out" / "settings.yaml"), "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "checkpoint" / "model.safetensors").read_bytes() == first


def test_a_second_run_replaces_the_checkpoint_of_the_first(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    first = (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes()
    assert main([*arguments, "--seed", "1"]) == 0
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes() != first
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_save_that_fails_keeps_the_checkpoint_before(arguments, tmp_path, capsys, monkeypatch):
    assert main(arguments) == 0
    first = (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes()

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    assert main([*arguments, "--seed", "1"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes() == first
    AutoTokenizer.from_pretrained(tmp_path / "out" / "checkpoint")


@pytest.mark.parametrize("where", ["step", "save"])
def test_an_interrupt_keeps_the_checkpoint_before(arguments, tmp_path, capsys, monkeypatch, where):
    assert main(arguments) == 0
    first = (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    if where == "step":
        monkeypatch.setattr(trainer.StepBar, "chunk", interrupt)
    else:
        monkeypatch.setattr(command, "save_checkpoint", interrupt)
    assert main([*arguments, "--seed", "1"]) == 130
    assert "is as it was" in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes() == first


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_ends_the_process_cleanly(arguments, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "oomb.cli.main", *arguments, "--steps", "100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted: no checkpoint was written" in errors and "Traceback" not in errors
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["--chunk-tokns", "8"], "did you mean 'chunk_tokens'"),
        (["--steps", "many"], "--steps must be a whole number"),
        (["--page-tokens", "0"], "page_tokens must be"),
        (["--context", "1000000"], "need 1,000,000"),
        (["--data", "absent.txt"], "no file or folder 'absent.txt'"),
        (["--model", "./absent"], "there is no folder 'absent'"),
        (["--attention", "sparse", "--chunk-tokens", "100"], "chunk_tokens must be a multiple"),
        (["--device", "cuda:99"], "was asked for, but"),
        (["absent.yaml"], "cannot read the config file"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(arguments, capsys, extra, complaint):
    assert main([*arguments, *extra]) == 2
    errors = capsys.readouterr().err
    assert complaint in errors and errors.startswith("oomb: error: ") and errors.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_backend_that_is_not_available_is_one_line_and_code_2(arguments, capsys):
    assert main([*arguments, "--backend", "cudnn"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("oomb: error: ") and "cudnn" in errors[-1]


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--chunk-tokens" in shown and "--gpu-kv-budget-bytes" in shown and "standard library" in shown


def test_no_command_and_an_unknown_command(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0 and "train" in capsys.readouterr().out
    assert main(["trian"]) == 2
