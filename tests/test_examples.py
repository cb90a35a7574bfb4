"""Every example runs, on a CPU, in seconds; so does what the README shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_is_one_example_per_package_and_one_pipeline_of_parts():
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example, tmp_path):
    assert run(str(example), tmp_path).strip(), "an example shows something"


def test_the_readme_snippet_runs(tmp_path):
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "snippet.py").write_text(snippet + "\nassert all(p.grad is not None for p in model.parameters())\n")
    run("snippet.py", tmp_path)


def run(script: str, folder: Path) -> str:
    """What a script prints, run in a process of its own. One thread: other tests run beside it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=folder, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.cuda
def test_activations_on_the_host_take_less_of_a_gpu(tmp_path):
    shown = run(str(ROOT / "examples/02_offload_activations.py"), tmp_path)
    on_device, on_host = (int(mib) for mib in re.findall(r"GPU memory peak (\d+) MiB", shown))
    assert on_host < on_device / 2
