"""Who waits for a copy to a device: what streams and events are asked for; test_gpu.py has real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.copies import Copy


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
@pytest.mark.parametrize("recorded", [True, False])
def test_only_another_stream_waits_and_holds_the_memory(
    capturing: bool, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(3).as_subclass(Recorded)
    tensor.users = []
    copying, other = Stream(), Stream()
    event: Any = object() if recorded else None
    copy = Copy(tensor, copying, event)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for current in (copying, other, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, at=current: at)
        assert copy.read() is tensor
    waits = recorded and not capturing
    assert copying.asked == [] and other.asked == [event] * 2 * waits and tensor.users == [other] * 2 * waits
