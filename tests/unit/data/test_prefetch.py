from __future__ import annotations

import torch

from framework.data.prefetch import on_device

CPU = torch.device("cpu")


class Noted:
    """A stand-in for a device's streams: remembers in which order copies begin and are handed over."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, batch):
        self.seen.append(f"begin {batch}")
        return (batch,)

    def hand_over(self, ticket):
        self.seen.append(f"hand over {ticket[0]}")
        return ticket[0]


def test_the_next_copy_begins_before_a_batch_is_used():
    copier = Noted()
    for batch in on_device(["a", "b", "c"], CPU, copier=copier):
        copier.seen.append(f"use {batch}")
    assert copier.seen == [
        *("begin a", "begin b", "hand over a", "use a"),
        *("begin c", "hand over b", "use b", "hand over c", "use c"),
    ]


def test_nothing_is_lost_where_there_is_one_or_none():
    assert list(on_device(["a"], CPU, copier=Noted())) == ["a"]
    assert list(on_device([], CPU, copier=Noted())) == []


def test_a_batch_that_is_nothing_is_handed_over_too():
    assert list(on_device([None, 0], CPU, copier=Noted())) == [None, 0]


def test_on_the_cpu_a_batch_is_loaded_when_it_is_asked_for():
    loaded: list[int] = []

    def load(number: int) -> torch.Tensor:
        loaded.append(number)
        return torch.full((1,), number)

    batches = on_device(map(load, range(3)), CPU)
    assert next(batches).item() == 0
    assert loaded == [0]
