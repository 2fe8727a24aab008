"""Waits for copies to a device, by the streams and events asked for; and results kept in bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kernels import copies
from kernels.copies import Copy, Kept


class Stream:
    """A stream that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def wait_event(self, event: object) -> None:
        self.asked.append(event)


class Recorded(torch.Tensor):
    """A tensor that notes the streams that use its memory."""

    users: list[Stream]

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        self.users.append(stream)


@pytest.mark.parametrize("capturing", [False, True])
def test_only_another_stream_waits_and_holds_the_memory(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(3).as_subclass(Recorded)
    tensor.users = []
    copying, other = Stream(), Stream()
    event: Any = object()
    copy = Copy(tensor, copying, event)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for current in (copying, other, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, at=current: at)
        assert copy.read() is tensor
    waits = not capturing
    assert (
        copying.asked == []
        and other.asked == [event] * 2 * waits
        and tensor.users == [other] * 2 * waits
    )


class Pinned(torch.Tensor):
    """A tensor of the host that notes where it is copied to, and stays here."""

    def pin_memory(self, *_: Any) -> Pinned:
        return self

    def to(self, *to: Any, **how: Any) -> torch.Tensor:
        assert (to, how) == ((torch.device("cuda", 0),), {"non_blocking": True})
        return self.as_subclass(torch.Tensor).clone()


def test_what_a_graph_copies_stays_and_nobody_else_reads_the_graph_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "_captured", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    source = torch.arange(3).as_subclass(Pinned)
    copy = Copy.of(source, torch.device("cuda", 0))
    captured = copy.read()
    # Until the graph is replayed its memory holds anything.
    captured.fill_(-1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert copy.read().tolist() == [0, 1, 2]
    del copy
    # A replay reads it again.
    assert [kept.tolist() for kept in copies._captured] == [[0, 1, 2]]


def test_what_was_not_asked_for_longest_goes_first() -> None:
    made: list[str] = []

    def make_one(name: str) -> str:
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


def test_threads_that_make_the_same_thing_count_it_once() -> None:
    both = threading.Barrier(2)

    def make_one(name: str) -> str:
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
