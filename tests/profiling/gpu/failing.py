"""A step whose pieces fail in every way that a piece can."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def run(piece: str, setting: Any) -> dict[str, Any]:
    if piece == "raises":
        raise ValueError("nothing of the kind")
    if piece == "has no memory":
        raise MemoryError("tried to allocate 80 GiB")
    if piece == "breaks the device":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if piece == "is killed":
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if piece == "leaves":
        os._exit(5)
    if piece == "hangs":
        time.sleep(600)
    print("what a library prints is no line of ours")
    return {"process": os.getpid(), "device": setting.device}
