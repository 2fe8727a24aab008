"""Waits for copies to a device, by the streams and events asked for; and results kept in bytes."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

from kernels import copies
from kernels.copies import Copy, Kept


@pytest.mark.parametrize("capturing", [False, True])
def test_only_another_stream_waits_and_holds_the_memory(capturing, monkeypatch):
    tensor, copying, other, event = (mock.Mock() for _ in range(4))
    copy = Copy(tensor, copying, event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for current in (copying, other, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, at=current: at)
        assert copy.read() is tensor
    assert copying.mock_calls == []
    assert other.mock_calls == [mock.call.wait_event(event)] * 2 * (not capturing)
    assert tensor.mock_calls == [mock.call.record_stream(other)] * 2 * (not capturing)


def test_what_a_graph_copies_stays_and_nobody_else_reads_the_graph_s_own(monkeypatch):
    monkeypatch.setattr(copies, "_captured", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 0)
    source = mock.Mock()
    pinned = source.pin_memory()
    copy = Copy.of(source, device)
    copy.read()
    # Until the graph is replayed the graph's own holds anything.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    copy.read()
    assert pinned.mock_calls == [mock.call.to(device, non_blocking=True)] * 2
    # A replay reads it again.
    assert copies._captured == [pinned]


def test_what_was_not_asked_for_longest_goes_first():
    made = []

    def make_one(name):
        made.append(name)
        return name

    keep = Kept(make_one, len, room=6)
    for name in ("a", "bb", "ccc", "a", "dd", "a", "ccc", "bb"):
        assert keep(name) == name
    # dd takes the place of bb, which is made again.
    assert made == ["a", "bb", "ccc", "dd", "bb"]
    # More than there is room for stays alone, until something else comes.
    for name in ("eeeeeeee", "eeeeeeee", "a", "a"):
        keep(name)
    assert made[5:] == ["eeeeeeee", "a"]


def test_threads_that_make_the_same_thing_count_it_once():
    both = threading.Barrier(2)

    def make_one(name):
        if threading.current_thread() is not threading.main_thread():
            both.wait()
        return name

    keep = Kept(make_one, len, room=4)
    threads = [threading.Thread(target=keep, args=("aa",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keep("bb")
    assert keep._held == 4 and len(keep._made) == 2
