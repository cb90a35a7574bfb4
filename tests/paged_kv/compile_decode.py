"""Compile the decode kernels for chips that are not here and report their resources, a JSON line each.

python compile_decode.py 90 decode/128/7/1/bf16 merge/128/7/1/bf16 decode/128/7/9/fp16/window/sinks …
                            kernel, head dim, query heads a KV head, tokens a unit, dtype, flags
"""

import json
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent))
from compile_kernels import resources

from paged_kv import triton_decode

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = {"decode": triton_decode._paged_attention_decode_kernel, "merge": triton_decode._merge_decode_kernel}
LONG = ("rows_ptr", "starts_ptr", "firsts_ptr", "counts_ptr")


def describe(name, dtype):
    if name in LONG:
        return "*i64"
    if name in ("table_ptr", "selected_ptr"):
        return "*i32"
    if name in ("parts_ptr", "stats_ptr", "sinks_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if name == "scale_log2" else "i32"


def compile_one(arch, name, tile=None):
    kernel, dim, repeat, tokens, dtype, *flags = name.split("/")
    dim, repeat, tokens, function = int(dim), int(repeat), int(tokens), KERNELS[kernel]
    padded, rows = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(repeat * tokens))
    tile = tile or triton_decode.tile_for(padded, rows, DTYPES[dtype], divmod(arch, 10))
    constants = {
        "GROUPS": 4, "REPEAT": repeat, "HEAD_DIM": dim, "DIM": padded, "PAGE": 128, "BLOCK_M": rows,
        "BLOCK_N": tile.keys, "CHUNKS": 2, "TOKENS": tokens, "MOST": 2 * tokens, "UNITS": 64, "LEAST": 4,
        "WINDOW": "window" in flags, "SINKS": "sinks" in flags, "SELECTED": 60 if "selected" in flags else 0,
        "LISTED": 64 if "selected" in flags else 1, "LISTS": 1, "STAGES": tile.stages, "PARTS": 16,
    }  # fmt: skip
    constants = {n: v for n, v in constants.items() if n in function.arg_names}
    signature = {n: "constexpr" if n in constants else describe(n, dtype) for n in function.arg_names}
    aligned = [i for i, n in enumerate(function.arg_names) if signature[n].startswith("*")]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {
        "num_warps": tile.warps if kernel == "decode" else 4,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {
        "arch": arch, "name": name, "shared": compiled.metadata.shared, "mma": "mma" in compiled.asm["ptx"],
        "asynchronous": "cp.async" in compiled.asm["ptx"], **resources(compiled.asm),
    }  # fmt: skip


if __name__ == "__main__":
    for item in sys.argv[2:]:
        print(json.dumps(compile_one(int(sys.argv[1]), item)), flush=True)
