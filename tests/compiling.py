"""Kernels compiled for a chip that is not there, in a process without the interpreter."""

import contextlib
import functools
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]


def compiled(script: Path, arch: int, names: list[str] | None = None) -> list[dict]:
    """What `script` says of each kernel that it compiles for sm_`arch`; `names`: of these, which must all be there."""
    compiler = _compiler()
    try:
        print(json.dumps([str(script), str(arch), *(names or ())]), file=compiler.stdin, flush=True)
        said, error = json.loads(compiler.stdout.readline())
    except BaseException:  # it died, or is still at it: whoever asks next gets another
        compiler.kill()
        _compiler.cache_clear()
        raise
    assert error is None, error
    rows = [json.loads(line) for line in said.splitlines()]
    assert rows and (names is None or [row["name"] for row in rows] == names)
    return rows


@functools.cache
def _compiler() -> subprocess.Popen:
    """One for all tests of this process, until it ends: its imports take longer than most kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.compiling"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip


def _answer(arguments: list[str]) -> tuple[str, str | None]:
    """What the script prints, run as a script with these arguments, and the error that it ended in."""
    sys.argv, said = arguments, io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(arguments[0], run_name="__main__")
    except BaseException:
        return said.getvalue(), traceback.format_exc()[-3000:]
    return said.getvalue(), None


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
