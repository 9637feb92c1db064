"""Copies to the host."""

from __future__ import annotations

import pytest
import torch

from twell.host import HostCopy


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_copy_holds_the_value_at_the_time_of_the_copy(device: str) -> None:
    n, products = (16, 1) if device == "cpu" else (2048, 20)
    big, counts = torch.randn(n, n, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    for i in range(3):
        for _ in range(products):  # a GPU has not finished these when the copy is queued
            big = big @ big / 64
        counts = torch.full_like(counts, i)
        copy = HostCopy(counts)
        assert copy.value().tolist() == [i, i] and copy.value().device.type == "cpu"
