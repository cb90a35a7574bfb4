"""A transformers Trainer whose steps run in chunks: everything around the step stays the library's."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerState

from .api import chunked_backward, chunked_loss
from .config import ChunkConfig
from .interrupt import Interrupted, Interrupts, RandomState
from .loss import TokenLoss
from .nonfinite import ADVICE, bad_gradients, where_loss_breaks
from .resume import STATE, check_checkpoint, find_checkpoint
from .token_losses import dynamic, from_batch_loss, smoothed
from .trainer_checks import refuse_settings, step_arguments, without_borders

_Base: Any = Trainer if TYPE_CHECKING else object


class ChunkTrainerMixin(_Base):
    """Put before a transformers Trainer (or TRL's SFTTrainer) to run its steps in chunks with exact gradients.

    `class LongSFTTrainer(ChunkTrainerMixin, SFTTrainer): ...`. The step, the evaluation and what Ctrl-C does are ours;
    optimizer, schedule, clipping, accumulation, logging, callbacks and checkpoints are the Trainer's. Metrics that a
    subclass computes from logits (TRL's entropy and token accuracy) are not there.

    chunk_config: how a sequence is cut and where its past lives (default `ChunkConfig()`)
    Raises: ValueError when made, for settings a chunked step cannot honour
    Callbacks may have `on_batch(args, state, control, shape=…)` and `on_chunk(…, done=…, total=…)`, told of every batch
    and chunk of a step, and `on_measure(…, logs=…)`, which may add to what is reported of a step.
    """

    def __init__(self, *args: Any, chunk_config: ChunkConfig | None = None, **kwargs: Any) -> None:
        self.chunk_config = ChunkConfig() if chunk_config is None else chunk_config
        if not isinstance(self.chunk_config, ChunkConfig):
            raise ValueError(f"chunk_config must be a ChunkConfig, got {type(chunk_config).__name__}")
        super().__init__(*args, **kwargs)
        refuse_settings(self)
        self._interrupts = Interrupts()
        self._random_state = RandomState()
        self._last_checkpoint: tuple[int, Path] | None = None  # step and folder of the newest of this run
        self._noise = _EmbeddingNoise(self.neftune_noise_alpha)
        self.add_callback(self._random_state)

    # ---- steps

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Both passes of one batch. Returns: its loss as the stock Trainer scales it, detached"""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch = step_arguments(self._prepare_inputs(inputs))
        scale = self._loss_scale(num_items_in_batch)
        self._tell("on_batch", shape=tuple(batch["input_ids"].shape))
        self._noise.begin(self.accelerator.unwrap_model(model), batch["input_ids"].shape[1])
        try:
            with self.accelerator.autocast():
                loss = chunked_backward(
                    model,
                    **batch,
                    num_items=num_items_in_batch,
                    loss_fn=self._token_loss(num_items_in_batch),
                    config=self.chunk_config,
                    scale=scale * self._scaler_factor(),
                    progress=self._on_chunk,
                )
        except BaseException:
            model.zero_grad()
            raise
        if not math.isfinite(float(loss)):
            self._stop_at_loss(model, batch, float(loss), num_items_in_batch)
        if self.accelerator.sync_gradients and self.accelerator.scaler is None:  # a scaler skips such steps by design
            self._check_gradients(model)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return loss.detach().to(self.args.device) * scale

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The loss as one scalar whose backward walks the chunks back; there are no outputs to return."""
        if return_outputs:
            raise ValueError("compute_loss(return_outputs=True): a chunked step never holds the outputs of all tokens")
        with self.accelerator.autocast():
            loss = chunked_loss(
                model,
                **step_arguments(inputs),
                num_items=num_items_in_batch,
                loss_fn=self._token_loss(num_items_in_batch),
                config=self.chunk_config,
                progress=self._on_chunk,
            )
        return loss * (self._loss_scale(num_items_in_batch) if num_items_in_batch is not None else 1.0)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of one batch without gradients, in the memory of one chunk's activations."""
        if not prediction_loss_only:
            raise ValueError(
                "predict() and prediction_loss_only=False return the logits of every token, which are never held at "
                "once: set prediction_loss_only=True, or generate"
            )
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            items = self._get_num_items_in_batch([inputs], self.args.device)
            return self.compute_loss(model, inputs, num_items_in_batch=items).detach(), None, None

    # ---- around them

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a checkpoint must be complete and of this model, and Ctrl-C or SIGTERM leaves one.

        Raises: Interrupted (a KeyboardInterrupt) after that; FloatingPointError for a loss or gradient that is not
            finite, with the weights of the step before
        """
        found = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        if found is not None:
            check_checkpoint(found, self.model)
            self._last_checkpoint = (TrainerState.load_from_json(str(found / STATE)).global_step, found)
        with self._interrupts.listening():
            try:
                return super().train(None if found is None else str(found), *args, **kwargs)
            except Interrupted as interrupt:
                interrupt.checkpoint = self._save_interrupted()
                raise
            finally:
                self._noise.end()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's; the random state of the training is not touched, so evaluating changes no run."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; callbacks may add what they measured, before anything is reported."""
        if "loss" in logs:
            self._tell("on_measure", logs=logs)
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Remove what a failed save leaves, so that nothing takes it for a checkpoint.

        Raises: OSError with what was kept, whichever of the libraries' errors a full disk came as
        """
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        try:
            super()._save_checkpoint(model, trial)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            kept = "none was saved before" if self._last_checkpoint is None else f"{self._last_checkpoint[1]} is intact"
            raise OSError(f"checkpoint of step {self.state.global_step} not saved ({kept}): {error}") from error
        self._last_checkpoint = (self.state.global_step, folder)

    def _save_interrupted(self) -> str | None:
        """A checkpoint of the last whole step. Returns: its folder; None if no step was done"""
        if self.state.global_step == 0:
            return None
        if self._last_checkpoint is None or self._last_checkpoint[0] != self.state.global_step:
            self._random_state.restore(self.state)
            self._save_checkpoint(self.model_wrapped, None)
            self.callback_handler.on_save(self.args, self.state, self.control)
        assert self._last_checkpoint is not None
        return str(self._last_checkpoint[1])

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns
        if "document_ids" not in columns:  # or the Trainer would drop it
            columns.append("document_ids")

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        return super()._get_num_items_in_batch([without_borders(batch) for batch in batch_samples], device)

    # ---- the step's insides

    def _on_chunk(self, done: int, total: int) -> None:
        self._interrupts.check()
        if self.model.training:
            self._tell("on_chunk", done=done, total=total)

    def _tell(self, event: str, **what: Any) -> None:
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(self.args, self.state, self.control, **what)

    def _loss_scale(self, num_items: Tensor | int | None) -> float:
        """What the loss is multiplied by beyond its division by the number of items, as in the stock Trainer."""
        if num_items is None:  # each batch by its own mean
            return 1.0 / self.current_gradient_accumulation_steps
        return float(self.accelerator.num_processes) if self.args.average_tokens_across_devices else 1.0

    def _scaler_factor(self) -> float:
        scaler = self.accelerator.scaler  # float16 only
        return 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.args.device)))

    def _token_loss(self, num_items: Tensor | int | None) -> TokenLoss | None:
        if self.compute_loss_func is not None:
            assert num_items is not None, "the Trainer counts items when compute_loss_func is set"
            return from_batch_loss(self.compute_loss_func, float(num_items))
        if getattr(self.args, "loss_type", "nll") == "dft":  # TRL
            return dynamic
        return None if self.label_smoother is None else smoothed(self.label_smoother.epsilon)

    def _stop_at_loss(self, model: nn.Module, batch: dict[str, Any], loss: float, num_items: Any) -> None:
        model.zero_grad()
        with self.accelerator.autocast():
            where = where_loss_breaks(model, batch, self.chunk_config, self._token_loss(num_items))
        place = "it was finite in a second run" if where is None else f"first at {where}"
        raise self._stop(f"the loss of step {self.state.global_step + 1} is {loss} ({place})")

    def _check_gradients(self, model: nn.Module) -> None:
        bad = bad_gradients(model)
        if bad is not None:
            model.zero_grad()
            raise self._stop(f"the gradient of step {self.state.global_step + 1} is not finite (in {bad})")

    def _stop(self, what: str) -> FloatingPointError:
        return FloatingPointError(f"{what}: stopped with the weights of step {self.state.global_step}; {ADVICE}")


class OombTrainer(ChunkTrainerMixin, Trainer):
    """A `transformers.Trainer` that trains and evaluates on sequences far longer than a chunk, with exact gradients.

    Takes what Trainer takes, and `chunk_config=ChunkConfig(...)`. Three steps equal the stock Trainer's.
    Raises: ValueError for settings a chunked step cannot honour (`compute_metrics`, `torch_compile`, sharding)
    """


class _EmbeddingNoise:
    """NEFTune's noise, which the library scales by the length of each call, at the length of the whole sequence."""

    def __init__(self, alpha: float | None) -> None:
        self._alpha, self._tokens = alpha, 1
        self._hook: Any = None

    def begin(self, model: nn.Module, tokens: int) -> None:
        self._tokens = tokens
        if self._alpha is not None and self._hook is None:
            embeddings = model.get_input_embeddings()  # type: ignore[operator]
            self._hook = embeddings.register_forward_pre_hook(self._scale)

    def _scale(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        assert self._alpha is not None
        module.neftune_noise_alpha = self._alpha * math.sqrt(inputs[0].shape[1] / self._tokens)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
