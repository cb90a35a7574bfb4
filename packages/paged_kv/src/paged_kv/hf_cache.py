"""Generation with transformers over pages: `model.generate(…, **cache.argument)` while a `PagedCache` is in force.

The cache takes the place of transformers' own, and of the model's attention. Padding is never stored: a token that the
attention mask hides takes no place in the pages, and each sequence is as long as its own tokens. Needs transformers
(`pip install 'oomb-paged-kv[hf]'`); nothing else in this package does.

Letters: B batch · C columns of one call (tokens and padding) · H query heads · G KV heads · D head dim
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .attention import BackendName, paged_attention
from .hf_mask import AttentionInterface, AttentionMaskInterface, Cache, CacheLayerMixin, NotServed, Seen, seen_by
from .page_table import is_count
from .pool import PagePool
from .resident import PagedKV

_HARMLESS = ("position_ids", "cache_position")


@dataclass
class _Batch:
    """The sequences of the batch, and which columns of it were tokens.

    Shapes: valid [B, columns] bool on the device; begun [B, 1] bool on the host: which sequences have a token
    `gaps`: some sequence has padding between its tokens
    """

    ids: list[int]
    valid: Tensor
    begun: Tensor
    gaps: bool = False

    @property
    def columns(self) -> int:
        return self.valid.shape[1]


class _ForwardOnly(torch.autograd.Function):
    """Attention's output, which depends on queries, keys and values in a way that no backward follows."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *_: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("PagedCache: attention over its pages has no backward; train without the cache")


