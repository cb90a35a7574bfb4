"""What tests of the Trainer share."""

import pytest
import torch


@pytest.fixture
def one_gpu(monkeypatch):
    """The Trainer takes every GPU that its process sees, which oomb refuses; it sees the first."""
    if torch.cuda.device_count() > 1:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
