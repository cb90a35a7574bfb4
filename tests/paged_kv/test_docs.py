"""What the pages for users show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("packages/paged_kv/README.md", "docs/inference.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_runs(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "blocks.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "blocks.py"], capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 2
