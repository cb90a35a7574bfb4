"""Settings from a YAML file and `--key value`, by the fields of the dataclasses they end up in."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn

import torch
import yaml

from oomb.config import ChunkConfig
from oomb.train_config import RENAMED, TrainConfig

# ChunkConfig is the library's, so its help stands here; a test keeps the two in step.
CHUNK_HELP = {
    "chunk_tokens": "tokens whose activations are held at once; auto: by device",
    "page_tokens": "tokens of one KV page",
    "attention": "dense: every token sees its whole past; sparse: chosen pages of it",
    "top_k_pages": "sparse: pages chosen by score for each block of queries",
    "recent_pages": "sparse: pages just before a query that are always read",
    "sink_pages": "sparse: pages at the beginning that are always read",
    "first_sparse_layer": "sparse: layers before this one stay dense",
    "select_per_head": "sparse: choose pages for each KV head by itself",
    "scorer": "sparse: what a page is scored by: mean (its mean key) or minmax (bounds of its keys)",
    "backend": "auto, reference, triton or cudnn",
    "accumulate": "how gradients of a page are summed: owner (deterministic) or atomic",
    "grad_page_dtype": "float32, bfloat16 or float64; none: float32, float64 for float64 models",
    "fp32_main_grads": "sum parameter gradients over chunks in float32, round once",
    "gpu_kv_budget_bytes": "device memory for KV and gradient pages, like 8GiB; auto: what is left over",
    "gpu_keep_budget_bytes": "device memory for outputs of layers and attention kept from the first pass, like 2GiB",
    "host_budget_bytes": "host memory for the rest of both, like 64GiB; auto: nine tenths of what is free",
    "gpu_selection_budget_bytes": "sparse: device memory for page summaries and selections, like 1GiB; none: all",
    "recompute": "what the second pass runs again at once: layer, chunk, or auto (layer where it can)",
    "segment_tokens": "tokens of a run of pages that comes from host memory at a time",
    "loss_tile_tokens": "tokens whose logits are held at once; auto: by vocabulary",
    "check_recompute": "compare recomputed keys with the stored ones",
}
FLAGS = ("--config", "--help", "--dry-run")
_UNITS = {"": 1, "b": 1} | {p + s: b**e for e, p in enumerate("kmgt", 1) for s, b in (("b", 1000), ("ib", 1024))}


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting: where its value belongs, of which type, and its sentence of help."""

    name: str
    hint: Any
    help: str
    default: Any


def options() -> dict[str, Option]:
    """The settings of `oomb train` that its help lists, those of the run first, then those of the chunked step."""
    found: dict[str, Option] = {}
    for config in (TrainConfig, ChunkConfig):
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name not in ("chunks", "trainer"):
                help = field.metadata.get("help") or CHUNK_HELP.get(field.name, "")
                found[field.name] = Option(field.name, hints[field.name], help, field.default)
    return found


def trainer_options() -> dict[str, Option]:
    """The settings that transformers.TrainingArguments brings, by its own names."""
    from transformers import TrainingArguments  # seconds to import: only where such a setting is met

    hints = typing.get_type_hints(TrainingArguments)
    fields = [field for field in dataclasses.fields(TrainingArguments) if field.init]
    return {
        field.name: Option(field.name, hints[field.name], str(field.metadata.get("help", "")), field.default)
        for field in fields
        if field.name not in RENAMED
    }


class Parser(argparse.ArgumentParser):
    """argparse that raises ValueError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser one `--key value` per setting, and the config file."""
    parser.add_argument("file", nargs="?", metavar="CONFIG.yaml", help="settings, one `key: value` a line")
    parser.add_argument("--config", metavar="CONFIG.yaml", help="the same, by name")
    parser.add_argument("--dry-run", action="store_true", help="load, say what would be done, and stop")
    for option in options().values():
        default = "" if option.default is dataclasses.MISSING else f" (default {_shown(option.default)})"
        parser.add_argument(_flag(option.name), metavar="VALUE", dest=option.name, help=option.help + default)


