"""A process that does pieces of one step: python -m profiling.gpu.worker MODULE, its pieces and setting on stdin.

What it says to profiling.gpu.supervisor are lines of JSON on what was stdout; anything else that is printed goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from profiling.gpu.steps import Setting

# What an error of the device says: after one, nothing more works in the process that had it.
_OF_DEVICE = ("CUDA error", "HIP error", "device-side assert", "Triton Error [")
_BROKEN = 17


def main(name: str) -> int:
    """Do the pieces; 17 where the device no longer serves this process."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out, ExitStack() as context:
        os.dup2(2, 1)

        def say(**what: Any) -> None:
            print(json.dumps(what), file=out, flush=True)

        given = json.load(sys.stdin)
        setting = Setting(**given["setting"])
        module = import_module(name)
        if setting.small:
            from profiling.gpu.launches import as_on_gpu

            context.enter_context(as_on_gpu())
        for piece in given["pieces"]:
            say(begin=piece)
            try:
                found = module.run(piece, setting)
            except Exception as error:
                traceback.print_exc()
                said = f"{type(error).__name__}: {error}"
                say(end=piece, error=said[:600])
                if any(words in said for words in _OF_DEVICE):
                    return _BROKEN
                _forget(setting)
            else:
                say(end=piece, found=found)
    return 0


def _forget(setting: Setting) -> None:
    """After running out of memory: what the failed piece held is gone, and goes back to the device."""
    import torch

    if setting.device.startswith("cuda"):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
