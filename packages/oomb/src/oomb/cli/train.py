"""`oomb train`: prepare, train, save, reload, generate, draw."""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from oomb.checkpoint import save_checkpoint
from oomb.cli.options import parse_yaml
from oomb.eta import ModelWork
from oomb.hf_trainer import OombTrainer
from oomb.host import close_spare
from oomb.interrupt import Interrupted
from oomb.job import SETTINGS, Job, choose_dtype, prepare, written_settings
from oomb.model_loading import load_base, load_config, positions
from oomb.packing import collate
from oomb.plots import draw_loss, draw_memory
from oomb.progress import Progress
from oomb.quiet import quiet
from oomb.resume import checkpoints
from oomb.sequences import Sequences
from oomb.train_config import TINY, TrainConfig

PROMPT_TOKENS = 64


def demo_settings() -> dict[str, Any]:
    """The embedded default: what holds where no model is named."""
    return parse_yaml(resources.files("oomb.cli").joinpath("demo.yaml").read_text(encoding="utf-8"), "demo.yaml")


def run(settings: Mapping[str, Any], *, dry_run: bool = False) -> int:
    """Train as the settings say; with `dry_run`, load, say what would be done, and stop.

    Returns: 0; 1 for a dry run whose plan does not fit; 130 when interrupted, 143 when terminated
    Raises: ValueError before work starts, for what the settings got wrong
    """
    transformers.utils.logging.disable_progress_bar()  # the bar here is the run's
    base = demo_settings() if settings.get("model", TINY) == TINY else {}
    job = prepare(TrainConfig.from_settings(base | dict(settings)))
    if job.config.steps is None and _steps_of_epochs(job) == 0:
        size, epochs = job.arguments.per_device_train_batch_size, job.arguments.num_train_epochs
        raise ValueError(f"no step would be made of the data in batches of {size:,}, {epochs:g} times")
    trainer, progress = make_trainer(job)
    announce(job)
    saved = False
    try:
        if dry_run:
            print("dry run     nothing was trained")
            return 0 if job.plan.obstacle is None else 1
        trainer.train(resume_from_checkpoint=None if job.resume_from is None else str(job.resume_from))
        if not progress.records:
            raise ValueError("no step was made: there was nothing to read, or the run that was resumed had ended")
        save_checkpoint(job.checkpoint, job.model, job.tokenizer)
        saved = True
        if job.held_out is not None:  # whatever comes of it, what was trained is kept
            loss = trainer.evaluate().get("eval_loss")
            print(
                "held out    "
                + ("nothing to judge by" if loss is None else f"loss {loss:.4f} nats a token, the mean of its batches")
            )
    except KeyboardInterrupt as interrupt:
        progress.close()
        return _interrupted(job, interrupt, saved)
    finally:
        progress.close()
        _remove_if_empty(job)  # the Trainer makes the folder before there is anything to save
    del trainer
    _finish(job, progress)
    _remove_if_empty(job)
    return 0


def _remove_if_empty(job: Job) -> None:
    folder = Path(job.arguments.output_dir or "")
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def make_trainer(job: Job) -> tuple[OombTrainer, Progress]:
    """The Trainer of a job, and what shows its steps."""
    sparse = job.config.chunks.attention == "sparse"
    c = job.config.chunks
    read = (c.top_k_pages + c.recent_pages + c.sink_pages) * c.page_tokens if sparse else None
    progress = Progress(ModelWork.of(job.model, read), job.output / "metrics.jsonl", plan=job.plan)
    rows: Any = job.data.rows if isinstance(job.data, Sequences) else job.data
    try:
        trainer = OombTrainer(
            model=job.model,
            args=job.arguments,
            train_dataset=rows,
            eval_dataset=None if job.held_out is None else job.held_out.rows,
            data_collator=collate,
            callbacks=[progress, _Beside(job)],
            chunk_config=job.config.chunks if job.plan.obstacle is not None else job.plan.follow(job.config.chunks),
        )
    except (ImportError, RuntimeError) as error:  # what a setting asks for is not installed, say a service to report to
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"the Trainer cannot be made: {' '.join(str(error).split())}") from error
    trainer.remove_callback(PrinterCallback)
    return trainer, progress


