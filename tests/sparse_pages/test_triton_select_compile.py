"""The kernels of selection compile for every chip, and the products go through the matrix units."""

from pathlib import Path

import pytest
from tests.compiling import compiled

pytest.importorskip("triton.backends.nvidia")
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # what one program may have


@pytest.mark.parametrize("arch", sorted(SHARED_BYTES))
def test_every_kernel_compiles(arch):
    rows = compiled(Path(__file__).with_name("compile_select_kernels.py"), arch)
    assert len(rows) == 6
    for row in rows:
        print(row)
        assert row["shared"] <= SHARED_BYTES[arch]
        assert row["narrow"] == 0
        assert row["mma"] == row["name"].startswith("scores")
        # Sums in float64 take registers: some spill, most of all where matrix units read their operands from registers.
        assert row["stack"] <= (1000 if row["name"].startswith("scores") else 0)
