"""From files to token documents: found, read through `datasets`, tokenized, one after another."""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from oomb.batch import IGNORED
from oomb.packing import Tokens
from oomb.quiet import reading
from oomb.train_config import STDLIB, TrainConfig

TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SHUFFLE_ROWS = 10_000  # of a stream, held at once

# Tests, generated tables and bundled programs: not what one would learn Python from.
_NOT_LIBRARY = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What `data` names, found but not read.

    kind: text, json or parquet
    documents: the files of each document, for text; for tables, each file by itself
    """

    path: str
    kind: str
    documents: tuple[tuple[Path, ...], ...]

    @property
    def files(self) -> int:
        return sum(map(len, self.documents))


def find_source(config: TrainConfig, path: str | None = None) -> Source:
    """The files that `data` (or another path) names, in the order they are read: by names and seed alone.

    Raises: ValueError if there is no such path, nothing in it, or tables and text beside each other
    """
    data = config.data if path is None else path
    root, files = _files(data)
    if not files:
        raise ValueError(f"data: no files in {str(root)!r}")
    kinds = {TABLES.get(file.suffix.lower(), "text") for file in files}
    kind = config.data_format
    if kind == "auto":
        if len(kinds) > 1:
            by_kind = {TABLES.get(file.suffix.lower(), "text"): file.name for file in files}
            examples = ", ".join(sorted(by_kind.values()))
            raise ValueError(
                f"data: {str(root)!r} holds files of several kinds ({examples}): say with data_format whether to read "
                "them as text, json or parquet"
            )
        (kind,) = kinds
    elif kind != "text":
        files = [file for file in files if TABLES.get(file.suffix.lower()) == kind]
        if not files:
            raise ValueError(f"data: no {kind} files in {str(root)!r}")
    files.sort(key=lambda file: file.relative_to(root).as_posix() if file != root else "")
    random.Random(config.seed).shuffle(files)  # neighbours in a folder are alike; sequences should not be
    if kind != "text" or root.is_file() or config.documents == "file":
        return Source(data, kind, tuple((file,) for file in files))
    return Source(data, kind, _by_repository(root, files))


def _files(data: str) -> tuple[Path, list[Path]]:
    if data == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, [path for path in root.rglob("*.py") if not _NOT_LIBRARY & set(path.relative_to(root).parts)]
    root = Path(data).expanduser()
    if root.is_file():
        return root, [root]
    if not root.is_dir():
        raise ValueError(f"data: there is no file or folder {str(root)!r}; give a path to text, or `{STDLIB}`")
    found = (path for path in root.rglob("*") if path.is_file())
    return root, [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def _by_repository(root: Path, files: list[Path]) -> tuple[tuple[Path, ...], ...]:
    """One document for each folder with a `.git`; where there is none, the whole folder is one."""
    roots = {path.parent for path in root.rglob(".git")} or {root}
    groups: dict[Path, list[Path]] = {}
    for file in files:
        home = next((parent for parent in file.parents if parent in roots), file)
        groups.setdefault(home, []).append(file)
    return tuple(tuple(group) for group in groups.values())


@dataclass
class Reader:
    """Reads a source as token documents, and notes what it passes over.

    Raises: ValueError for files that cannot be read, columns that are missing, values of another kind
    """

    source: Source
    tokenizer: PreTrainedTokenizerBase
    config: TrainConfig
    vocab_size: int
    files: int = 0  # read, at least in part
    skipped: list[str] = field(default_factory=list)  # not text in UTF-8
    empty: int = 0  # documents without a token

    def documents(self) -> Iterator[Iterable[Tokens]]:
        """Each document as its parts, in order; a part is read when it is asked for."""
        if self.source.kind == "text":
            yield from (self._text_document(files) for files in self.source.documents)
        else:
            yield from ([tokens] for tokens in self._rows())

    def _text_document(self, files: tuple[Path, ...]) -> Iterator[Tokens]:
        begun = False
        for path in files:
            text = self._text(path)
            if text:
                yield self._tokenized(text, begins=not begun)
                begun = True
        self.empty += not begun

    def _text(self, path: Path) -> str | None:
        """Decode a file; what is not text is skipped and noted, except where it is the only file there is."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"data: cannot read {str(path)!r}: {error.strerror or error}") from error
        try:
            text = content.decode("utf-8")
            problem = "it holds a NUL byte" if "\0" in text else None
        except UnicodeDecodeError as error:
            problem = f"{error.reason} at {error.start}"
        if problem is None:
            self.files += 1
            return text
        if self.source.files == 1:
            raise ValueError(f"data: {str(path)!r} is not UTF-8 text: {problem}")
        self.skipped.append(str(path))
        return None

    def _tokenized(self, text: str, *, begins: bool = True) -> Tokens:
        """Tokens of a text, closed by the end-of-text token, opened as the tokenizer opens texts."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if begins and self._opens_with_bos():
            ids.insert(0, self.tokenizer.bos_token_id)
        if self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return Tokens(np.array(ids, dtype=np.int32))

    def _opens_with_bos(self) -> bool:
        first: Any = self.tokenizer("a")["input_ids"]
        return self.tokenizer.bos_token_id is not None and first[:1] == [self.tokenizer.bos_token_id]

    def _rows(self) -> Iterator[Tokens]:
        from datasets import load_dataset  # a second to import: only where there are tables

        paths = [str(files[0]) for files in self.source.documents]
        with reading(self.source.path):
            rows: Any = load_dataset(self.source.kind, data_files=paths, split="train", streaming=self.config.streaming)
            names = list(rows.features or next(iter(rows), {}))
        read = self._reader_of(names)
        shuffling = {"buffer_size": SHUFFLE_ROWS} if self.config.streaming else {}
        rows = iter(rows.shuffle(seed=self.config.seed, **shuffling))
        for index in itertools.count():
            with reading(self.source.path):  # of a stream much is read only now
                row = next(rows, None)
            if row is None:
                return
            try:
                tokens = read(row)
            except (KeyError, TypeError, ValueError) as error:
                reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise ValueError(f"data: row {index} of {self.source.path!r} (shuffled): {reason}") from error
            self.files = len(paths)
            if len(tokens):
                yield tokens
            else:
                self.empty += 1

    def _reader_of(self, names: list[str]) -> Any:
        if self.config.text_column in names:
            return self._from_text
        if "messages" in names:
            if not self.tokenizer.chat_template:
                raise ValueError("data: there is a column `messages`, but the tokenizer has no chat template")
            return self._from_messages
        if "input_ids" in names:
            return self._from_ids
        raise ValueError(
            f"data: {self.source.path!r} has none of the columns {self.config.text_column!r}, 'messages' or "
            f"'input_ids', only {', '.join(map(repr, names)) or 'no columns'}; name another with text_column"
        )

    def _from_text(self, row: dict[str, Any]) -> Tokens:
        text = row[self.config.text_column]
        if not isinstance(text, str):
            raise ValueError(f"column {self.config.text_column!r} must hold text, got {type(text).__name__}")
        return self._tokenized(text) if text else Tokens(np.zeros(0, dtype=np.int32))

    def _from_messages(self, row: dict[str, Any]) -> Tokens:
        if not row["messages"]:
            return Tokens(np.zeros(0, dtype=np.int32))
        masked = self.config.assistant_only
        made: Any = self.tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=masked
        )
        ids = np.array(made["input_ids"], dtype=np.int32)
        if not masked:
            return Tokens(ids)
        learned = np.array(made["assistant_masks"], dtype=bool)
        if not learned.any():
            raise ValueError(
                "assistant_only: the chat template marks no token as the assistant's: it needs {% generation %}, or "
                "the conversation holds no assistant turn"
            )
        return Tokens(ids, np.where(learned, ids, -100).astype(np.int32))

    def _from_ids(self, row: dict[str, Any]) -> Tokens:
        ids = np.asarray(row["input_ids"])
        labels = row.get("labels")
        if not np.issubdtype(ids.dtype, np.integer) and len(ids):
            raise ValueError(f"input_ids must be whole numbers, got {ids.dtype}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"input_ids run from {ids.min()} to {ids.max()}, the model's vocabulary ends at {self.vocab_size - 1}"
            )
        mask = row.get("attention_mask")
        if mask is not None and not np.asarray(mask).all():
            raise ValueError("attention_mask hides tokens: give rows without padding, which would be learned")
        if labels is None:
            return Tokens(ids.astype(np.int32))
        given = np.asarray(labels)
        if given.shape != ids.shape:
            raise ValueError(f"labels must be as many as input_ids, got {given.shape[0]} and {ids.shape[0]}")
        if not np.issubdtype(given.dtype, np.integer) and len(given):
            raise ValueError(f"labels must be whole numbers, got {given.dtype}")
        wrong = given[(given != IGNORED) & ((given < 0) | (given >= self.vocab_size))]
        if len(wrong):
            raise ValueError(
                f"labels must be {IGNORED} or in the model's vocabulary, which ends at {self.vocab_size - 1}, got "
                f"{wrong[0]}"
            )
        return Tokens(ids.astype(np.int32), given.astype(np.int32))
