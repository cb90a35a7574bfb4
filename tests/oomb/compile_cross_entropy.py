"""Compile the loss kernels for a chip that is not here, a JSON line each; run by test_triton_cross_entropy."""

import json
import sys

import triton
from tests.paged_kv.compile_kernels import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oomb import triton_cross_entropy as t

TYPES = {"labels_ptr": "*i64", "logits_ptr": "*bf16", "dlogits_ptr": "*bf16", "columns": "i32", "BLOCK": "constexpr"}

if __name__ == "__main__":
    for kernel in (t._loss_fwd_kernel, t._loss_bwd_kernel):
        signature = {name: TYPES.get(name, "*fp32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {"BLOCK": t._BLOCK}, {})
        done = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 8})
        print(json.dumps(resources(done.asm)))