class _Beside(TrainerCallback):
    """Leaves the tokenizer and the run's settings in each checkpoint."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self._job.tokenizer.save_pretrained(folder)
        _write_settings(self._job, folder / SETTINGS)


def _interrupted(job: Job, interrupt: KeyboardInterrupt, saved: bool) -> int:
    kept = getattr(interrupt, "checkpoint", None)
    if saved:
        print(f"\ninterrupted after the last step: {job.checkpoint} holds what was trained", file=sys.stderr)
    elif kept is not None:
        print(f"\ninterrupted: {kept} holds the last whole step; --resume true goes on from it", file=sys.stderr)
    else:
        before = f"{job.checkpoint} is as it was" if job.checkpoint.exists() else "no checkpoint was written"
        print(f"\ninterrupted: {before}", file=sys.stderr)
    return 128 + interrupt.number if isinstance(interrupt, Interrupted) else 130


def _finish(job: Job, progress: Progress) -> None:
    """Leave pictures and settings, drop what only an interruption had needed, and show that the checkpoint works."""
    _write_settings(job, job.output / "settings.yaml")
    records, title = progress.records, f"{job.config.context:,} tokens of context"
    draw_loss(job.output / "loss.png", records, title)
    draw_memory(job.output / "memory.png", records, title)
    if job.arguments.save_strategy == "no":
        for folder in checkpoints(job.arguments.output_dir or ""):
            shutil.rmtree(folder)
    if not isinstance(job.data, Sequences) and job.data.report is not None:
        _say("data", job.data.report.lines())
    print(f"loss        {records[0].loss:.4f} -> {records[-1].loss:.4f} nats a token")
    print(f"checkpoint  {job.checkpoint}")
    print(f"pictures    {job.output / 'loss.png'}, {job.output / 'memory.png'}")
    if job.config.generate_tokens:
        _let_go(job)
        print(f"reloaded, it goes on with\n{sample(job)}")


def _let_go(job: Job) -> None:
    """Free what training held, on the device and the host: the model that is reloaded might not fit beside it."""
    gc.collect()  # a Trainer and its optimizer refer to themselves
    for tensor in (*job.model.parameters(), *job.model.buffers()):
        tensor.grad = None
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    close_spare()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()


def sample(job: Job) -> str:
    """Load the checkpoint as anyone would, and let it continue the beginning of the text.

    Returns: the continuation, quoted
    """
    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
    model: Any
    if job.config.adapter == "none":
        model = AutoModelForCausalLM.from_pretrained(job.checkpoint)
    else:
        model = _with_saved_adapters(job)
    model.to(job.device).eval()
    row: Any = job.data.rows[0] if isinstance(job.data, Sequences) else next(iter(job.data))
    prompt = torch.tensor(row["input_ids"][:PROMPT_TOKENS], dtype=torch.long, device=job.device)[None]
    torch.manual_seed(job.config.seed)
    with torch.inference_mode():
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=job.config.generate_tokens,
            do_sample=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return repr(tokenizer.decode(ids[0, prompt.shape[1] :]))


def _with_saved_adapters(job: Job) -> Any:
    """A new base, loaded as for the run, with the adapters of the checkpoint on it."""
    from peft import PeftModel

    dtype, _ = choose_dtype(job.config.dtype, job.device)
    base = load_base(job.config, load_config(job.config, job.tokenizer), dtype, job.device)
    with quiet():
        return PeftModel.from_pretrained(base, str(job.checkpoint))


def announce(job: Job) -> None:
    """Say what the run will do: model, data, steps."""
    config, model = job.config, job.model
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kind = f"{model.dtype}".removeprefix("torch.") + (", computed in bfloat16" if job.mixed else "")
    share = "" if trained == total else f", {trained:,} of them trained ({config.adapter})"
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    print(f"model       {config.model}: {name}, {total:,} parameters{share}, {kind}, {job.device}")
    if isinstance(job.data, Sequences):
        _say("data", [f"{config.data}: {job.data.report.lines()[0]}", *job.data.report.lines()[1:]])
    else:
        print(f"data        {config.data}: read while training")
    batch = job.arguments.per_device_train_batch_size * job.arguments.gradient_accumulation_steps
    if config.steps is not None:
        steps = config.steps
        if isinstance(job.data, Sequences) and steps * batch > len(job.data):
            print(f"            {steps:,} steps go through them {steps * batch / len(job.data):.1f} times")
    else:
        steps = _steps_of_epochs(job)
    optimizer = getattr(job.arguments.optim, "value", job.arguments.optim)
    each = f"{batch:,} sequences of up to {config.context:,}" if batch > 1 else f"up to {config.context:,}"
    print(f"steps       {steps:,} of {each} tokens, in chunks of {job.plan.chunk_tokens:,}, {optimizer}")
    _say("plan", job.plan.lines())
    if job.plan.obstacle is not None:
        print("warning: by this plan a step does not fit; it is tried all the same", file=sys.stderr)
    if job.resume_from is not None:
        print(f"resume      from {job.resume_from}")
    longest = positions(model.config)
    if longest and config.context > longest and config.rope_type != "dynamic":
        print(
            f"warning: this model was made for {longest:,} positions; for more, set rope_type (yarn) or rope_theta",
            file=sys.stderr,
        )


def _steps_of_epochs(job: Job) -> int:
    """Optimizer steps of a run over whole epochs."""
    assert isinstance(job.data, Sequences)  # of a stream nobody knows how long it is: it has its steps set
    arguments, batches = job.arguments, len(job.data) / job.arguments.per_device_train_batch_size
    whole = math.floor(batches) if arguments.dataloader_drop_last else math.ceil(batches)
    return math.ceil(math.ceil(whole / arguments.gradient_accumulation_steps) * arguments.num_train_epochs)


def _say(name: str, lines: list[str]) -> None:
    for index, line in enumerate(lines):
        print(f"{name if not index else '':<12}{line}")


def _write_settings(job: Job, path: Path) -> None:
    """Leave the settings as a file that `oomb train` takes."""
    settings = written_settings(job.config) | {"resume": False}
    partial = path.with_suffix(".yaml.new")
    partial.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    os.replace(partial, path)
