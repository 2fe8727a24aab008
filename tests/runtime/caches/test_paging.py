"""Paging of cache policies: which rows of a text vLLM's pages hold, and that processes share it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import artifacts
from runtime.caches.make import POLICIES
from runtime.caches.paging import Paging
from runtime.vllm.policy_host import PagedPolicy

SNAPKV = artifacts.SnapKV(budget=0.5, window=8)
RECORDS: list[Any] = [
    artifacts.Full(),
    artifacts.Streaming(positions="original"),
    artifacts.Streaming(positions="cache"),
    artifacts.H2O(),
    SNAPKV,
]


def paging_of(record: Any) -> Paging:
    return POLICIES[record.kind].paging(record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.kind))
def test_paging_of_other_process_is_equal(record):
    """The specification of a layer goes from each worker to the scheduler, which compares them."""
    paging = paging_of(record)
    twin = pickle.loads(pickle.dumps(paging))
    assert twin == paging and hash(twin) == hash(paging)


def test_paging_names_policies_that_drop_tokens_or_are_unsupported():
    pagings = list(map(paging_of, RECORDS))
    assert [paging.drops for paging in pagings] == [False, True, False, False, True]
    assert [bool(paging.unsupported_reason) for paging in pagings] == [False] * 2 + [True] * 2 + [
        False
    ]


@pytest.mark.parametrize(("front", "window"), [(0, 1), (4, 10), (30, 3), (4, 100)])
def test_gap_of_window_is_all_that_last_token_does_not_read(front, window):
    paging = Paging(front=front, window=window)
    for length in range(60):
        read = {row for row in range(length) if row < front or row >= length - window}
        assert set(range(*paging.gap(length, prompt=20))) == set(range(length)) - read


@pytest.mark.parametrize(
    ("prompt", "length", "gap"),
    [
        (0, 5, (0, 0)),
        (40, 39, (0, 0)),
        (40, 40, (0, 0)),
        (40, 41, (20, 40)),
        (40, 90, (20, 40)),
        # No fewer tokens than queries that select, and no more than there are.
        (10, 11, (8, 10)),
        (5, 6, (5, 5)),
    ],
)
def test_gap_of_selection_begins_after_prompt(prompt, length, gap):
    assert paging_of(SNAPKV).gap(length, prompt) == gap


def test_layers_share_rows_of_equal_pagings():
    """A step makes the rows that are read once for all layers of a policy."""
    first, second = (PagedPolicy((paging_of(SNAPKV),) * 2) for _ in range(2))
    assert first._distinct == second._distinct and len(first._distinct) == 1
