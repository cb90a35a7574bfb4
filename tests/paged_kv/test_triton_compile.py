"""Every kernel compiles for every chip, without a GPU: matrix instructions present, spills only where stated, no load
of a single 16-bit number, no register of a matrix product touched before it is waited for, and no wait for each."""

from pathlib import Path

import pytest
from tests.compiling import compiled

pytest.importorskip("triton.backends.nvidia")
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # what one program may have
SMALL = ["prepare/128/bf16", "merge_parts/128/bf16", "merge_two/128/bf16", "add_to_pages/128/bf16", "sinks/64/bf16"]
# Bytes of stack, where a kernel has any. On Hopper loop-invariant scalars and the last store spill, the loops over the
# past do not, but for heads wider than 128, where two stages that spill are faster than one that does not.
# float32 has no matrix instructions. The forward for windows at head dim 64 has its registers bounded, so that four
# programs fit: that was the fastest.
STATED = {
    (90, "fwd"): 250, (90, "narrow fwd"): 300, (90, "dkdv"): 600, (90, "dq"): 300,
    (90, "window fwd"): 150, (90, "window dq"): 300,
    (100, "fwd"): 250, (100, "dkdv"): 100, (100, "dq"): 100, (100, "window fwd"): 50, (100, "window dq"): 500,
    (100, "narrow fwd"): 250,
}  # fmt: skip
STATED_FLOAT32 = 12000
ONE_BY_ONE = "window fwd/64/bf16/256/whole/uneven"  # its registers are bounded for what windows of 128 need
# Beside the shapes above: the widest windows, whose scores of a row are twice as many, and wider heads.
EVERY_WINDOW_TILE = {
    "window fwd/64/bf16/256/whole/uneven": {90: 700, 100: 600},
    "window dq/64/bf16/256/whole/uneven": {90: 700, 100: 900},
    "window dkdv/64/bf16/256/whole/uneven/atomic": {90: 0, 100: 0},
    "window fwd/128/bf16/128/whole/sinks": {90: 150, 100: 150},
    "window dq/128/bf16/128/whole": {90: 300, 100: 300},
    "window dkdv/128/bf16/128/whole": {90: 0, 100: 0},
    "window dkdv/128/bf16/128/whole/first": {90: 50, 100: 0},
}
WINDOWS = ["window fwd/64/bf16/128/whole/sinks", "window dq/64/bf16/128/whole", "window dkdv/64/bf16/128/whole"]


def report(arch, names):
    return compiled(Path(__file__).with_name("compile_kernels.py"), arch, names)


def judge(rows):
    for row in rows:
        print(row)
        arch, (kernel, _, dtype, *_) = row["arch"], row["name"].split("/")
        stated = STATED_FLOAT32 if dtype == "fp32" else STATED.get((arch, kernel), 0)
        stated = EVERY_WINDOW_TILE.get(row["name"], {}).get(arch, stated)
        assert row["stack"] <= stated, row
        assert row["shared"] <= SHARED_BYTES[arch], row
        if arch == 90 and kernel in ("fwd", "narrow fwd", "dkdv", "dq"):
            assert row["tma"] and (row["wgmma"] or dtype == "fp32"), row
        assert row["narrow"] == 0, row
        assert row["hazards"] == [], row
        assert (row["products"] > 0) == (arch == 90 and row["wgmma"]), row
        if row["name"] != ONE_BY_ONE:
            assert 2 * row["waits"] <= row["products"], row  # where ptxas cannot follow it waits for every one


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_every_kernel_compiles(arch):
    names = [*SMALL, "fwd/128/bf16", "narrow fwd/128/bf16", "dkdv/128/bf16", "dq/128/bf16"]
    names += WINDOWS if arch >= 90 else []  # older chips take the other kernels for small windows, too
    judge(report(arch, names))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        [f"{kernel}/{dim}/bf16" for kernel in ("fwd", "dkdv", "dq") for dim in (64, 80, 192, 256)]
        + ["fwd/64/bf16/documents", "narrow fwd/64/bf16/split", "narrow fwd/256/bf16/documents"],
        ["fwd/64/bf16/window/sinks", "dkdv/128/bf16/window", "dq/128/bf16/window"]
        + [
            f"window {kernel}/{dim}/fp16/{128 if kernel == 'fwd' else 120}/documents"
            for kernel in ("fwd", "dkdv", "dq")
            for dim in (64, 80)
        ],
        [f"{kernel}/64/fp32" for kernel in ("fwd", "dkdv", "dq")] + ["fwd/128/fp32"],
        ["fwd/128/fp16/split/carry", "dq/128/fp16/split/carry", "dkdv/128/fp16/atomic", "dkdv/64/bf16/documents"],
    ],
    ids=["head dims", "windows", "float32", "modes"],
)
def test_every_mode_compiles_on_hopper(names):
    judge(report(90, names))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_every_tile_of_small_windows_compiles(arch):
    judge(report(arch, list(EVERY_WINDOW_TILE)))