class PagedCache(Cache):
    """Keys and values of one batch of `generate`, in pages; a context manager.

    Within it the model's attention reads the pages, and `generate` and `forward` take it as `**cache.argument`, under
    the name that their version of transformers has for it (`past_key_values` or `cache`). Afterwards the model is as it
    was and the pages are gone. A batch may be continued by a further call, cropped, reordered and repeated: repeated
    and reordered sequences share pages until they part.

    `kv`: the sequences themselves. Units: tokens: room for the tokens of all sequences together
    Raises: ValueError for a model whose attention cannot be replaced, whose layers differ in their heads or keep more
        than keys and values, or which is spread over several devices
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens: int,
        page_tokens: int = 64,
        backend: BackendName = "auto",
        max_sequences: int = 256,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        devices = {p.device for p in model.parameters()}
        if len(devices) != 1:
            raise ValueError(f"PagedCache: expected a model on one device, got {sorted(map(str, devices))}")
        if not is_count(tokens, 1) or not is_count(page_tokens, 1):
            raise ValueError(f"PagedCache: expected tokens and page_tokens >= 1, got {tokens!r} and {page_tokens!r}")
        super().__init__(layers=[_Layer(self) for _ in range(config.num_hidden_layers)])
        kv_heads, head_dim = _heads_of(type(model).__name__, config)
        pool = PagePool(
            layers=config.num_hidden_layers,
            slots=-(-tokens // page_tokens),
            page_tokens=page_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=model.dtype,
            device=devices.pop(),
        )
        self.kv = PagedKV(pool, max_sequences=max_sequences)
        self.model, self.backend = model, backend
        self.name = f"paged_kv_{id(self):x}"
        self._in_force = False
        self._batch: _Batch | None = None
        self._given: tuple[int, Tensor] | None = None  # the layer and keys that attention must come for next
        self._index: Tensor | None = None  # which of the B * C columns are tokens; None: all

    @property
    def argument(self) -> dict[str, PagedCache]:
        """The cache as a keyword argument of the model."""
        named = "cache" in inspect.signature(type(self.model).forward).parameters
        return {"cache" if named else "past_key_values": self}

    # The model's attention, while this is in force

    def __enter__(self) -> Self:
        if self._in_force:
            raise ValueError("PagedCache: in force already; make another cache for another batch")
        held: list[Any] = [getattr(module, "config", None) for module in self.model.modules()]
        configs = {id(config): config for config in held if hasattr(config, "_attn_implementation_internal")}.values()
        self._before = [(config, config._attn_implementation_internal) for config in configs]
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, seen_by)
        try:
            self.model.set_attn_implementation(self.name)
            if self.model.config._attn_implementation != self.name:
                raise ValueError(f"PagedCache: {type(self.model).__name__} does not let its attention be replaced")
        except BaseException:
            self.__exit__()
            raise
        self._in_force = True
        return self

    def __exit__(self, *_: object) -> None:
        self._in_force = False
        for config, name in self._before:
            config._attn_implementation_internal = name
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name, None)
        self.reset()

    @torch.compiler.disable
    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """The attention function that transformers calls in every layer.

        Shapes: query [B, H, C, D]; key, value [B, G, C, D]; out [B, C, H, D]
        """
        name, layer = type(module).__name__, int(module.layer_idx)
        given, self._given = self._given, None
        unknown = [n for n, x in more.items() if isinstance(x, Tensor) and n not in _HARMLESS]
        if dropout or softcap is not None or unknown:
            raise ValueError(
                f"PagedCache: {name} asks for dropout {dropout}, softcap {softcap}, {unknown}: not supported"
            )
        if given is None or given[0] != layer or given[1] is not key:
            raise ValueError(
                f"PagedCache: {name} attends to other keys than it gave to the cache: call generate or forward with "
                "**cache.argument"
            )
        if not isinstance(attention_mask, Seen):
            raise ValueError(f"PagedCache: {name} was given a mask of its own; pass a 2D attention_mask or none")
        window = attention_mask.window
        if sliding_window not in (None, window):
            raise ValueError(f"PagedCache: {name} has a window of {sliding_window}, its mask one of {window}")
        batch, heads, columns, dim = query.shape
        if layer == 0:
            self._begin(attention_mask.valid, batch, columns)
        if window is not None and self._batch is not None and self._batch.gaps:
            raise ValueError(
                "PagedCache: padding between a sequence's tokens would count in a sliding window: pad on the left"
            )
        if self._index is not None and not len(self._index):
            out = query.new_zeros((batch * columns, heads, dim))  # padding only
        else:
            q, k, v = (self._packed(x) for x in (query, key, value))
            self.kv.append(layer, k, v)
            scale = dim**-0.5 if scaling is None else float(scaling)
            sinks = None if s_aux is None else s_aux.detach()
            out = paged_attention(
                q, k, v, self.kv, layer, scale=scale, window=window, sinks=sinks, backend=self.backend
            )
            if self._index is not None:
                out = out.new_zeros((batch * columns, heads, dim)).index_copy_(0, self._index, out)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            out = _ForwardOnly.apply(out, query, key, value)
        return out.view(batch, columns, heads, dim), None

    def _packed(self, x: Tensor) -> Tensor:
        """[B, heads, C, D] to the tokens that are no padding, [T, heads, D]."""
        rows = x.transpose(1, 2).flatten(0, 1).detach()
        return rows.contiguous() if self._index is None else rows[self._index]

    def _begin(self, valid: Tensor | None, batch: int, columns: int) -> None:
        """Open the block of a forward pass: the tokens that the mask shows. Shapes: valid [B, columns so far] bool"""
        device, old = self.kv.pool.device, self.get_seq_length()
        held = batch if self._batch is None else len(self._batch.ids)
        if valid is None:
            valid = torch.ones((batch, old + columns), dtype=torch.bool, device=device)
        if batch != held or tuple(valid.shape) != (held, old + columns):
            raise ValueError(
                f"PagedCache: expected {held} sequences and an attention_mask [{held}, {old + columns}], got {batch} "
                f"and {list(valid.shape)}; reset() the cache for another batch"
            )
        same = (valid[:, :old] == self._batch.valid).all() if self._batch is not None else valid.new_ones(())
        same, fresh = torch.cat((same[None], valid[:, old:].flatten())).cpu().split((1, batch * columns))  # one wait
        if not same:
            raise ValueError("PagedCache: the attention_mask of tokens already in the cache has changed")
        counts = fresh.view(batch, columns).sum(1).tolist()
        before = self._batch or self._empty(batch, valid)
        try:
            if any(counts):
                self.kv.extend({s: n for s, n in zip(before.ids, counts) if n})
        except BaseException:
            for sequence in before.ids if self._batch is None else ():
                self.kv.free(sequence)
            raise
        self._index = None if all(n == columns for n in counts) else fresh.nonzero()[:, 0].to(device)
        begun = torch.cat((before.begun, fresh.view(batch, columns)), 1).cummax(1).values
        gaps = before.gaps or bool((begun[:, :-1] & ~fresh.view(batch, columns)).any())
        self._batch = _Batch(before.ids, valid, begun[:, -1:], gaps)

    def _empty(self, batch: int, valid: Tensor) -> _Batch:
        self._check_room(batch, "a batch of")
        begun = torch.zeros(batch, 1, dtype=torch.bool, device="cpu")
        return _Batch([self.kv.add() for _ in range(batch)], valid[:, :0], begun)

    def _check_room(self, batch: int, what: str) -> None:
        """Raises: ValueError if so many sequences cannot be held in place of the batch there is"""
        others = self.kv.batch - (0 if self._batch is None else len(self._batch.ids))
        if batch + others > self.kv.max_sequences:
            raise ValueError(
                f"PagedCache: expected at most {self.kv.max_sequences - others} sequences, got {what} {batch}; give "
                "PagedCache a larger max_sequences"
            )

    # What transformers asks of a cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Nothing is joined: attention finds the past in the pages.

        Raises: ValueError where it would not: the model's attention is not this cache's
        """
        pending, self._given = self._given, None
        if pending is not None or not self._in_force:
            raise ValueError(
                f"PagedCache: only the attention of its own {type(self.model).__name__} reads the pages, within `with "
                "PagedCache(model, …) as cache:`"
            )
        self._given = (layer_idx, key_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far: tokens and padding, as transformers counts."""
        return 0 if self._batch is None else self._batch.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forget the batch and give its pages back."""
        for sequence in self.kv.sequences:
            self.kv.free(sequence)
        self._batch = self._given = self._index = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last columns away: their number, negative."""
        columns = self.get_seq_length()
        try:
            tokens_to_remove = operator.index(tokens_to_remove)
        except TypeError:
            raise ValueError(f"PagedCache.crop: expected an int in [-{columns}, 0], got {tokens_to_remove!r}") from None
        if tokens_to_remove > 0 or -tokens_to_remove > columns:
            raise ValueError(f"PagedCache.crop: expected an int in [-{columns}, 0], got {tokens_to_remove}")
        if tokens_to_remove == 0 or self._batch is None:
            return
        batch = self._batch
        valid = batch.valid[:, : columns + tokens_to_remove]
        lengths = valid.sum(1).tolist()
        self.kv.truncate(dict(zip(batch.ids, lengths)))
        begun = torch.tensor(lengths, device="cpu")[:, None] > 0
        self._batch = _Batch(batch.ids, valid, begun, batch.gaps)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not is_count(repeats, 1):
            raise ValueError(f"PagedCache: expected repeats to be a positive int, got {repeats!r}")
        if self._batch is not None:
            self.batch_select_indices(torch.arange(len(self._batch.ids), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The batch's sequences become these of the old ones. The first to go on with one keeps it, others fork it."""
        if self._batch is None:
            return
        old, chosen = self._batch, torch.as_tensor(indices, device="cpu").tolist()
        count = len(old.ids)
        if not isinstance(chosen, list) or not chosen or not all(is_count(i, 0) and i < count for i in chosen):
            raise ValueError(f"PagedCache: expected a list of indices in [0, {count}), got {chosen}")
        self._check_room(len(chosen), "a selection of")
        for i in set(range(count)) - set(chosen):
            self.kv.free(old.ids[i])
        ids = [self.kv.fork(old.ids[i]) if i in chosen[:at] else old.ids[i] for at, i in enumerate(chosen)]
        self._batch = _Batch(ids, old.valid[torch.tensor(chosen, device=old.valid.device)], old.begun[chosen], old.gaps)


def _heads_of(name: str, config: Any) -> tuple[int, int]:
    """KV heads and their size, the same in all layers, which keep nothing else."""
    others = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(
            f"PagedCache: {name} has layers of kind {', '.join(others)}; expected full or sliding attention in each"
        )
    try:
        heads = config.num_attention_heads
        kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except Exception as error:  # it has none, or others from layer to layer, an error of the library's own
        raise ValueError(f"PagedCache: {name} has no one number and size of heads for all layers: {error}") from error
    return kv_heads, head_dim


class _Layer(CacheLayerMixin):
    """What transformers asks of each layer of a cache; the cache itself answers."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Pages are there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("PagedCache: a layer is updated through its cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    def __getattr__(self, name: str) -> Any:
        raise NotServed(f"PagedCache: the model asks its cache for {name!r}: it keeps more there than keys and values")
