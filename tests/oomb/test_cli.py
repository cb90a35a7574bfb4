"""`oomb train` from the outside: what it writes, what it says, how it ends."""

import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb.checkpoint import save_checkpoint
from oomb.cli import train as command
from oomb.cli.main import main
from oomb.host import spare_bytes
from oomb.progress import StepBar
from oomb.tiny import byte_tokenizer, tiny_model
from oomb.train_config import TrainConfig

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
    assert "chunk" in shown.err and "left" in shown.err
    out = tmp_path / "out"
    assert (out / "loss.png").read_bytes()[:8] == PNG
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(out / "checkpoint")
    prompt = tokenizer("7 squared is", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert ids.shape[1] == len("7 squared is") + 4
    left = ["checkpoint", "loss.png", "memory.png", "metrics.jsonl", "settings.yaml"]
    assert sorted(path.name for path in out.iterdir()) == left and (out / "memory.png").read_bytes()[:8] == PNG


@pytest.mark.parametrize("more", [[], ["--adapter", "lora"], ["--gpu-kv-budget", "1"]])
def test_the_reloaded_model_has_the_memory_that_training_had(more, arguments, monkeypatch):
    """Beside weights, gradients and states it might not fit, when all the work is done."""
    left, sample = [], command.sample

    def held_bytes():
        """Of all tensors that there are; the compiler's, of other tests, have no storage."""
        tensors = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    def watched(job):
        left.append((held_bytes(), spare_bytes()))
        return sample(job)

    monkeypatch.setattr(command, "sample", watched)
    gc.collect()
    before = held_bytes()
    assert main([*arguments, *more]) == 0
    [(held, spare)] = left
    assert held <= before + 4096 and spare == 0  # the smallest model here has 400,000 bytes


def test_a_base_in_4_bits_is_reloaded_in_4_bits(tmp_path, monkeypatch):
    """As it was: in full it might be too large for the device that trained it."""
    config = TrainConfig(model="x", data="y", context=8, adapter="qlora", dtype="bfloat16")
    job = SimpleNamespace(config=config, device=torch.device("cpu"), tokenizer=None, checkpoint=tmp_path)
    monkeypatch.setattr(command, "load_config", lambda *_: None)
    monkeypatch.setattr(command, "load_base", lambda *given: given)
    monkeypatch.setattr("peft.PeftModel.from_pretrained", lambda base, _: base)
    assert command._with_saved_adapters(job) == (config, None, torch.bfloat16, torch.device("cpu"))


def test_a_dry_run_loads_says_and_stops(arguments, tmp_path, capsys):
    assert main([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "model " in shown and "4 of up to 256 tokens, in chunks of 64" in shown and "nothing was trained" in shown
    assert not any((tmp_path / "out").iterdir())
    assert main([*arguments, "--dry-run", "--host-memory", "1"]) == 1  # as `oomb plan` says that it does not fit
    said = capsys.readouterr()
    assert "does not fit" in said.out and "warning: by this plan a step does not fit" in said.err


def test_a_run_with_adapters_and_held_out_data(arguments, tmp_path, capsys):
    """Adapters in peft's form; the Trainer's own names; the text that is held out is scored before and after."""
    (tmp_path / "held.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(400, 450)))
    more = ["--adapter", "lora", "--eval-data", str(tmp_path / "held.txt"), "--eval-steps", "2"]
    more += ["--gradient_accumulation_steps=2", "--optim", "adafactor", "--save-steps", "2"]
    assert main([*arguments, *more]) == 0
    shown = capsys.readouterr().out
    assert "of them trained (lora)" in shown and "adafactor" in shown and "2 sequences of up to 256" in shown
    assert shown.count("held out after step") == 2 and "held out    loss" in shown and "reloaded" in shown
    assert (tmp_path / "out" / "checkpoint" / "adapter_model.safetensors").exists()
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-4" / "tokenizer.json").exists()
    assert main([*arguments, *more, "--output", str(tmp_path / "other")]) == 0
    names = sorted(path.name for path in (tmp_path / "other" / "checkpoints").iterdir())
    assert names == ["checkpoint-2", "checkpoint-4"]


def test_a_stream(arguments, capsys):
    assert main([*arguments, "--streaming", "true", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "read while training" in shown and "1 documents" in shown and shown.count("tokens/s") == 2
    assert main([*arguments[:-6], "--streaming", "true", "--steps", "none"]) == 2
    assert "steps must be set" in capsys.readouterr().err


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


def test_an_interrupted_save_keeps_the_checkpoint_before(arguments, tmp_path, capsys, monkeypatch):
    assert main(arguments) == 0
    first = (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "save_checkpoint", interrupt)
    assert main([*arguments, "--seed", "1"]) == 130
    assert "is as it was" in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors").read_bytes() == first


class SignalAt:
    """Sends a signal when a chunk of a step is done."""

    def __init__(self, monkeypatch, number, step, chunk):
        self.sent, show = False, StepBar.show

        def send(bar, at, share, text, left):
            if (at, text.split("/")[0]) == (step, f"chunk {chunk}") and not self.sent:
                self.sent = True
                os.kill(os.getpid(), number)
            show(bar, at, share, text, left)

        monkeypatch.setattr(StepBar, "show", send)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_goes_on_to_the_same_end(arguments, tmp_path, capsys, monkeypatch, number, code):
    """Weights, metrics and pictures are those of a run that was never interrupted."""
    assert main([*arguments, "--output", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patched:
        SignalAt(patched, number, step=3, chunk=2)
        assert main(arguments) == code
    assert "checkpoint-2 holds the last whole step; --resume true goes on" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "holds checkpoint-2 of an earlier run" in capsys.readouterr().err
    assert main([*arguments, "--resume", "true"]) == 0
    weights = [(tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("out", "whole")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert not list((tmp_path / "out").glob("checkpoints"))  # it was only there for the interruption


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_was_trained_is_kept_whatever_comes_of_the_last_evaluation(
    error, arguments, tmp_path, capsys, monkeypatch
):
    def evaluate(self, *args, **kwargs):
        raise error("of the evaluation")

    monkeypatch.setattr(command.OombTrainer, "evaluate", evaluate)
    code = main([*arguments, "--eval-data", str(tmp_path / "text.txt")])
    assert code == (130 if error is KeyboardInterrupt else 2)
    said = capsys.readouterr().err
    assert ("holds what was trained" if error is KeyboardInterrupt else "of the evaluation") in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint").num_parameters() > 0


def test_held_out_rows_without_labels_are_nothing_to_judge_by(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command.OombTrainer, "evaluate", lambda self: {"eval_runtime": 0.0})
    assert main([*arguments, "--eval-data", str(tmp_path / "text.txt")]) == 0
    assert "held out    nothing to judge by" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more", [["--num-train-epochs", "0"], ["--dataloader-drop-last", "true", "--per-device-train-batch-size", "99"]]
)
def test_a_run_of_no_step_says_so(more, arguments, tmp_path, capsys):
    assert main([*arguments, "--steps", "none", *more]) == 2
    assert "no step would be made" in capsys.readouterr().err
    assert not (tmp_path / "out" / "checkpoint").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_service_that_is_not_installed_is_one_line(arguments, capsys):
    assert main([*arguments, "--report-to", "wandb"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("oomb: error: the Trainer cannot be made") and "wandb" in errors[-1]


def test_data_without_a_label_is_refused(arguments, tmp_path, capsys):
    row = {"input_ids": list(range(100)) * 3, "labels": [-100] * 300}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    assert main([*arguments, "--data", str(tmp_path / "rows.jsonl")]) == 2
    assert "has nothing to learn" in capsys.readouterr().err


def test_steps_of_several_epochs_are_announced(arguments, capsys):
    assert main([*arguments, "--steps", "none", "--num-train-epochs", "3", "--dry-run"]) == 0
    thrice = int(re.search(r"steps +([\d,]+) of", capsys.readouterr().out)[1])
    assert main([*arguments, "--steps", "none", "--dry-run"]) == 0
    assert thrice == 3 * int(re.search(r"steps +([\d,]+) of", capsys.readouterr().out)[1])


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
    assert "holds the last whole step" in errors and "Traceback" not in errors
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoints", "metrics.jsonl"]


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["--chunk-tokns", "8"], "did you mean 'chunk_tokens'"),
        (["--gradient-acumulation-steps", "8"], "did you mean 'gradient_accumulation_steps'"),
        (["--max-steps", "8"], "it is called 'steps' here"),
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


def test_a_context_beyond_the_models_positions_is_warned_of(arguments, tmp_path, capsys):
    model = tiny_model(64, 0)
    save_checkpoint(tmp_path / "model", model, byte_tokenizer())
    assert main([*arguments, "--model", str(tmp_path / "model"), "--dry-run"]) == 0
    assert "made for 64 positions; for more, set rope_type (yarn) or rope_theta" in capsys.readouterr().err
    assert main([*arguments, "--model", str(tmp_path / "model"), "--rope-type", "yarn", "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_too_little_host_memory_is_one_line_with_the_numbers(arguments, tmp_path, capsys):
    assert main([*arguments, "--gpu-kv-budget-bytes", "1", "--host-budget-bytes", "1000"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("oomb: error: ") and "1000" in errors[0].replace(",", "")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--chunk-tokens" in shown and "--gpu-kv-budget" in shown and "standard library" in shown


def test_no_command_and_an_unknown_command(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0 and "train" in capsys.readouterr().out
    assert main(["trian"]) == 2
