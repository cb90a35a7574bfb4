"""`oomb train`: prepare, train, save, reload, generate, draw."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb.checkpoint import save_checkpoint
from oomb.cli.options import parse_yaml
from oomb.plots import draw_loss
from oomb.train_config import TINY, TrainConfig
from oomb.trainer import Job, fit, prepare

PROMPT_TOKENS = 64


def demo_settings() -> dict[str, Any]:
    """The embedded default: what holds where no model is named."""
    return parse_yaml(resources.files("oomb.cli").joinpath("demo.yaml").read_text(encoding="utf-8"), "demo.yaml")


def run(settings: Mapping[str, Any]) -> int:
    """Train as the settings say.

    Returns: 0, or 130 when interrupted
    Raises: ValueError before work starts, for what the settings got wrong
    """
    transformers.utils.logging.disable_progress_bar()  # the bar here is the run's
    base = demo_settings() if settings.get("model", TINY) == TINY else {}
    job = prepare(TrainConfig.from_settings(base | dict(settings)))
    _announce(job)
    records: list[Any] = []
    try:
        records = fit(job)
        save_checkpoint(job.checkpoint, job.model, job.tokenizer)
    except KeyboardInterrupt:
        kept = f"{job.checkpoint} is as it was" if job.checkpoint.exists() else "no checkpoint was written"
        print(f"\ninterrupted: {kept}; metrics so far are in {job.output / 'metrics.jsonl'}", file=sys.stderr)
        return 130
    _write_settings(job)
    draw_loss(job.output / "loss.png", records, f"{job.config.context:,} tokens of context")
    print(f"loss        {records[0].loss:.4f} -> {records[-1].loss:.4f} nats a token")
    print(f"checkpoint  {job.checkpoint}")
    print(f"loss curve  {job.output / 'loss.png'}")
    if job.config.generate_tokens:
        print(f"reloaded, it goes on with\n{sample(job)}")
    return 0


def sample(job: Job) -> str:
    """Load the checkpoint as anyone would, and let it continue the beginning of the text.

    Returns: the continuation, quoted
    """
    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(job.checkpoint)
    model.to(job.device).eval()
    prompt = job.windows.step(0)[:, :PROMPT_TOKENS].to(job.device)
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


def _announce(job: Job) -> None:
    windows, config = job.windows, job.config
    parameters = sum(p.numel() for p in job.model.parameters())
    kind = f"{job.model.dtype}".removeprefix("torch.") + (", computed in bfloat16" if job.mixed else "")
    chunk = config.chunks.chunk_length(job.device)
    print(f"model       {config.model}: {type(job.model).__name__}, {parameters:,} parameters, {kind}, {job.device}")
    print(f"data        {config.data}: {windows.files:,} files read, {len(windows):,} sequences of {config.context:,}")
    if windows.unused_tokens:
        print(f"            {windows.unused_tokens:,} tokens at the end fill no whole sequence and are not used")
    if windows.skipped:
        names = ", ".join(windows.skipped[:3]) + (" ..." if len(windows.skipped) > 3 else "")
        print(f"            {len(windows.skipped):,} files skipped, not UTF-8 text: {names}")
    if job.steps > len(windows):
        print(f"            {job.steps:,} steps go through them {job.steps / len(windows):.1f} times")
    print(f"steps       {job.steps:,} of {config.context:,} tokens, in chunks of {chunk:,}", flush=True)
    longest = getattr(job.model.config.get_text_config(), "max_position_embeddings", None)
    if longest and config.context > longest:
        print(f"warning: this model was made for {longest:,} positions: more need a RoPE setting", file=sys.stderr)


def _write_settings(job: Job) -> None:
    """Leave the settings beside the checkpoint, as a file that `oomb train` takes."""
    settings = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in job.config.to_settings().items()
    }
    path = job.output / "settings.yaml"
    partial = path.with_suffix(".yaml.new")
    partial.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    os.replace(partial, path)
