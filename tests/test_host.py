"""Counts on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from twell import host


def test_on_the_cpu_they_are_there_at_once() -> None:
    counts = torch.tensor([3, 0])
    copy = host.send(counts)
    counts.fill_(7)
    assert host.receive(copy, counts) == [3, 0]


class Elsewhere:
    """Counts on a device that has not sent them yet."""

    device = SimpleNamespace(type="cuda")

    def tolist(self) -> list[int]:
        return [5, 6]


@pytest.mark.parametrize("looks", [1, 3])
def test_they_are_waited_for(looks: int) -> None:
    copy, counts = torch.tensor([-1, -1]), Elsewhere()
    seen = []

    def query() -> bool:
        seen.append(None)
        if len(seen) == looks:
            copy.copy_(torch.tensor([1, 2]))
        return False

    with mock.patch("torch.cuda.current_stream", lambda _: SimpleNamespace(query=query)):
        assert host.receive(copy, counts) == [1, 2]  # type: ignore[arg-type]
    assert len(seen) == looks


def test_a_copy_that_was_copied_too_early_is_asked_for_again() -> None:
    """Also one of which a half was there."""
    with mock.patch("torch.cuda.current_stream", lambda _: SimpleNamespace(query=lambda: True)):
        for early in ([-1, -1], [1, -1]):
            assert host.receive(torch.tensor(early), Elsewhere()) == [5, 6]  # type: ignore[arg-type]


@pytest.mark.gpu
def test_from_a_gpu() -> None:
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    for i in range(100):
        counts.fill_(i)
        copy = host.send(counts)
        assert copy.is_pinned() and host.receive(copy, counts) == [i, i]
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        big = big @ big / 64
    counts.fill_(9)
    copy = host.send(counts)
    early = copy.clone()
    assert host.receive(copy, counts) == host.receive(early, counts) == [9, 9]
