"""Text from files to training sequences: read, tokenized, joined, cut into windows of one context."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from oomb.train_config import STDLIB

# Tests, generated tables and bundled programs: not what one would learn Python from.
_NOT_LIBRARY = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip


@dataclass(frozen=True)
class Windows:
    """Sequences of one context each, and how they came about.

    Shapes: ids [windows, T] int32
    """

    ids: Tensor
    files: int  # read, at least in part
    skipped: tuple[str, ...]  # not text in UTF-8
    unused_tokens: int  # after the last whole window

    def __len__(self) -> int:
        return self.ids.shape[0]

    def step(self, index: int) -> Tensor:
        """The sequence of step `index`, [1, T] int64; after the last window the first comes again."""
        return self.ids[index % len(self)].long()[None]


def find_files(data: str, seed: int) -> list[Path]:
    """The files that `data` names, in the order they are read.

    Returns: one file; or a folder's files without hidden ones, in an order that depends on names and seed alone
    Raises: ValueError if there is no such path, or nothing in it
    """
    if data == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not _NOT_LIBRARY & set(path.relative_to(root).parts)]
    else:
        root = Path(data).expanduser()
        if root.is_file():
            return [root]
        if not root.is_dir():
            raise ValueError(f"data: there is no file or folder {str(root)!r}; give a path to text, or `{STDLIB}`")
        files = [
            path
            for path in root.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
        ]
    if not files:
        raise ValueError(f"data: no files in {str(root)!r}")
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    random.Random(seed).shuffle(files)  # neighbours in a folder are alike; windows should not be
    return files


def read_windows(
    data: str, tokenizer: PreTrainedTokenizerBase, context: int, *, seed: int, steps: int | None
) -> Windows:
    """Tokens of the files, one after another with the end-of-text token between, cut every `context` tokens.

    Reads no further than `steps` windows need; `steps=None` reads everything.
    Raises: ValueError if the text is shorter than one context, or a file named by itself is not readable text
    """
    files = find_files(data, seed)
    wanted = None if steps is None else steps * context
    parts: list[Tensor] = []
    skipped: list[str] = []
    found = read = 0
    for text in _texts(files, skipped):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        parts.append(torch.tensor(ids, dtype=torch.int32))
        found += len(ids)
        read += 1
        if wanted is not None and found >= wanted:
            found = wanted  # the rest of this file is simply not reached by this run
            break
    windows = found // context
    if not windows:
        seen = f" ({len(skipped)} skipped, not UTF-8 text)" if skipped else ""
        raise ValueError(
            f"data: {data!r} is shorter than one context: found {found:,} tokens in {read:,} files{seen}, "
            f"need {context:,}; give more text or a smaller context"
        )
    ids = torch.cat(parts)[: windows * context].view(windows, context)
    return Windows(ids, read, tuple(skipped), found - windows * context)


def _texts(files: list[Path], skipped: list[str]) -> Iterator[str]:
    """Decode files; what is not text is skipped and noted, except where it is the only file there is."""
    for path in files:
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise ValueError(f"data: cannot read {str(path)!r}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            if len(files) == 1:
                raise ValueError(f"data: {str(path)!r} is not UTF-8 text: {error.reason} at {error.start}") from error
            skipped.append(str(path))
            continue
        if "\0" in text:
            if len(files) == 1:
                raise ValueError(f"data: {str(path)!r} is not text: it holds a NUL byte")
            skipped.append(str(path))
        elif text:
            yield text
