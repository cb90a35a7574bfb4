"""Compile the kernels of selection for a chip that is not here, a JSON line each; run by test_triton_select_compile."""

import json
import sys

import triton
from tests.paged_kv.compile_kernels import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparse_pages import triton_select

TYPES = {
    "real_ptr": "*i8", "digits_ptr": "*i8", "q_ptr": "*bf16", "k_ptr": "*fp32", "features_ptr": "*fp32",
    "keys_ptr": "*i32", "ids_ptr": "*i32", "first_pages_ptr": "*i64",
}  # fmt: skip
KERNELS = {
    "digits": (triton_select._digits_kernel, 8, {"GROUPS": 4, "REPEAT": 7, "FEATURES": 128, "BITS": 22, "LEAST": -900,
                                                 "MOST": 1024, "REAL": True, "BLOCK": 32, "WIDTH": 128}),
    "scores": (triton_select._scores_kernel, 8, {"FEATURES": 128, "PAGE": 128, "BLOCK_Q": 128,
                                                 "BLOCK_K": triton_select._SCORED, "WIDTH": 128}),
    "scores wide": (triton_select._scores_kernel, 8, {"FEATURES": 256, "PAGE": 128, "BLOCK_Q": 128,
                                                      "BLOCK_K": 32, "WIDTH": 128}),
    "lists": (triton_select._lists_kernel, 8, {"GROUPS": 4, "LISTS": 1, "FIRST": True, "HELD": True,
                                               "BLOCK": triton_select._TILE}),
    "lists in tiles": (triton_select._lists_kernel, 8, {"GROUPS": 4, "LISTS": 1, "FIRST": True, "HELD": False,
                                                        "BLOCK": triton_select._TILE}),
    "means": (triton_select._mean_kernel, 8, {"GROUPS": 4, "FEATURES": 128, "PAGE": 128, "STEPS": 7, "WIDTH": 128}),
}  # fmt: skip


def compile_one(arch, name):
    kernel, warps, constants = KERNELS[name]
    signature = {}
    for argument in kernel.arg_names:
        kind = "*fp64" if argument.endswith("_ptr") else "i32"
        signature[argument] = "constexpr" if argument in constants else TYPES.get(argument, kind)
    whole = [argument for argument in kernel.arg_names if signature[argument].startswith("*") or "stride" in argument]
    aligned = [kernel.arg_names.index(argument) for argument in whole]  # strides are of whole vectors
    assert not any(parameter.do_not_specialize for parameter in kernel.params if parameter.name in whole)
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": 1 if name == "scores wide" else 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"name": name, "shared": compiled.metadata.shared, "mma": "mma" in compiled.asm["ptx"]} | resources(
        compiled.asm
    )


if __name__ == "__main__":
    for kernel_name in KERNELS:
        print(json.dumps(compile_one(int(sys.argv[1]), kernel_name)), flush=True)
