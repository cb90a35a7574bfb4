"""The kernels that reach over the link compile for every chip: wide loads, little of a multiprocessor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles(arch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("compile_gather_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), str(arch)], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6
    for row in rows:
        print(row)
        assert row["stack"] == 0 and row["registers"] <= 64
        if row["name"] == "copy":  # 16 KiB in flight a program, and no shared memory that compute could want
            assert row["shared"] == 0 and row["wide"] >= 8
