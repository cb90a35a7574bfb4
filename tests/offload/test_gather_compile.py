"""The kernels that reach over the link compile for every chip: wide loads, little of a multiprocessor."""

from pathlib import Path

import pytest
from tests.compiling import compiled

pytest.importorskip("triton.backends.nvidia")


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles(arch):
    rows = compiled(Path(__file__).with_name("compile_gather_kernels.py"), arch)
    assert len(rows) == 6
    for row in rows:
        print(row)
        assert row["stack"] == 0 and row["registers"] <= 64
        if row["name"] == "copy":  # 16 KiB in flight a program, and no shared memory that compute could want
            assert row["shared"] == 0 and row["wide"] >= 8
