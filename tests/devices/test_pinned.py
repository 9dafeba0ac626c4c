"""Pinned host memory: what was asked for is remembered as long as it lives, and nothing else is pinned."""

from __future__ import annotations

import torch

from echo_hooks.devices import pinned


def test_a_tensor_and_its_views_are_pinned_until_the_storage_goes():
    tensor = torch.zeros(8)
    assert not pinned.is_pinned(tensor)
    assert pinned.pin(tensor) is tensor
    assert pinned.is_pinned(tensor) and pinned.is_pinned(tensor[2:4])
    assert not pinned.is_pinned(tensor.clone())
    key = tensor.untyped_storage()._cdata
    del tensor
    assert pinned._real[key].expired()


def test_those_that_are_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(pinned, "_real", {})
    monkeypatch.setattr(pinned, "_PURGE_AT", 4)
    kept = [pinned.pin(torch.zeros(1)) for _ in range(2)]
    for _ in range(20):
        pinned.pin(torch.zeros(1))
    assert len(pinned._real) <= 4 and all(map(pinned.is_pinned, kept))
