"""Kernels compiled for a chip that is not there, in a process without the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def compiled(script: Path, arch: int, names: list[str] | None = None) -> list[dict]:
    """What `script` says of each kernel that it compiles for sm_`arch`; `names`: of these, which must all be there."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(arch), *(names or ())],
        capture_output=True, text=True, env=environment, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows and (names is None or [row["name"] for row in rows] == names)
    return rows
