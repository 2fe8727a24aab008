"""The engine on AMX's tiles: instructions, emulated products, and refusals; see test_variants.py.

The emulation follows Intel's manual for the product of two tiles. No processor without AMX runs the
real instructions: there they are only compiled and read."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.attention import cpu
from kernels.native import build

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
def test_the_instructions_are_those_of_a_product(tmp_path):
    """The order of operands, and that flags for AVX-512 alone are enough."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    command = ["objdump", "-d", "--no-show-raw-insn", "--disassemble=product"]
    command.append(str(compiled(tmp_path)))
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\t(ldtilecfg|tile\w+|tdp\w+)\s*(\S*)", listing)
    assert [(name, re.findall(r"%tmm\d", operands)) for name, operands in found] == [
        ("ldtilecfg", []),
        ("tileloadd", ["%tmm0"]),
        ("tileloadd", ["%tmm4"]),
        ("tileloadd", ["%tmm6"]),
        ("tdpbf16ps", ["%tmm6", "%tmm4", "%tmm0"]),
        ("tilestored", ["%tmm0"]),
        ("tilerelease", []),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("has_bf16")
def test_emulated_products_are_those_of_the_manual(tmp_path):
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


@pytest.mark.usefixtures("has_bf16")
def test_tiles_that_compute_otherwise_do_not_serve(monkeypatch):
    class Wrong:
        """The native operators of a processor whose tiles are there, and wrong."""

        def __init__(self, by):
            self.by = by

        def why_no_tiles(self):
            return ""

        def engines(self, dtype):
            return ["amx", *(e for e in torch.ops.headwise.engines(dtype) if e != "amx")]

        def sparse_attention(self, *args):
            engine, out = args[-4], args[-3]
            real.sparse_attention(*args[:-4], "dot", *args[-3:])
            if engine == "amx":
                assert isinstance(out, torch.Tensor)
                out += self.by

    monkeypatch.setenv("HEADWISE_AMX", "1")
    real = torch.ops.headwise
    for by, reason in ((0.0, None), (0.5, "its results are not those of the engine without tiles")):
        cpu.why_no_tiles.cache_clear()
        with monkeypatch.context() as there:
            there.setattr("kernels.attention.cpu.torch.ops.headwise", Wrong(by))
            assert cpu.why_no_tiles() == reason
    cpu.why_no_tiles.cache_clear()


def test_a_processor_without_tiles_says_so():
    reason = cpu.why_no_tiles()
    assert ("amx" in cpu.engines(torch.bfloat16)) is (reason is None)
    if torch.ops.headwise.why_no_tiles():
        q = torch.randn(1, 1, 4, 32).bfloat16()
        with pytest.raises(
            ValueError, match="engine 'amx' does not serve BFloat16 on this processor"
        ):
            torch.ops.headwise.attention_with_sums(q, q, q, 1.0, 0.0, "amx")
