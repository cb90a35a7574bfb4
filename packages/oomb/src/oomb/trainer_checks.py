"""What a Trainer may be asked for that a chunked step cannot honour: refused before work starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import Trainer

from .batch import IGNORED
from .hf import take_apart
from .token_losses import refuse_if_not_a_sum

# what packing collators say besides position_ids, and the same
IMPLIED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
READ = ("input_ids", "labels", "attention_mask", "position_ids", "document_ids")

EXTRAS = {  # package: the extra of this distribution that brings it
    "peft": "peft", "bitsandbytes": "qlora", "torchao": "torchao", "liger_kernel": "liger",
    "tensorboard": "tensorboard", "trl": "trl",
}  # fmt: skip
_OPTIMIZER_PACKAGES = (  # the first whose mark is in the optimizer's name
    ("torchao", ("torch_4bit", "torch_8bit")),
    ("galore_torch", ("galore",)),
    ("apollo_torch", ("apollo",)),
    ("schedulefree", ("schedule_free",)),
    ("grokadamw", ("grokadamw",)),
    ("optimi", ("stable_adamw",)),
    ("bitsandbytes", ("bnb", "8bit", "paged", "ademamix", "lion")),
)


def require(package: str, what: str) -> None:
    """Raises: ValueError naming what to install when an optional package is not there"""
    if importlib.util.find_spec(package) is None:
        extra = EXTRAS.get(package)
        install = f'pip install "oomb[{extra}]"' if extra else f"pip install {package.replace('_', '-')}"
        raise ValueError(f"{what} needs the package {package}, which is not installed: {install}")


def refuse_settings(trainer: Any) -> None:
    """Raises: ValueError naming the setting, why it cannot be honoured, and what to do instead"""
    args = trainer.args
    take_apart(trainer.model)
    _refuse_overrides(type(trainer))
    no_logits = "it needs the logits of every token at once, which are never held"
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if getattr(trainer, name, None) is not None:
            raise ValueError(f"{name}: {no_logits}; evaluation gives eval_loss, compute others by generating")
    unsupported = {
        "torch_compile": "chunks call the decoder and the head apart, which a compiled whole would not see; "
        "compile the decoder's layers instead: `layer.compile()`",
        "fsdp": "sharded models are not supported",
        "deepspeed": "sharded models are not supported",
        "parallelism_config": "the sequence is cut in time, not over devices",
        "activation_offloading": "a chunk's activations stay on the device; make chunks smaller",
        "enable_jit_checkpoint": "SIGTERM leaves a checkpoint by itself",
        "auto_find_batch_size": "memory follows the chunk, not the batch: make chunk_tokens smaller",
    }
    for name, why in unsupported.items():
        if getattr(args, name, None):
            raise ValueError(f"{name}={getattr(args, name)!r}: {why}")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process, for which the Trainer uses DataParallel: set "
            "CUDA_VISIBLE_DEVICES to one of them, or start one process a GPU with torchrun"
        )
    _refuse_losses(trainer)
    refuse_optimizer(str(getattr(args.optim, "value", args.optim)))
    if args.use_liger_kernel:
        require("liger_kernel", "use_liger_kernel")


def _refuse_overrides(kind: type) -> None:
    """A class whose own loss the chunked step would pass over without a word: a preference or reward trainer, say."""
    behind = False  # the mixin, in the order in which methods are looked up
    for cls in kind.__mro__:
        if cls is Trainer:
            return
        behind |= cls.__name__ == "ChunkTrainerMixin"
        if cls.__name__ == "ChunkTrainerMixin" or (cls.__module__.startswith("trl.") and cls.__name__ == "SFTTrainer"):
            continue
        lost = ["compute_loss", *(("training_step", "prediction_step") if behind else ())]
        for name in lost:
            if name in vars(cls):
                raise ValueError(
                    f"{cls.__name__}.{name} would not be called: the chunked step computes a causal language model's "
                    "loss itself. Give compute_loss_func, or override training_step before ChunkTrainerMixin"
                )


def refuse_optimizer(name: str) -> None:
    """Raises: ValueError for optimizers that step inside a backward, or whose package is missing"""
    refuse_steps_inside(name)
    for package, marks in _OPTIMIZER_PACKAGES:
        if any(mark in name for mark in marks):
            require(package, f"optim={name!r}")
            return


def refuse_steps_inside(name: str) -> None:
    """Raises: ValueError for optimizers that step inside a backward"""
    if "lomo" in name or "layerwise" in name:
        raise ValueError(
            f"optim={name!r} updates parameters inside the backward pass, and a chunked step has several: "
            "the first would change the weights under the others"
        )


def _refuse_losses(trainer: Any) -> None:
    own_loss = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    config = trainer.model.config.get_text_config()
    if getattr(trainer, "aux_loss_enabled", False) or (own_loss and getattr(config, "output_router_logits", False)):
        raise ValueError(
            "the model's load-balancing loss (output_router_logits) cannot be combined with a loss of the trainer's "
            "own here: set output_router_logits=False in the model's config"
        )
    if getattr(trainer.args, "loss_type", "nll") not in ("nll", "dft"):
        raise ValueError(f"loss_type={trainer.args.loss_type!r} is not known here; nll and dft are")
    if trainer.compute_loss_func is not None:
        refuse_if_not_a_sum(trainer.compute_loss_func)


def without_borders(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with no label where a packed document begins: a step learns none there, so none is to be counted."""
    ids, labels = batch.get("document_ids"), batch.get("labels")
    if ids is None and batch.get("position_ids") is not None:
        begins = batch["position_ids"].diff(dim=-1) != 1
    elif ids is not None:
        begins = ids.diff(dim=-1) != 0
    else:
        return batch
    if labels is None or begins.shape[-1] != labels.shape[-1] - 1:
        return batch  # refused when the step reads it
    first = torch.zeros_like(labels[..., :1], dtype=torch.bool)
    borders = torch.cat([first, begins.expand_as(labels[..., 1:])], -1)
    return batch | {"labels": labels.masked_fill(borders, IGNORED)}


def step_arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    """A collated batch as `chunked_backward` takes it.

    Raises: ValueError for columns of unknown meaning, and where labels are missing
    """
    unknown = sorted(set(inputs) - set(READ) - set(IMPLIED))
    if unknown:
        raise ValueError(f"the batch holds {', '.join(unknown)}, which a chunked step does not know; it reads {READ}")
    if any(name in inputs for name in IMPLIED) and "position_ids" not in inputs:
        raise ValueError("the batch says where documents begin without position_ids: have the collator give those too")
    for name in ("input_ids", "labels"):
        if inputs.get(name) is None:
            raise ValueError(
                f"the batch holds no {name}, only {', '.join(sorted(inputs))}; a causal language model's labels are "
                "its input_ids with -100 where nothing is to be learned (DataCollatorForLanguageModeling makes them)"
            )
    return {name: inputs[name] for name in READ if inputs.get(name) is not None}
