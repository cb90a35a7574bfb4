"""Free host memory, read from made-up file trees."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from offload import HostOutOfMemory
from offload.host_memory import free_host_bytes

KIB = 1024


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(kib: int) -> str:
    return f"MemTotal:       99999999 kB\nMemFree:        123 kB\nMemAvailable:   {kib} kB\nBuffers:   5 kB\n"


def group_v2(at: str, limit: int | str, usage: int, inactive_file: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup{at}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup{at}/memory.current": f"{usage}\n",
        f"sys/fs/cgroup{at}/memory.stat": f"anon 7\nfile 99\ninactive_file {inactive_file}\nactive_file 3\n",
    }


def group_v1(at: str, limit: int, usage: int, inactive_file: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/memory{at}/memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory{at}/memory.usage_in_bytes": f"{usage}\n",
        f"sys/fs/cgroup/memory{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_file}\n",
    }


def test_machine_without_groups(tmp_path):
    assert free_host_bytes(tree(tmp_path, {"proc/meminfo": meminfo(1000)})) == 1000 * KIB


def test_nothing_known(tmp_path):
    assert free_host_bytes(tmp_path) is None


def test_v2_limit_of_own_group(tmp_path):
    files = {"proc/meminfo": meminfo(1000), "proc/self/cgroup": "0::/a/b\n", **group_v2("/a/b", 5000, 2000)}
    assert free_host_bytes(tree(tmp_path, files)) == 3000


def test_v2_limit_of_a_parent_binds(tmp_path):
    files = {
        "proc/meminfo": meminfo(1000),
        "proc/self/cgroup": "0::/a/b\n",
        **group_v2("/a/b", 5000, 2000),
        **group_v2("/a", 6000, 5500),
    }
    assert free_host_bytes(tree(tmp_path, files)) == 500


def test_v2_unlimited_group_leaves_the_machine(tmp_path):
    files = {"proc/meminfo": meminfo(1), "proc/self/cgroup": "0::/a\n", **group_v2("/a", "max", 2000)}
    assert free_host_bytes(tree(tmp_path, files)) == KIB


def test_v2_container_sees_its_files_at_the_mount(tmp_path):
    files = {
        "proc/meminfo": meminfo(1000),
        "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
        **group_v2("", 9000, 1000),
    }
    assert free_host_bytes(tree(tmp_path, files)) == 8000


@pytest.mark.parametrize("path", ["/", "/../../other"])
def test_v2_root_and_foreign_paths(tmp_path, path):
    files = {"proc/meminfo": meminfo(1000), "proc/self/cgroup": f"0::{path}\n", **group_v2("", 9000, 1000)}
    assert free_host_bytes(tree(tmp_path, files)) == 8000


def test_file_cache_counts_as_free(tmp_path):
    files = {"proc/meminfo": meminfo(1000), "proc/self/cgroup": "0::/a\n", **group_v2("/a", 5000, 4500, 4000)}
    assert free_host_bytes(tree(tmp_path, files)) == 4500


def test_over_the_limit_is_none_left(tmp_path):
    files = {"proc/meminfo": meminfo(1000), "proc/self/cgroup": "0::/a\n", **group_v2("/a", 5000, 5200)}
    assert free_host_bytes(tree(tmp_path, files)) == 0


def test_v1(tmp_path):
    files = {
        "proc/meminfo": meminfo(1000),
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job/1\n0::/\n",
        **group_v1("/job/1", 9223372036854771712, 700),
        **group_v1("/job", 8000, 7000, 500),
    }
    assert free_host_bytes(tree(tmp_path, files)) == 1500


def test_the_machine_binds_under_a_generous_group(tmp_path):
    files = {"proc/meminfo": meminfo(2), "proc/self/cgroup": "4:memory:/\n", **group_v1("", 1 << 40, 700)}
    assert free_host_bytes(tree(tmp_path, files)) == 2 * KIB


def test_here():
    free = free_host_bytes()
    assert free is None or free > 0


def test_error_carries_its_numbers():
    error = pickle.loads(pickle.dumps(HostOutOfMemory("too much", 3, 2, 1)))
    assert isinstance(error, MemoryError)
    assert (str(error), error.requested, error.free, error.largest) == ("too much", 3, 2, 1)
