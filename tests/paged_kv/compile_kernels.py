"""Compile kernels for chips that are not here and report their resources, a JSON line each; run by test_triton_compile.

python compile_kernels.py 90 fwd/128/bf16 dq/256/bf16/window "window fwd/64/bf16/128/whole" …
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from tests.paged_kv.matrix_hazards import hazards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kv import triton_launch, triton_merge, triton_problem, triton_sinks, triton_window_launch
from paged_kv.triton_tiles import tile_for

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = {
    "fwd": triton_launch._paged_attention_fwd_kernel,
    "narrow fwd": triton_launch._paged_attention_fwd_kernel,
    "dkdv": triton_launch._paged_attention_dkdv_kernel,
    "dq": triton_launch._paged_attention_dq_kernel,
    "window fwd": triton_window_launch._window_fwd_kernel,
    "window dq": triton_window_launch._window_dq_kernel,
    "window dkdv": triton_window_launch._window_dkdv_kernel,
    "prepare": triton_problem._prepare_bwd_kernel,
    "sinks": triton_sinks._sinks_bwd_kernel,
    "merge_parts": triton_merge._merge_parts_kernel,
    "merge_two": triton_merge._merge_two_kernel,
    "add_to_pages": triton_merge._add_to_pages_kernel,
}
INPUTS = ("q_ptr", "dout_ptr", "q_rows_ptr", "dout_rows_ptr", "a_ptr", "b_ptr", "dk_ptr", "dv_ptr")
OUTPUTS = ("out_ptr", "dq_ptr")
INTEGERS = ("slots_ptr", "grad_slots_ptr", "lengths_ptr", "documents_ptr", "bounds_ptr")
KEYS = ("k_own", "v_own", "k_pages", "v_pages")


def describe(name, dtype, flags, constants):
    """The type of one argument of a launch."""
    dim = constants.get("DIM")
    in_window = "UNIFORM" in constants
    if constants.get("POINTERS") and name in (*KEYS, "q_rows", "dout_rows"):
        return f"*{dtype}"
    if name in KEYS:
        return f"*{dtype}" if in_window else f"tensordesc<{dtype}[1, 1, {constants['BLOCK_N']}, {dim}]>"
    if name in ("q_rows", "dout_rows", "out_rows", "dq_rows"):
        rows = f"{constants['QUERIES']}, {constants['SHARE']}" if in_window else constants["BLOCK_M"]
        return f"tensordesc<{dtype}[1, {rows}, {dim}]>"
    if name in INPUTS or (name in OUTPUTS and "split" not in flags):
        return f"*{dtype}"
    if name in INTEGERS:
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name.startswith("scale") else "i32"


def constants_of(kernel, dim, dtype, flags, capability):
    if kernel == "add_to_pages":
        return {"PAGE": 128, "WIDTH": 4 * dim, "BLOCK": 2048}, 4, 3
    if kernel.startswith("merge"):
        parts = {"PARTS": 4} if kernel == "merge_parts" else {}
        return {"HEADS": 28, "HEAD_DIM": dim, "DIM": triton.next_power_of_2(dim), "BLOCK": 32} | parts, 4, 3
    if kernel == "sinks":
        return {"GROUPS": 4, "REPEAT": 7, "BLOCK": 2048}, 8, 3
    shape = {"GROUPS": 4, "REPEAT": 7, "HEAD_DIM": dim, "DIM": triton.next_power_of_2(dim)}
    if kernel == "prepare":
        return shape | {"BLOCK_M": 64}, 4, 3
    if kernel.startswith("window"):
        values, tile = window_constants(kernel, shape | {"PAGE": 128}, flags, dtype)
        return values, tile.warps, tile.stages, triton_window_launch.registers_of(tile, values)
    tile = tile_for(kernel, shape["DIM"], DTYPES[dtype], capability)
    values = shape | {
        "PAGE": 128, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "WINDOW": "window" in flags,
        "DOCUMENTS": "documents" in flags, "OWN": True, "STAGES": tile.stages,
        "POINTERS": capability[0] < 9,
    }  # fmt: skip
    if kernel == "dkdv":
        return values | {"PAST": True, "ATOMIC": "atomic" in flags}, tile.warps, tile.stages
    values |= {"CARRY": "carry" in flags, "SPLIT": "split" in flags}
    if kernel == "dq":
        return values, tile.warps, tile.stages
    return values | {"PARTS": tile.parts, "AHEAD": tile.ahead, "SINKS": "sinks" in flags}, tile.warps, tile.stages


def window_constants(kernel, shape, flags, dtype):
    """As triton_window_launch makes them. `flags` start with the window; whole: a tile has several heads; uneven: of
    several lengths; first: there is no past, or none that takes gradients."""

    def tile_of(kernel):
        return tile_for(kernel, shape["DIM"], DTYPES[dtype], (9, 0))

    tile = tile_of(kernel)
    shape |= {"REPEAT": 8 if "whole" in flags else 7, "WINDOW": int(flags[0])}
    shape |= {"DOCUMENTS": "documents" in flags, "UNIFORM": "uneven" not in flags}
    heads = triton_window_launch.heads_of(tile, shape["REPEAT"], triton_window_launch.DKDV_HEADS)
    if kernel == "window dkdv":
        shape |= heads | {"BLOCK_N": tile.keys, "PAST": "first" not in flags, "ATOMIC": "atomic" in flags}
    elif kernel == "window fwd":
        shape |= triton_window_launch.tiling_of(shape["WINDOW"], tile, shape["REPEAT"]) | {"SINKS": "sinks" in flags}
    else:
        tile, tiling = triton_window_launch.dq_tiling(tile_of, shape["WINDOW"], shape["REPEAT"], shape["HEAD_DIM"])
        shape |= tiling | {"TOGETHER": heads["SHARE"]}
    return shape | {"STAGES": tile.stages}, tile


def compile_one(arch, name):
    kernel, dim, dtype, *flags = name.split("/")
    function = KERNELS[kernel]
    constants, warps, stages, *limits = constants_of(kernel, int(dim), dtype, flags, divmod(arch, 10))
    assert set(constants) <= set(function.arg_names), set(constants) - set(function.arg_names)
    signature = {n: "constexpr" if n in constants else describe(n, dtype, flags, constants) for n in function.arg_names}
    aligned = [i for i, n in enumerate(function.arg_names) if signature[n].startswith("*")]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    options |= limits[0] if limits else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {
        "arch": arch, "name": name, "shared": compiled.metadata.shared, "wgmma": "wgmma" in compiled.asm["ptx"],
        "tma": "cp.async.bulk.tensor" in compiled.asm["ptx"], **resources(compiled.asm),
    }  # fmt: skip


def resources(asm):
    """Of a program, as the toolkit that comes with Triton reads it: registers and stack, products whose registers are
    touched too early, how many products and waits for them there are, and how many loads of global memory fetch a
    single number of 16 bits: of neighbours eight could come at once."""
    narrow = len(re.findall(r"ld\.global[.\w:]*\.b16 ", asm["ptx"]))
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(asm["cubin"])
        text, assembly = (
            subprocess.run([os.path.join(tools, tool), option, path], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text).groups()
    return {
        "registers": int(registers), "stack": int(stack) + int(local), "narrow": narrow, "hazards": hazards(assembly),
        "products": assembly.count("HGMMA"), "waits": assembly.count("WARPGROUP.DEPBAR"),
    }  # fmt: skip


if __name__ == "__main__":
    for item in sys.argv[2:]:
        print(json.dumps(compile_one(int(sys.argv[1]), item)), flush=True)