def read_settings(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Settings of the config file, overridden by those of the command line, each of its field's type.

    Raises: ValueError naming an unknown key and the closest one, or the value that could not be read
    """
    spelled = [re.sub(r"^--[^=]+", lambda key: _flag(key[0][2:]), word) for word in argv]
    known = options()
    for word in spelled:
        if re.match(r"--[^=]", word) and word.split("=")[0] not in FLAGS:
            option = _known(word.split("=")[0][2:].replace("-", "_"), "the command line")
            if option.name not in known:
                parser.add_argument(_flag(option.name), metavar="VALUE", dest=option.name)
                known[option.name] = option
    parsed = vars(parser.parse_args(spelled))
    file, config = parsed.pop("file"), parsed.pop("config")
    if file and config:
        raise ValueError(f"two config files were given, {file!r} and {config!r}: give one")
    settings = _read_file(file or config) if file or config else {}
    given = {name: value for name, value in parsed.items() if name in known and value is not None}
    return settings | {name: convert(known[name], value, _flag(name)) for name, value in given.items()}


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Settings from YAML text. `source` names it in errors."""
    try:
        _refuse_repeated_keys(text, source)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{source} must hold `key: value` lines, got a {type(content).__name__}")
    settings = {}
    for key, value in content.items():
        option = _known(str(key).replace("-", "_"), source)
        if option.name in settings:
            raise ValueError(f"{source}: {option.name} is set twice")
        settings[option.name] = convert(option, value, f"{source}: {option.name}")
    return settings


def _refuse_repeated_keys(text: str, source: str) -> None:
    """YAML's loader keeps the last of two equal keys without a word."""
    node = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        return
    names = [str(key.value) for key, _ in node.value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{source}: {name} is set twice")


def convert(option: Option, value: Any, where: str) -> Any:
    """Bring a value from YAML or the command line to its setting's type; ranges are the dataclass's to check.

    Raises: ValueError saying where it stood, what was expected and what came
    """
    kinds = _kinds(option.hint)
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    text = value.strip() if isinstance(value, str) else value
    if NoneType in kinds and (text is None or (isinstance(text, str) and text.lower() in ("none", "null"))):
        return None
    if text in words:
        return text
    expected = ", ".join(words)
    for kind, convert_one, what in (
        (bool, _bool, "true or false"),
        (int, _bytes if option.name.endswith("_bytes") else _int, "a whole number"),
        (float, _float, "a number"),
        (torch.dtype, _dtype, "float32, bfloat16 or float64"),
        (dict, _mapping, "a mapping like {key: value}"),
        (list, _list, "a list like [a, b]"),
        (str, lambda text: text if isinstance(text, str) else None, "text"),
    ):
        if kind in kinds:
            converted = convert_one(text)
            if converted is not None:
                return converted
            if option.name.endswith("_bytes"):
                what = "a number of bytes like 500MB or 8GiB"
            expected = f"{what}{' or ' + expected if expected else ''}"
    raise ValueError(f"{where} must be {expected}{' or none' if NoneType in kinds else ''}, got {value!r}")


def _read_file(path: str) -> dict[str, Any]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read the config file {path!r}: {reason}") from error
    return parse_yaml(text, path)


def _known(name: str, source: str) -> Option:
    own = options()
    if name in own or f"{name}_bytes" in own:
        return own.get(name) or own[f"{name}_bytes"]
    if name in RENAMED:
        instead = f"it is called {RENAMED[name]!r} here" if RENAMED[name] else "`oomb train` sees to that itself"
        raise ValueError(f"{source} sets {name!r}: {instead}")
    others = trainer_options()
    if name in others:
        return others[name]
    closest = difflib.get_close_matches(name, [*own, *others], n=1, cutoff=0.6)
    hint = f"did you mean {closest[0]!r}?" if closest else "`oomb train --help` lists them"
    raise ValueError(f"{source} sets {name!r}, which is no setting: {hint}")


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types a value may have; of `list[str]` the list, of an enumeration its text."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    plain = (kind if typing.get_origin(kind) in (None, Literal) else typing.get_origin(kind) for kind in kinds)
    return tuple(str if isinstance(kind, type) and issubclass(kind, Enum) else kind for kind in plain)


def _flag(name: str) -> str:
    """`--gpu-kv-budget` for gpu_kv_budget_bytes: the value says the unit."""
    return "--" + name.replace("_", "-").removesuffix("-bytes")


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _int(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(_\d+)*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bytes(value: Any) -> int | None:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", value.lower())):
        unit = _UNITS.get(match[2])
        if unit is None or (unit == 1 and "." in match[1]):  # half a byte is a unit forgotten
            return None
        return int(Fraction(match[1]) * unit)
    return _int(value)


def _float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _parsed(value: Any, kind: type) -> Any:
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            return None
    return value if isinstance(value, kind) else None


def _mapping(value: Any) -> dict[str, Any] | None:
    return _parsed(value, dict)


def _list(value: Any) -> list[Any] | None:
    return _parsed(value, list)


def _dtype(value: Any) -> torch.dtype | None:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}.get(str(value))
