"""Checkpoints to go on from: complete ones only, and of this model only."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.trainer_callback import TrainerState

STATE = "trainer_state.json"  # what the Trainer writes last
OTHER_FILES = ("optimizer.pt", "scheduler.pt")
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def complete(folder: Path) -> bool:
    """Whether a save of the Trainer into this folder came to its end."""
    try:
        TrainerState.load_from_json(str(folder / STATE))
    except (OSError, ValueError, TypeError):
        return False
    return True


def checkpoints(output: str | Path) -> list[Path]:
    """The Trainer's checkpoint folders below `output`, by step, complete or not."""
    named = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(output).glob("checkpoint-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]


def find_checkpoint(wanted: str | Path | bool | None, output: str | Path) -> Path | None:
    """What `resume_from_checkpoint` means: a folder, True for the last complete one, or nothing.

    Raises: ValueError if there is none, or the one that was named is not complete
    """
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        found = [path for path in checkpoints(output) if complete(path)]
        if not found:
            raise ValueError(f"resume: there is no complete checkpoint in {str(output)!r} to go on from")
        return found[-1]
    folder = Path(wanted)
    if not complete(folder):
        raise ValueError(f"resume: {str(folder)!r} is not a complete checkpoint (no readable {STATE})")
    return folder


def check_checkpoint(folder: Path, model: nn.Module) -> None:
    """Raises: ValueError if the folder lacks what resuming needs, whole, or holds the weights of another model"""
    missing = [name for name in OTHER_FILES if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"resume: {str(folder)!r} lacks {', '.join(missing)} (was it saved with save_only_model?): training would "
            "not go on as it was"
        )
    for name in OTHER_FILES:
        if not zipfile.is_zipfile(folder / name):  # what torch saves is one; cut off it is none
            raise ValueError(f"resume: cannot read {str(folder / name)!r}: it is damaged, or only half of it is there")
    saved = _saved_shapes(folder)
    if saved is None:
        return  # weights in a form that the Trainer reads and we do not
    here = _shapes_here(model)
    for name, shape in saved.items():
        if here.get(name) != shape:
            ours = f"{list(here[name])} here" if name in here else "not here"
            raise ValueError(f"resume: {str(folder)!r} is of another model: {name} is {list(shape)} there, {ours}")
    tied = {id(p) for p, name in _parameters(model) if name in saved}
    lacking = [name for p, name in _parameters(model) if name not in saved and id(p) not in tied]
    if lacking:
        raise ValueError(f"resume: {str(folder)!r} is of another model: it has no {lacking[0]}")


def _parameters(model: nn.Module) -> list[tuple[nn.Parameter, str]]:
    """What a checkpoint of this model holds, by the names it is saved under."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        named = get_peft_model_state_dict(model, state_dict=named, save_embedding_layers=False)
    return [(p, name) for name, p in named.items()]


def _shapes_here(model: nn.Module) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    shapes |= {name: tuple(b.shape) for name, b in model.named_buffers()}
    return shapes | {name: tuple(p.shape) for p, name in _parameters(model)}


def _saved_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes out of the headers of the safetensors files; None where there are no such files."""
    files = [folder / name for name in WEIGHTS if (folder / name).exists()]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(content["weight_map"].values()))]
    if not files:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                shapes |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}
        except Exception as error:
            raise ValueError(f"resume: cannot read {str(file)!r}: {error}") from error
    return shapes
