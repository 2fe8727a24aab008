"""The conformance suite on cpu.cpp as other processors compile it, emulated, and sanitized.

A process can load one build only, so each variant patches the flags and runs part of the other
files."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.attention import cpu
from kernels.native import build, prebuilt

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
SUITE = ("conformance/test_kernel_backends.py", "kernels/test_calls.py")
# All engines at every odd size, and invalid indices and non-finite values.
WHICH = (
    "(cpu or broken or padding or infinite or soft_cap) and "
    "not 4097 and not 4100 and not 1000 and not heads"
)


def conform(
    flags: str, which: str = WHICH, suite: tuple[str, ...] = SUITE, **environment: str
) -> str:
    """Return pytest's output for these files with a library built with the flags and cached."""
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
    if instructions not in prebuilt.processor_flags():
        pytest.skip(f"the processor has no {instructions}")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "newer"),
    [
        ("-march=x86-64", "avx2"),
        ("-march=x86-64-v3", "avx512f"),
        ("-march=x86-64-v4", "avx512_bf16"),
    ],
)
def test_older_instruction_sets_pass(flags, newer):
    """Plain x86-64, AVX2 with FMA, and AVX-512 without its bf16 instructions.

    Without the newer instructions every other test runs this build."""
    skip_without(newer)
    conform(flags)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sanitizers_report_nothing():
    """Check addresses and undefined behavior, with heap blocks filled with NaN."""
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
def test_emulated_tiles_pass():
    """Run the AMX engine without AMX; the emulated instructions are tested below."""
    skip_without("avx512_bf16")
    printed = conform(
        "-DHEADWISE_EMULATE_TILES",
        "amx or not (float or dot)",
        (*SUITE, "conformance/test_builders.py"),
    )
    # Decoding a few queries uses a separate engine.
    assert len(re.findall("no engine 'amx'", printed)) <= 1


# C += A B of one tile each.
PRODUCT = """
#include "{header}"
using namespace headwise;
extern "C" HEADWISE_USES_TILES void product(const void* a, const void* b, float* c) {{
  tiles::configure();
  tiles::load<0>(c, 64);
  tiles::load<4>(a, 64);
  tiles::load<6>(b, 64);
  tiles::add_product<0, 4, 6>();
  tiles::store<0>(c, 64);
  tiles::release();
}}
"""


@pytest.fixture(scope="module")
def has_bf16():
    if "dot" not in cpu.engines(torch.bfloat16):
        pytest.skip("this processor has no AVX-512 bf16")


def compiled(folder: Path, *flags: str) -> Path:
    compiler = build.find_compiler()
    if isinstance(compiler, str):
        pytest.skip(compiler)
    source = folder / "product.cpp"
    library = folder / "product.so"
    source.write_text(PRODUCT.format(header=Path(build.__file__).parent / "tiles.h"))
    home = Path(torch.__file__).parent
    machine = ["-march=x86-64-v4", "-mavx512bf16"]
    how = ["-O3", "-std=c++20", "-fPIC", "-w", *machine, f"-I{home / 'include'}", "-shared"]
    command = [*compiler, *how, str(source), *flags, f"-L{home / 'lib'}", "-lc10", "-o"]
    done = subprocess.run([*command, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@pytest.mark.slow
@pytest.mark.usefixtures("has_bf16")
def test_tile_instructions_are_those_of_a_product(tmp_path):
    """The order of operands, and that flags for AVX-512 alone are enough."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    command = ["objdump", "-d", "--no-show-raw-insn", "--disassemble=product"]
    command.append(str(compiled(tmp_path)))
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"\t(ldtilecfg|tile\w+|tdp\w+)\s*(\S*)", listing)
    assert [(name, re.findall(r"%tmm\d", operands)) for name, operands in instructions] == [
        ("ldtilecfg", []),
        ("tileloadd", ["%tmm0"]),
        ("tileloadd", ["%tmm4"]),
        ("tileloadd", ["%tmm6"]),
        ("tdpbf16ps", ["%tmm6", "%tmm4", "%tmm0"]),
        ("tilestored", ["%tmm0"]),
        ("tilerelease", []),
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("has_bf16")
def test_emulated_products_match_the_manual(tmp_path):
    torch.manual_seed(0)
    library = ctypes.CDLL(str(compiled(tmp_path, "-DHEADWISE_EMULATE_TILES")))
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    # A number that is subnormal counts as zero.
    a[3] = 1e-39
    c = torch.randn(16, 16)
    expected = c.double() + a.double().where(a.abs() > 1e-38, 0) @ b.double()
    pairs = b.view(16, 2, 16).transpose(1, 2).contiguous()
    library.product(*(ctypes.c_void_p(x.data_ptr()) for x in (a, pairs, c)))
    torch.testing.assert_close(c.double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(c[3].double(), expected[3])


def test_processor_without_tiles_reports_it():
    reason = cpu.why_no_tiles()
    assert ("amx" in cpu.engines(torch.bfloat16)) is (reason is None)
    if torch.ops.headwise.why_no_tiles():
        q = torch.randn(1, 1, 4, 32).bfloat16()
        with pytest.raises(
            ValueError, match="engine 'amx' does not serve BFloat16 on this processor"
        ):
            torch.ops.headwise.attention_with_sums(q, q, q, 1.0, 0.0, "amx")
