"""What a caller may name as a device."""

from __future__ import annotations

import torch


def resolve_device(device: torch.device | str | int) -> torch.device:
    """The device with its index spelled out where there is a choice.

    Raises: ValueError unless it is the CPU or CUDA, and unless an index that is given exists
    """
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu' or a CUDA device, got {device!r}") from error
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type != "cuda":
        raise ValueError(f"device must be 'cpu' or a CUDA device, got {named}")
    if not torch.cuda.is_available():
        return named
    index = torch.cuda.current_device() if named.index is None else named.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"{named} does not exist: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)
