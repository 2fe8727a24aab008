"""Native code of a wheel, built for several instruction sets; the processor's best serves.

A wheel that is built with HEADWISE_PREBUILD=1 (setup.py) holds a library for each level of its
architecture. AMX needs no separate library: the one for AVX-512 bf16 has its instructions in
separate functions (tiles.h). A library fits the release of torch that it was built with; with
another one, and on a processor below every level, the code is compiled at first use.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "prebuilt"
_AVX2 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Architecture -> level -> the compiler's flags and what /proc/cpuinfo must say, fastest first.
LEVELS: dict[str, dict[str, tuple[tuple[str, ...], frozenset[str]]]] = {
    "x86_64": {
        "avx512_bf16": (("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
        "avx512": (("-march=x86-64-v4",), _AVX512),
        "avx2": (("-march=x86-64-v3",), _AVX2),
    },
    "aarch64": {"armv8": (("-march=armv8-a",), frozenset(("fp", "asimd")))},
}


def levels() -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    """The levels of this machine's architecture, fastest first; none where wheels bring nothing."""
    return LEVELS.get(platform.machine(), {})


def library(level: str, folder: Path = FOLDER) -> Path:
    """Path of a level's library for this release of torch."""
    release = ".".join(torch.__version__.split(".")[:2])
    return folder / f"cpu-{level}-torch{release}.so"


def find() -> Path | None:
    """The wheel's best library for this processor and this torch; None where there is none."""
    if not FOLDER.is_dir():
        return None
    has = processor_flags()
    fits = (library(level) for level, (_, needs) in levels().items() if needs <= has)
    return next((path for path in fits if path.is_file()), None)


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Flags of the first processor, as Linux names them; empty where it does not."""
    if not cpuinfo.is_file():
        return frozenset()
    lines = cpuinfo.read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(flags.partition(":")[2].split())
