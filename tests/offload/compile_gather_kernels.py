"""Compile the kernels of gather.py for a chip that is not here, a JSON line each; run by test_gather_compile."""

import json
import sys

import triton
from tests.paged_kv.compile_kernels import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offload import gather

POINTERS = {"host_ptr": "*i64", "device_ptr": "*i64", "ids_ptr": "*i32", "flags_ptr": "*u8", "rows_ptr": "*i32"} | {
    "but_ptr": "*i32"
}


def compile_one(arch, kernel, warps, constants):
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in kernel.arg_names}
    aligned = [i for i, n in enumerate(kernel.arg_names) if n in POINTERS or n == "units"]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    wide = compiled.asm["ptx"].count("ld.global.v2.b64")
    return {"shared": compiled.metadata.shared, "wide": wide, **resources(compiled.asm)}


if __name__ == "__main__":
    for to_device in (True, False):
        for listed in (True, False):
            flags = {"GATHER": to_device, "LISTED": listed, "FLAGS": listed, "BLOCK": gather._BLOCK}
            print(json.dumps({"name": "copy"} | compile_one(int(sys.argv[1]), gather._copy_rows_kernel, 4, flags)))
    for but in (True, False):
        flags = {"BUT": but, "BLOCK": gather._LISTED}
        print(json.dumps({"name": "list"} | compile_one(int(sys.argv[1]), gather._list_rows_kernel, 8, flags)))
