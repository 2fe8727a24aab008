"""The conformance suite on cpu.cpp as other processors compile it, emulated, and sanitized.

A process can load one build only, so each variant patches the flags and runs part of the other
files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native import build

ROOT = Path(build.__file__).parents[2]
PROGRAM = """
import sys
import pytest
from kernels.native import build
build._FLAGS = (*build._FLAGS, *sys.argv[1].split())
reason = build.load()
if reason:
    sys.exit(reason)
arguments = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", sys.argv[2], *sys.argv[3:]]
sys.exit(pytest.main(arguments))
"""
SUITE = ("conformance/test_kernel_backends.py", "kernels/test_eight_bits.py")
# All engines at every odd size, and what bad indices and bad numbers do.
WHICH = (
    "(cpu or broken or padding or infinite or soft_cap) and "
    "not 4097 and not 4100 and not 1000 and not heads"
)
# Of these one of each sort, for `make test`.
FEW = (
    f"({WHICH}) and "
    "(length or strided or packed or pages or window or rising or broken or infinite or 33)"
)


def conform(
    flags: str,
    which: str = WHICH,
    suite: tuple[str, ...] = (*SUITE, "kernels/test_calls.py"),
    **environment: str,
) -> str:
    """What pytest prints of these files with a library that is compiled for it, and kept."""
    files = [str(ROOT / "tests" / name) for name in suite]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, flags, which, *files],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) > 70, result.stdout
    return result.stdout


def skip_without(instructions: str) -> None:
    if reason := build.load():
        pytest.skip(reason)
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or instructions not in cpuinfo.read_text():
        pytest.skip(f"the processor has no {instructions}")


AVX2 = ("-march=x86-64-v3", "avx2")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "needs"), [AVX2, ("-march=x86-64", "sse2"), ("-march=x86-64-v4", "avx512f")]
)
def test_other_instruction_sets(flags, needs):
    """AVX2 with FMA, plain x86-64, and AVX-512 without its bf16 instructions."""
    skip_without(needs)
    conform(flags)


@pytest.mark.slow
def test_avx2_where_the_processor_has_more():
    """Elsewhere it is what all the other tests run."""
    skip_without("avx512f")
    conform(AVX2[0], FEW)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sanitizers():
    """Addresses and undefined behaviour, with heap blocks filled with NaN."""
    if reason := build.load():
        pytest.skip(reason)
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    # libstdc++ as well: the sanitizer must find it before Python loads what throws.
    preload = []
    for library in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        command = [compiler, f"-print-file-name={library}"]
        preload.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
        if not Path(preload[-1]).is_absolute():
            pytest.skip(f"g++ has no {library}")
    flags = "-O2 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
    conform(
        flags,
        CXX=compiler,
        LD_PRELOAD=" ".join(preload),
        ASAN_OPTIONS="detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255",
        UBSAN_OPTIONS="print_stacktrace=1",
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_emulated_tiles():
    """AMX's engine where there is no AMX; test_tiles.py has what is emulated."""
    skip_without("avx512_bf16")
    others = ("conformance/test_gradient_backends.py", "kernels/test_patterns.py")
    printed = conform(
        "-DHEADWISE_EMULATE_TILES",
        "amx or not (float or dot or brgemm)",
        (*SUITE, *others),
        HEADWISE_AMX="1",
    )
    # Decoding a few queries has an engine of its own.
    assert len(re.findall("no engine 'amx'", printed)) <= 1
