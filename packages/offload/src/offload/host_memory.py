"""How much host memory this process can still take, read from the files the kernel offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class HostOutOfMemory(MemoryError):
    """Host memory that was asked for does not fit.

    Units: `requested`, `free` and `largest` (the largest request that fits) in bytes
    """

    def __init__(self, message: str, requested: int, free: int, largest: int) -> None:
        super().__init__(message, requested, free, largest)  # all of them, so that it survives pickling
        self.requested = requested
        self.free = free
        self.largest = largest

    def __str__(self) -> str:
        return str(self.args[0])


def free_host_bytes(root: str | Path = "/") -> int | None:
    """The least of what the machine has available and of what each control group above this process leaves.

    `root` is where `proc` and `sys` are looked for.
    Returns: bytes, or None where the system says nothing (not Linux)
    """
    root = Path(root)
    rooms = [*_available(root / "proc/meminfo"), *_cgroup_rooms(root)]
    return min(rooms) if rooms else None


def _available(meminfo: Path) -> Iterator[int]:
    for line in _read(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What each group leaves, from this process's own up to the root: the limit of any of them binds."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [base, base / "unified"]
            files = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mounts = [base / "memory"]
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's and not exist here; the mount's own files are then ours.
        parts = [] if ".." in path else [part for part in path.split("/") if part]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield from _room(mount.joinpath(*parts[:depth]), *files)


def _room(group: Path, limit_file: str, usage_file: str, cache_key: str) -> Iterator[int]:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not (limit.isdigit() and usage.isdigit()):  # "max", or no such file
        return
    # Usage counts file cache, which the kernel gives back on demand: having read the weights must not count as full.
    cache = 0
    for line in _read(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == cache_key:
            cache = int(value)
    yield max(0, int(limit) - max(0, int(usage) - cache))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
