"""A run that stops and goes on: bit-identical to one that did not; what is no checkpoint of it is refused."""

from __future__ import annotations

import functools
import os
import shutil
import signal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.oomb.trainers import CHUNKS, Losses, arguments, collate, model, rows
from transformers import Trainer, TrainerCallback

from oomb import OombTrainer
from oomb.interrupt import Interrupted, Interrupts
from oomb.resume import check_checkpoint, checkpoints, find_checkpoint

STEPS = 5  # of two batches each: eight rows are an epoch of four steps


def lora(dropout=0.3):
    torch.manual_seed(1)
    return get_peft_model(model(), LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear"))


class StopAt(TrainerCallback):
    """Sends a signal when a chunk of a step is reached, or at the end of a step."""

    def __init__(self, step: int, done: int | None, number: int = signal.SIGINT) -> None:
        self.step, self.done, self.number = step, done, number

    def on_chunk(self, args, state, control, done, total):
        if (state.global_step + 1, done) == (self.step, self.done):
            os.kill(os.getpid(), self.number)

    def on_step_end(self, args, state, control, **_):
        if self.done is None and state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def trainer(make, output, *callbacks, **settings):
    base = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    return OombTrainer(
        make(), arguments(output, **(base | settings)), train_dataset=rows(8), eval_dataset=rows(3, seed=5),
        data_collator=collate, chunk_config=CHUNKS, callbacks=list(callbacks),
    )  # fmt: skip


def weights(done):
    return [p.detach().clone() for p in done.model.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@functools.cache
def whole_run(folder, evaluating):
    """What a run that nothing interrupts logs and ends with; made once for all that are interrupted."""
    logged = Losses()
    whole = trainer(lora, folder / evaluating, logged, eval_strategy=evaluating, eval_steps=1)
    whole.train()
    return logged, weights(whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


# In the fill, in the walk, in the second batch of a step, in the first step of the second epoch, after a step.
@pytest.mark.parametrize(
    ("step", "done", "evaluating"),
    [(3, 2, "no"), (3, 6, "steps"), (3, 1, "no"), (5, 3, "steps"), (2, None, "no"), (4, None, "steps")],
)
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(step, done, evaluating, folder, tmp_path):
    settings = {"eval_strategy": evaluating, "eval_steps": 1}
    logged, ends = whole_run(folder, evaluating)
    stopped = trainer(lora, tmp_path / "stopped", StopAt(step, done), **settings)
    with pytest.raises(Interrupted) as caught:
        stopped.train()
    last = step if done is None else step - 1
    assert caught.value.checkpoint == str(tmp_path / "stopped" / f"checkpoint-{last}")
    assert caught.value.number == signal.SIGINT

    torch.manual_seed(12345)
    again = Losses()
    resumed = trainer(lora, tmp_path / "stopped", again, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert again.of("loss") == logged.of("loss")[last:]
    assert again.of("grad_norm") == logged.of("grad_norm")[last:]
    assert again.of("learning_rate") == logged.of("learning_rate")[last:]
    assert same(weights(resumed), ends)


def test_full_training_goes_on_bit_for_bit_from_a_saved_step(tmp_path):
    whole = trainer(model, tmp_path, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(model, tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(resumed), weights(whole))


def test_sigterm_leaves_a_checkpoint_too(tmp_path):
    stopped = trainer(model, tmp_path, StopAt(2, 3, signal.SIGTERM))
    with pytest.raises(Interrupted) as caught:
        stopped.train()
    assert caught.value.number == signal.SIGTERM and caught.value.checkpoint.endswith("checkpoint-1")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch):
    """As Ctrl-C in what a script started with `&`; and one that something else than Python handles."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.listening():
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.number is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with interrupts.listening():
        pass


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    with pytest.raises(Interrupted) as caught:
        trainer(model, tmp_path, StopAt(1, 2)).train()
    assert caught.value.checkpoint is None and not checkpoints(tmp_path)


def test_a_checkpoint_of_an_earlier_run_is_not_mistaken_for_this_ones(tmp_path):
    """The folder of the same step is there already, from another run."""
    with pytest.raises(Interrupted):
        trainer(model, tmp_path, StopAt(3, 2), seed=7).train()
    old = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    with pytest.raises(Interrupted):
        trainer(model, tmp_path, StopAt(3, 2), seed=8).train()
    new = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert any(not torch.equal(old[name], new[name]) for name in old)


def test_adapters_are_saved_in_peft_form(tmp_path):
    from peft import PeftModel

    done = trainer(lora, tmp_path)
    done.train()
    done.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    read = PeftModel.from_pretrained(model(), tmp_path / "adapter")
    ids = torch.arange(20)[None]
    done.model.eval()
    torch.testing.assert_close(read.eval()(input_ids=ids).logits, done.model(input_ids=ids).logits)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_workers_leave_ctrl_c_to_their_parent_and_end_when_terminated():
    interrupts = Interrupts()
    with interrupts.listening():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
        assert interrupts.number is None


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_full_disk_leaves_the_checkpoints_before_and_no_half_one(tmp_path, monkeypatch, kind):
    """torch says it with a RuntimeError."""
    first = trainer(model, tmp_path, save_strategy="steps", save_steps=2, save_total_limit=1)
    save, calls = torch.save, []

    def full(what, path, *args, **kwargs):
        calls.append(str(path))
        if "checkpoint-4" in str(path):
            raise kind("No space left on device")
        save(what, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step 4 not saved \(.*checkpoint-2 is intact\): No space left"):
        first.train()
    monkeypatch.undo()
    assert any("checkpoint-4" in path for path in calls)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    resumed = trainer(model, tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS


def saved(tmp_path, make=model):
    done = trainer(make, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    done.train()
    return tmp_path / "checkpoint-1"


def test_what_a_killed_save_left_is_passed_over(tmp_path):
    whole = saved(tmp_path)
    for name in ("checkpoint-2", "checkpoint-30"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-30" / "trainer_state.json").write_text('{"epoch": 1.')
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2", "checkpoint-30"]
    assert find_checkpoint(True, tmp_path) == whole
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        find_checkpoint(str(tmp_path / "checkpoint-2"), tmp_path)


def test_no_checkpoint_to_go_on_from(tmp_path):
    assert find_checkpoint(None, tmp_path) is None and find_checkpoint(False, tmp_path) is None
    with pytest.raises(ValueError, match="no complete checkpoint"):
        trainer(model, tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("make", "other", "complaint"),
    [
        (model, lambda: model("qwen2"), "of another model: "),
        (lambda: model("qwen2"), model, "of another model: "),
        (lora, model, "of another model: "),
        (model, lora, "of another model: "),
        (
            lora,
            lambda: get_peft_model(model(), LoraConfig(r=3, target_modules="all-linear")),
            r"is \[2, \d+\] there, \[3, ",
        ),
        (lora, lambda: get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"])), "not here"),
        (lambda: get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"])), lora, "it has no "),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(make, other, complaint, tmp_path):
    folder = saved(tmp_path, make)
    check_checkpoint(folder, make())
    resumed = trainer(other, tmp_path)
    before = weights(resumed)
    with pytest.raises(ValueError, match=complaint):
        resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed), before)


def test_tied_weights_are_saved_once_and_accepted(tmp_path):
    check_checkpoint(saved(tmp_path, lambda: model("llama_tied")), model("llama_tied"))


def test_a_checkpoint_without_its_optimizer_is_refused(tmp_path):
    done = trainer(model, tmp_path, max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True)
    done.train()
    with pytest.raises(ValueError, match=r"lacks optimizer.pt"):
        trainer(model, tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "model.safetensors"])
def test_a_file_that_is_cut_off_is_named(name, tmp_path):
    file = saved(tmp_path) / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"resume: cannot read .*{name}"):
        trainer(model, tmp_path).train(resume_from_checkpoint=True)


def test_a_loss_that_is_not_finite_names_step_chunk_and_position(tmp_path):
    """After the first step one token's embedding is infinite: it stands at position 14 of the second step's row.

    Earlier tokens of its chunk may give NaN too: they weigh what they do not see by zero.
    """
    made = model()
    data = [{"input_ids": list(range(20)), "labels": list(range(20))} for _ in range(2)]
    data[1]["input_ids"][14] = 60
    ours = OombTrainer(
        made, arguments(tmp_path, max_steps=2, train_sampling_strategy="sequential"), train_dataset=data,
        data_collator=collate, chunk_config=CHUNKS,
    )  # fmt: skip
    kept = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            with torch.no_grad():
                made.model.embed_tokens.weight[60] = float("inf")
            kept.append(weights(ours))

    ours.add_callback(Keep())
    complaint = r"loss of step 2 is nan \(first at chunk 2, position 1[234]\): stopped with the weights of step 1"
    with pytest.raises(FloatingPointError, match=complaint):
        ours.train()
    assert len(kept) == 1 and same(kept[0], weights(ours))


def test_a_gradient_that_is_not_finite_names_the_parameter(tmp_path):
    ours = trainer(model, tmp_path, max_grad_norm=0.0)
    ours.model.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad * float("nan"))
    before = weights(ours)
    with pytest.raises(FloatingPointError, match=r"gradient of step 1 is not finite \(in model.layers.1.mlp.up_proj"):
        ours.train()
    assert same(weights(ours), before)


def test_the_stock_trainer_reads_our_checkpoints(tmp_path):
    saved(tmp_path)
    stock = Trainer(
        model(), arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=rows(8), data_collator=collate
    )
    stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert stock.state.global_step == 3
