"""Settings that must hold before any test module is imported."""

import importlib.util
import os
import signal

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads this when a kernel is decorated, so it must be set before the first import of a kernel.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What a script starts with `&` ignores Ctrl-C, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Parallel workers share the cores: more threads than one each only makes them wait for one another.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


def _interpret_without_detours() -> None:
    """Triton's interpreter patches its whole language anew at every call of a function inside a kernel, which changes
    nothing after the first and is a third of the time of such tests.
    """
    from triton.runtime import interpreter

    run, patch, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch(self, *args, **kwargs):
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    def patch_once(function):
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch, patch_once


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _interpret_without_detours()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where no CUDA device is present."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)
