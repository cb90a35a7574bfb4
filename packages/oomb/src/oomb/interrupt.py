"""Ctrl-C and SIGTERM: heard between chunks, never inside an optimizer step, and answered with a checkpoint."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

HEARD = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop; `checkpoint` is the folder that goes on from here, if a step had been done."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number
        self.checkpoint: str | None = None


class Interrupts:
    """Which signal has come, if any. A second one is not held back."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals instead of acting on them; only the main thread may, others leave signals alone.

        A signal that the process ignores (Ctrl-C in what a script started with `&`) stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = ((number, signal.getsignal(number)) for number in HEARD)
        before = {number: handler for number, handler in handlers if handler not in (signal.SIG_IGN, None)}
        owner = os.getpid()

        def note(number: int, _frame: FrameType | None) -> None:
            if os.getpid() != owner:  # a data loader's worker: Ctrl-C is its parent's to hear, SIGTERM ends it
                if number == signal.SIGTERM:
                    os._exit(128 + number)
                return
            self.number = number
            for heard, handler in before.items():
                signal.signal(heard, handler)

        self.number = None
        try:
            for number in before:
                signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raises: Interrupted if a signal has come. Call it where everything may be dropped."""
        if self.number is not None:
            raise Interrupted(self.number)


class RandomState(TrainerCallback):
    """The random state after the last whole step, which a checkpoint of that step must hold.

    A step that is interrupted has drawn numbers already.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        self._state["seen"] = state.num_input_tokens_seen
        if torch.cuda.is_available():
            self._state["cuda"] = torch.cuda.get_rng_state_all()

    def restore(self, state: TrainerState) -> None:
        """Bring it back, and the count of tokens that goes with it."""
        random.setstate(self._state["python"])
        np.random.set_state(self._state["numpy"])
        torch.set_rng_state(self._state["torch"])
        state.num_input_tokens_seen = self._state["seen"]
        if "cuda" in self._state:
            torch.cuda.set_rng_state_all(self._state["cuda"])
