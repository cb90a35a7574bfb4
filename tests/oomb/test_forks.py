"""A step in a forked process: it works, or is refused with a reason; it never hangs and never reads lost memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
START = """
    import os, sys
    import torch
    from tests.models import build, configs
    from oomb import ChunkConfig, chunked_backward, chunked_loss

    torch.set_num_threads(2)
    model = build(configs()["qwen2"])
    ids = torch.randint(61, (1, 100), generator=torch.Generator().manual_seed(0))
    there = {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0}
    here = {}

    def config(more):
        return ChunkConfig(chunk_tokens=32, page_tokens=16, **more)

    def in_a_fork(work):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                print(work())
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
            finally:
                sys.stdout.flush()
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    torch.ones(1 << 20).exp().sum()  # OpenMP's threads exist from here on
"""


def output(code: str) -> str:
    """What a process of its own prints; a hang ends after a minute."""
    program = textwrap.dedent(START) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    ).stdout


def test_a_fork_that_would_hang_is_refused_and_works_on_one_thread():
    lines = output("""
        expected = float(chunked_backward(model, ids, config=config(there)))
        def step():
            return float(chunked_backward(model, ids, config=config(there))) == expected
        def alone():
            torch.set_num_threads(1)
            return step()
        in_a_fork(step)
        in_a_fork(alone)
        print(step())
    """).splitlines()
    assert lines[0].startswith("ValueError: this process is a fork and torch would use 2 threads")
    assert lines[1:] == ["True", "True"]


def test_a_loss_on_the_host_cannot_be_walked_back_in_a_fork_but_in_its_parent():
    lines = output("""
        def back(loss):
            torch.set_num_threads(1)
            loss.backward()
            return float(loss)
        for where in (there, here):
            loss = chunked_loss(model, ids, config=config(where))
            in_a_fork(lambda: back(loss))
            loss.backward()
            print("parent", float(loss))
    """).splitlines()
    assert "its memory on cpu and the host is not inherited by forks" in lines[0]
    assert [line.split()[0] for line in lines[1::2]] == ["parent", "parent"]
    assert float(lines[2]) == float(lines[3].split()[1]), "what lies in ordinary memory came along"
