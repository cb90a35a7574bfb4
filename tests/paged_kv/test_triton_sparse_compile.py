"""Every kernel over listed pages compiles for every chip, without a GPU: matrix instructions present, few spills."""

from pathlib import Path

import pytest
from tests.compiling import compiled

pytest.importorskip("triton.backends.nvidia")
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # what one program may have
SMALL = ["lists/128/bf16", "count/128/bf16", "fill/128/bf16", "parts/128/bf16"]
# Bytes of stack, where a kernel has any: scalars that live through a loop and the last store, not the loops themselves.
STATED = {"fwd": 250, "narrow fwd": 250, "rest fwd": 0, "dkdv": 650, "dq": 300}  # from Hopper on
STATED_FLOAT32 = 12000


def report(arch, names):
    return compiled(Path(__file__).with_name("compile_sparse_kernels.py"), arch, names)


def judge(rows):
    for row in rows:
        print(row)
        arch, (kernel, _, dtype, *_) = row["arch"], row["name"].split("/")
        assert row["stack"] <= (STATED_FLOAT32 if dtype == "fp32" else STATED.get(kernel, 0) * (arch >= 90)), row
        assert row["shared"] <= SHARED_BYTES[arch], row
        if arch == 90 and kernel in STATED:
            assert row["tma"] and (row["wgmma"] or dtype == "fp32"), row
        assert row["narrow"] == 0, row
        assert row["hazards"] == [], row
        assert (row["products"] > 0) == (arch == 90 and row["wgmma"]), row
        assert 2 * row["waits"] <= row["products"], row  # where ptxas cannot follow it waits for every one


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_every_kernel_compiles(arch):
    names = [*SMALL, "narrow fwd/128/bf16", "dkdv/128/bf16", "dq/128/bf16"]
    judge(report(arch, names + ["fwd/128/bf16"] * (arch >= 90)))  # older chips have one tile for both


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        [
            "fwd/128/bf16/ragged/sinks",
            "rest fwd/128/bf16/ragged/sinks",
            "dkdv/128/bf16/ragged",
            "dq/128/bf16/ragged/carry",
        ],
        [f"{kernel}/128/bf16/{state}" for kernel in ("narrow fwd", "dq") for state in ("carry", "part", "carry/part")],
        [
            "narrow fwd/64/bf16/documents",
            "fwd/128/bf16/documents",
            "rest fwd/128/bf16/window",
            "dkdv/64/bf16/documents/window",
            "dq/64/bf16/documents/ragged",
        ],
        [f"{kernel}/{dim}/bf16" for kernel in ("narrow fwd", "dkdv", "dq") for dim in (80, 256)],
        [f"{kernel}/64/fp32/ragged" for kernel in ("narrow fwd", "dkdv", "dq")],
    ],
    ids=["ragged", "segments", "documents", "head dims", "float32"],
)
def test_every_mode_compiles_on_hopper(names):
    judge(report(90, names))
