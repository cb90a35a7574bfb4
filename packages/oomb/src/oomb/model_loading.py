"""Model and tokenizer of a run: loaded whole or refused, positions extended, adapters put on."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers import logging as transformers_logging

from oomb.adapters import lora, with_adapters
from oomb.tiny import byte_tokenizer, tiny_model
from oomb.train_config import TINY, TrainConfig
from oomb.trainer_checks import require


def load_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """Raises: ValueError if the model brings none, or one that is not its own"""
    if config.model == TINY:
        return byte_tokenizer()
    tokenizer: PreTrainedTokenizerBase = _load("tokenizer", config.model, AutoTokenizer.from_pretrained)
    if not tokenizer("The quick brown fox, 1 2 3.", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"model: {config.model!r} has no tokenizer of its own: the one that was loaded turns text into no tokens"
        )
    return tokenizer


def load_config(config: TrainConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> PretrainedConfig:
    """The model's own config, with the rotary setting the run asks for.

    tokenizer: None where no text is read
    Raises: ValueError for what cannot be trained, and a tokenizer that does not belong to it
    """
    if config.model == TINY:
        return _extended(tiny_model(config.context, config.seed).config, config)
    found: PretrainedConfig = _load("model", config.model, AutoConfig.from_pretrained)
    if found.is_encoder_decoder:
        raise ValueError(
            f"model: {config.model!r} holds an encoder-decoder; only causal language models can be trained"
        )
    size = found.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1) if tokenizer else -1
    if largest >= size:
        raise ValueError(
            f"model: the tokenizer of {config.model!r} has ids up to {largest:,}, the model's vocabulary ends at "
            f"{size - 1:,}: they do not belong together, or the model's embeddings were not resized"
        )
    return _extended(found, config)


def positions(model_config: PretrainedConfig) -> int | None:
    """How many positions the model was made for, if it says so."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


def _extended(model_config: PretrainedConfig, config: TrainConfig) -> PretrainedConfig:
    text = model_config.get_text_config()
    if config.rope_type is None and config.rope_theta is None:
        return model_config
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if not rope or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"rope_type, rope_theta: {type(model_config).__name__} has no single rotary embedding that could be changed"
        )
    if config.rope_theta is not None:
        rope["rope_theta"] = float(config.rope_theta)
    if config.rope_type is not None:
        original = rope.get("original_max_position_embeddings") or positions(model_config)
        if not original:
            raise ValueError("rope_type: the model does not say how many positions it was made for")
        factor = config.rope_factor or max(config.context / original, 1.0)
        kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}  # the model's own
        rope = kept | {"rope_type": config.rope_type, "factor": float(factor)}
        if config.rope_type == "yarn":
            rope["original_max_position_embeddings"] = original
        if config.rope_type != "dynamic":  # which reads the original length from here
            text.max_position_embeddings = max(text.max_position_embeddings, config.context)
    text.rope_parameters = rope
    try:
        with tempfile.TemporaryDirectory() as folder:
            model_config.save_pretrained(folder)
            type(model_config).from_pretrained(folder)
    except Exception as error:  # it would come when the trained model is saved
        reason, name = " ".join(str(error).split()), type(model_config).__name__
        raise ValueError(f"rope_type, rope_theta: {name} takes no such setting: {reason}") from error
    return model_config


def load_model(config: TrainConfig, model_config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on its device, in training mode, with new adapters if the run has them.

    Raises: ValueError if weights are missing, or an optional package is
    """
    model = load_base(config, model_config, dtype, device)
    return (_with_adapters(model, config) if config.adapter != "none" else model).train()


def load_base(config: TrainConfig, model_config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on its device without adapters, in 4 bits if the run has it so. Raises: as `load_model`"""
    if config.adapter != "none":
        require("peft", f"adapter={config.adapter!r}")
    if config.adapter == "qlora":
        require("bitsandbytes", "adapter='qlora'")
        if config.model == TINY:
            raise ValueError("adapter: qlora needs a saved model, whose weights are quantized as they are loaded")
    if config.model == TINY:
        model: Any = tiny_model(config.context, config.seed)
        model.config.rope_parameters = model_config.rope_parameters
        model = type(model)(model.config) if config.rope_type or config.rope_theta else model
        model.to(dtype)
    else:
        model = _load_weights(config, model_config, dtype, device)
    if config.adapter != "qlora":
        model.to(device)
    return model


def adapter_targets(config: TrainConfig) -> str | list[str]:
    """`lora_targets` as peft takes them."""
    targets = config.lora_targets
    return targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]


def adapter_settings(config: TrainConfig) -> Any:
    """The adapters of a run as peft takes them."""
    dropout = config.lora_dropout
    return lora(adapter_targets(config), config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=dropout)


def _with_adapters(model: Any, config: TrainConfig) -> Any:
    from peft import prepare_model_for_kbit_training

    if config.adapter == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return with_adapters(model, adapter_settings(config))


def _load_weights(config: TrainConfig, model_config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """All of a model's weights, or an error: a missing one would be trained from random numbers."""
    options: dict[str, Any] = {"config": model_config, "dtype": dtype}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # all told in one line below
    if config.adapter == "qlora":
        from transformers import BitsAndBytesConfig

        compute = dtype if dtype != torch.float32 else torch.bfloat16
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
        options["device_map"] = {"": device}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model, info = _load("model", config.model, AutoModelForCausalLM.from_pretrained, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)
    lacking = [str(key) for kind in ("missing_keys", "mismatched_keys") for key in info.get(kind, ())]
    if lacking:
        raise ValueError(
            f"model: {config.model!r} lacks {len(lacking)} of the model's weights or has them in another shape, "
            f"{lacking[0]} for one: they would be random numbers"
        )
    return model


def _load(what: str, path: str, load: Callable[..., Any], **options: Any) -> Any:
    """Call one of the library's loaders; say in one line what failed.

    What is no folder here may be a name on the Hub, `owner/name`; nothing else is looked up, since that takes long.
    """
    folder = Path(path).expanduser()
    may_be_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not folder.parent.exists()
    if not folder.is_dir() and not may_be_name:
        raise ValueError(f"model: there is no folder {str(folder)!r}; give one, a Hub name `owner/name`, or `{TINY}`")
    try:
        return load(str(folder) if folder.is_dir() else path, **options)
    except Exception as error:  # the libraries raise many kinds, and all mean the same here
        reason = " ".join(str(error).split())
        raise ValueError(f"model: cannot load a {what} from {path!r}: {reason[:300]}") from error
