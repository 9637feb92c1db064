"""Copies to the host."""

from __future__ import annotations

import pytest
import torch

from twell.host import HostCopy


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_copy_holds_the_value_at_the_time_of_the_copy(device: str) -> None:
    big, counts = torch.randn(2048, 2048, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    for i in range(3):
        for _ in range(3 if device == "cpu" else 20):  # which a GPU has not done yet
            big = big @ big / 64
        counts = torch.full_like(counts, i)
        copy = HostCopy(counts)
        assert copy.value().tolist() == [i, i] and copy.value().device.type == "cpu"
