"""The seam to transformers: our attention under a name of its own, switched on for the time of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "oomb"
PREPARED = "_original_forward"  # where accelerate puts the forward that it wraps for mixed precision
ASKING = "oomb_asking"  # the same attention, for which the library also makes masks


class Unsupported(ValueError):
    """The model cannot be trained in chunks exactly; the message says why."""


@dataclass(frozen=True)
class MaskSpec:
    """What the library would have masked, handed through the model to the attention function instead of a tensor."""

    mask_function: Callable


class AttentionContext(Protocol):
    """What travels through the model's keywords to every attention call of a pass."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, mask: object, scale: float, sinks: Tensor | None
    ) -> Tensor: ...


HARMLESS_TENSORS = ("position_ids", "cache_position")


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    oomb: AttentionContext | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in every layer.

    Shapes: query [B, H, C, D]; key, value [B, G, C, D], after the model's own rotary embedding; out [B, C, H, D]
    """
    if oomb is None:
        raise Unsupported(
            f"{type(module).__name__} was called with the attention implementation {NAME!r} outside a chunked "
            "step, or does not hand its keywords on to the attention function"
        )
    if dropout:
        raise Unsupported(
            f"attention dropout {dropout} cannot be honoured exactly in chunks: set attention_dropout to 0"
        )
    unknown = [name for name, value in more.items() if isinstance(value, Tensor) and name not in HARMLESS_TENSORS]
    if unknown:
        raise Unsupported(f"{type(module).__name__} hands attention tensors of unknown use: {', '.join(unknown)}")
    if isinstance(scaling, Tensor) and scaling.requires_grad:
        raise Unsupported(f"{type(module).__name__} learns the scale of its scores, which would get no gradient")
    if softcap is not None:
        raise Unsupported(f"attention logits are capped at {softcap}, which paged attention does not do")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return oomb.attend(module, q, k, v, mask=attention_mask, scale=scale, sinks=s_aux), None


def _mask(*_: Any, mask_function: Callable, **__: Any) -> MaskSpec:
    return MaskSpec(mask_function)


# A pass needs no masks: what they let a token see was asked before. Making them the library looks into the positions,
# for which the CPU would wait until the device has done all that it has been given.
AttentionInterface.register(NAME, attention)
AttentionInterface.register(ASKING, attention)
AttentionMaskInterface.register(ASKING, _mask)


@dataclass(frozen=True)
class Parts:
    """A model taken apart: what the user gave, the causal LM inside it, and its decoder."""

    given: nn.Module
    causal: PreTrainedModel
    decoder: nn.Module

    @property
    def device(self) -> torch.device:
        return self._embeddings.device

    @property
    def _embeddings(self) -> Tensor:
        weight = self.causal.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def vocab_size(self) -> int:
        return self._embeddings.shape[0]

    @property
    def label_size(self) -> int:
        head = self.causal.get_output_embeddings()
        return head.weight.shape[0] if hasattr(head, "weight") else head.out_features


def take_apart(model: nn.Module) -> Parts:
    """Find the causal LM and its decoder inside wrappers.

    Raises: Unsupported for what is not a causal language model, or is wrapped in something a chunked step would bypass
    """
    inner = model
    if isinstance(inner, nn.DataParallel) or any(type(m).__name__.startswith("FSDP") for m in inner.modules()):
        raise Unsupported(
            "models sharded by FSDP or split by DataParallel are not supported: the engine is for one GPU, or DDP"
        )
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        if inner.static_graph:
            raise Unsupported(
                "DDP with static_graph=True expects one backward a step, chunks need several: set it to False"
            )
        inner = inner.module
    inner = getattr(inner, "_orig_mod", inner)  # torch.compile
    if hasattr(inner, "get_base_model"):  # peft
        if getattr(inner.active_peft_config, "is_prompt_learning", False):
            raise Unsupported(
                "peft prompt learning adds virtual tokens outside the decoder: use LoRA or another adapter"
            )
        if getattr(inner.active_peft_config, "alora_invocation_tokens", None) is not None:
            raise Unsupported("activated LoRA turns its adapter on at tokens that a chunk may not hold: use plain LoRA")
        inner = inner.get_base_model()  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel):
        raise Unsupported(f"expected a transformers causal language model, got {type(inner).__name__}")
    _refuse_settings(inner)
    decoder, head = inner.get_decoder(), inner.get_output_embeddings()
    if head is None or decoder is None or decoder is inner:
        raise Unsupported(f"{type(inner).__name__} has no head over a decoder: load it with AutoModelForCausalLM")
    if decoder._compiled_call_impl is not None:
        raise Unsupported(
            f"{type(inner).__name__}'s decoder is compiled as a whole, which hides what its masks let a token see: "
            "compile its layers instead (layer.compile())"
        )
    if not hasattr(head, "weight") and not hasattr(head, "out_features"):
        raise Unsupported(f"the size of the head cannot be read off {type(head).__name__}")
    return Parts(model, inner, decoder)


def refuse_places(parts: Parts) -> None:
    """Raises: ValueError for weights that are not all on one device, or on none: they can be planned for but not run"""
    devices = {p.device for p in parts.causal.parameters()}
    if devices == {torch.device("meta")}:
        raise ValueError("the model is on the meta device: it has no weights to train; load it on a real device")
    if len(devices) > 1:
        raise ValueError(
            f"the model's weights are on {', '.join(sorted(map(str, devices)))}: expected all on one device; load it "
            'with device_map={"": "cuda:0"}, or without a device_map and then .to("cuda")'
        )


def refuse_autocast_of_one_call(parts: Parts) -> None:
    """Raises: ValueError for a model of which accelerate's wrapper, and nothing else, runs in mixed precision

    Weights of 16 bits are as good without it.
    """
    wide = any(p.dtype == torch.float32 for p in parts.causal.parameters())
    wrapped = any(PREPARED in vars(module) for module in parts.given.modules())
    if wide and wrapped and not torch.is_autocast_enabled(parts.device.type):
        raise ValueError(
            "accelerate prepared the model for mixed precision, which holds in calls of the whole model: chunks call "
            "its parts; call this within `with accelerator.autocast():`"
        )


def _refuse_settings(causal: PreTrainedModel) -> None:
    config = causal.config
    if config.is_encoder_decoder:
        raise Unsupported(f"{type(causal).__name__} is an encoder-decoder; only decoders are supported")
    if getattr(config, "return_dict", True) is False:
        raise ValueError("the model's config has return_dict=False: set it to True")
    if getattr(config.get_text_config(), "attn_temperature_tuning", False):
        raise Unsupported("attn_temperature_tuning counts positions from the start of each call: set it to False")


@contextmanager
def attention_installed(causal: PreTrainedModel, name: str = NAME) -> Iterator[None]:
    """Within it, the model's attention calls go to `attention` above; afterwards it has its own again.

    name: ASKING to have what the library would have masked handed to them, too
    """
    configs = {id(m.config): m.config for m in causal.modules() if isinstance(m, PreTrainedModel)}.values()
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        causal.set_attn_implementation(name)
        if causal.config._attn_implementation != name:
            raise Unsupported(f"{type(causal).__name__} does not let its attention be replaced (no AttentionInterface)")
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
