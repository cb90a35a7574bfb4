"""Checkpoint folders that are either the old one or the new one, never something between.

A checkpoint is written to a hidden sibling, flushed to the disk and swapped in by name. Whatever stops the process,
`recover` (which every save begins with) finds the complete one and removes the rest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def save_checkpoint(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save model (safetensors) and tokenizer so that `from_pretrained(folder)` loads both.

    Raises: whatever stopped the save; `folder` then holds what it held before
    """

    def write(into: Path) -> None:
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)

    replace_folder(folder, write)


def replace_folder(folder: str | Path, write: Callable[[Path], None]) -> None:
    """Replace `folder` by what `write` puts into the empty folder it is given: all of it, or nothing.

    Raises: ValueError if `folder` holds something else than a checkpoint; whatever `write` raises
    """
    folder = Path(folder).resolve()
    check_replaceable(folder)
    recover(folder)
    new, _ = _siblings(folder)
    new.mkdir(parents=True)
    try:
        write(new)
        _flush_tree(new)
        _swap(new, folder)
    except BaseException:
        recover(folder)
        raise
    _flush(folder.parent)
    recover(folder)  # what was replaced goes last


def check_replaceable(folder: str | Path) -> None:
    """Raise ValueError where saving to `folder` would delete something that is not a checkpoint."""
    folder = Path(folder)
    ours = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not ours)):
        raise ValueError(f"{str(folder)!r} is there and is not a checkpoint: move it away, or choose another output")


def recover(folder: str | Path) -> None:
    """Bring back a checkpoint that a killed save had moved aside, and remove what it left over."""
    folder = Path(folder).resolve()
    new, old = _siblings(folder)
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    for leftover in (new, old):
        if leftover.exists():
            shutil.rmtree(leftover)


def _siblings(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


def _swap(new: Path, folder: Path) -> None:
    """Give `new` the name `folder`; what had that name is left under one of the sibling names."""
    if not folder.exists():
        os.rename(new, folder)
    elif not _exchange(new, folder):
        os.rename(folder, _siblings(folder)[1])
        os.rename(new, folder)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in a single step where the system can: then no moment is without a checkpoint.

    Returns: False, with nothing changed, where the system or the file system has no such step
    """
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    failed = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _flush_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk before going on."""
    if path.is_dir() and os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
