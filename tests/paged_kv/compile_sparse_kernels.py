"""As compile_kernels.py, for the kernels over listed pages; run by test_triton_sparse_compile.

python compile_sparse_kernels.py 90 fwd/128/bf16 dkdv/128/bf16/documents …
"""

import json
import sys

import triton
from tests.paged_kv.compile_kernels import DTYPES, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kv import triton_sparse, triton_sparse_lists
from paged_kv.triton_tiles import tile_for

KERNELS = {
    "narrow fwd": triton_sparse._sparse_attention_fwd_kernel,
    "fwd": triton_sparse._sparse_attention_fwd_kernel,
    "rest fwd": triton_sparse._sparse_attention_fwd_kernel,
    "dkdv": triton_sparse._sparse_attention_dkdv_kernel,
    "dq": triton_sparse._sparse_attention_dq_kernel,
    "parts": triton_sparse._add_parts_kernel,
    "lists": triton_sparse_lists._lists_kernel,
    "count": triton_sparse_lists._count_readers_kernel,
    "fill": triton_sparse_lists._fill_readers_kernel,
}
FLOATS = ("sinks_ptr", "carry_ptr", "carry_stats_ptr", "lse_ptr", "stats_ptr", "parts_ptr")
GRADIENTS = ("dk_pages_ptr", "dv_pages_ptr", "dk_own_ptr", "dv_own_ptr")
DATA = ("q_ptr", "out_ptr", "dq_ptr")


def describe(name, dtype, constants):
    """The type of one argument of a launch."""
    dim = constants.get("DIM")
    if constants.get("POINTERS") and name in ("k_own", "v_own", "k_pages", "v_pages", "q_rows", "dout_rows"):
        return f"*{dtype}"
    if name in ("k_own", "v_own", "k_pages", "v_pages"):
        return f"tensordesc<{dtype}[1, 1, {constants['BLOCK_N']}, {dim}]>"
    if name in ("q_rows", "dout_rows"):
        return f"tensordesc<{dtype}[1, {constants['BLOCK_M']}, {dim}]>"
    if name in DATA:
        return "*fp32" if name != "q_ptr" and not constants["OWN"] else f"*{dtype}"
    if name in FLOATS or name in GRADIENTS:
        return "*fp32"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name.startswith("scale") else "i32"


def constants_of(kernel, dim, dtype, flags, capability):
    if kernel == "lists":
        return {"PAGE": 128, "BLOCK": 128}, 4, 3
    if kernel in ("count", "fill"):
        return {"PAGE": 128, "STEPS": 7, "PAST_GRAD": True, "COLUMNS": 32, "ROWS": 32}, 4, 3
    padded = triton.next_power_of_2(dim)
    shape = {"LISTS": 1, "GROUPS": 4, "HEAD_DIM": dim, "DIM": padded, "PAGE": 128}
    if kernel == "parts":
        return shape | {"BLOCK": 32}, 4, 3
    tile = tile_for(kernel, padded, DTYPES[dtype], capability)
    values = shape | {
        "REPEAT": 7, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "WINDOW": "window" in flags,
        "DOCUMENTS": "documents" in flags, "STAGES": tile.stages, "OWN": "part" not in flags,
        "POINTERS": capability[0] < 9,
    }  # fmt: skip
    if kernel == "dkdv":
        return values | {"RAGGED": "ragged" in flags, "PAST": True}, tile.warps, tile.stages
    values |= {"CARRY": "carry" in flags, "STRADDLE": "ragged" in flags}
    if kernel.endswith("fwd"):
        values |= {"SINKS": "sinks" in flags, "PARTS": tile.parts, "FIRST_ROW": 0, "ROWS": 896}
    return values, tile.warps, tile.stages


def compile_one(arch, name):
    kernel, dim, dtype, *flags = name.split("/")
    function = KERNELS[kernel]
    constants, warps, stages = constants_of(kernel, int(dim), dtype, flags, divmod(arch, 10))
    assert set(constants) <= set(function.arg_names), set(constants) - set(function.arg_names)
    signature = {n: "constexpr" if n in constants else describe(n, dtype, constants) for n in function.arg_names}
    aligned = [i for i, n in enumerate(function.arg_names) if signature[n].startswith("*")]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {
        "arch": arch, "name": name, "shared": compiled.metadata.shared, "wgmma": "wgmma" in compiled.asm["ptx"],
        "tma": "cp.async.bulk.tensor" in compiled.asm["ptx"], **resources(compiled.asm),
    }  # fmt: skip


if __name__ == "__main__":
    for item in sys.argv[2:]:
        print(json.dumps(compile_one(int(sys.argv[1]), item)), flush=True)
