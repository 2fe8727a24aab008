"""A process that does pieces of steps: each line on its stdin is a step's module, its pieces and the setting.

What it says to profiling.gpu.supervisor are lines of JSON on what was stdout; anything else that is printed goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from profiling.gpu.steps import Setting

# What an error of the device says: after one, nothing more works in the process that had it.
_OF_DEVICE = ("CUDA error", "HIP error", "device-side assert", "Triton Error [")
_BROKEN = 17


def main() -> int:
    """Do the pieces until stdin ends; 17 where the device no longer serves this process."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out, ExitStack() as context:
        os.dup2(2, 1)

        def say(**what: Any) -> None:
            print(json.dumps(what), file=out, flush=True)

        interpreted = False
        for line in sys.stdin:
            given = json.loads(line)
            setting = Setting(**given["setting"])
            if setting.small and not interpreted:
                from profiling.gpu.launches import as_on_gpu

                context.enter_context(as_on_gpu())
                interpreted = True
            if not _pieces(import_module(given["module"]), given["pieces"], setting, say):
                return _BROKEN
            say(idle=True)
    return 0


def _pieces(module: Any, pieces: list[str], setting: Setting, say: Callable[..., None]) -> bool:
    """Do a step's pieces; whether the device still serves this process."""
    for piece in pieces:
        say(begin=piece)
        try:
            found = module.run(piece, setting)
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            say(end=piece, error=said[:600])
            if any(words in said for words in _OF_DEVICE):
                return False
            _forget(setting)
        else:
            say(end=piece, found=found)
    return True


def _forget(setting: Setting) -> None:
    """After running out of memory: what the failed piece held is gone, and goes back to the device."""
    import torch

    if setting.device.startswith("cuda"):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
