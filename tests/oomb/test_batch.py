"""A batch as chunks are cut from it."""

import pytest
import torch

from oomb.batch import to_device


@pytest.mark.parametrize("rows", [torch.arange(6).expand(2, 6), torch.arange(12).view(2, 6)], ids=["one row", "rows"])
def test_what_goes_to_a_device_may_have_gaps_or_share_memory(rows, monkeypatch):
    """Positions of a batch are one row, expanded; torch does not pin what overlaps itself."""

    def pin(rows):
        return torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype).copy_(rows)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    assert to_device(rows[:, 2:5], torch.device("meta")).shape == (2, 3)
