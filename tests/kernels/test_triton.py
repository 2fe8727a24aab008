"""What Triton serves and declines, and its launches; see the conformance suite.

Shapes: B batch, H query heads, N key tiles.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from unittest import mock

import pytest
import torch

from kernels import copies
from kernels.attention import triton, triton_launch
from kernels.attention.triton_launch import select_config, serves, split, split_values
from kernels.call import AttentionCall, Operands
from kernels.copies import DeviceConstant, SizedCache
from kernels.decode import triton as decode
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged


def test_cpu_tensors_are_declined_without_importing_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    x = torch.ones(1, 1, 4, 8)
    for name in ("attention.triton_launch", "attention.triton", "decode.triton"):
        # As at the first import: importing triton raises.
        spec = importlib.util.find_spec(f"kernels.{name}")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if name != "attention.triton_launch":
            reason = module.supports(Operands(x, x, x))
            assert reason == "it serves tensors on a GPU, not on cpu"


X = torch.ones(1, 1, 4, 64)


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        (X.double(), X.double(), "it serves float32, float16 and bfloat16, not torch.float64"),
        (torch.ones(1, 1, 4, 513).half(), X.half(), "it serves head dims up to 512, not 513"),
        (
            X,
            X.clone().requires_grad_(),
            "it has no backward pass (use torch.no_grad or torch.inference_mode)",
        ),
    ],
)
def test_declined_gpu_tensor_names_the_reason(q, k, reason, monkeypatch):
    monkeypatch.setattr(triton_launch, "_INTERPRETED", True)
    for backend in (triton, decode):
        assert backend.supports(Operands(q, k, q)) == reason


@pytest.mark.parametrize(
    ("target", "reads"), [("sm_80", False), ("sm_89", True), ("sm_100", True), ("hip", False)]
)
def test_gpu_without_eight_bit_support_is_declined(target, reads, monkeypatch):
    monkeypatch.setattr(triton_launch, "architecture", lambda _: target)
    x = torch.ones(1, 1, 4, 64)
    reason = None if reads else f"float8_e4m3fn needs compute capability 8.9, this GPU is {target}"
    assert triton_launch.dtype_unsupported(x.to(torch.float8_e4m3fn)) == reason
    assert (
        triton_launch.dtype_unsupported(x.to(torch.float8_e5m2)) is None
        and triton_launch.dtype_unsupported(x) is None
    )


def test_old_gpus_and_a_missing_triton_are_declined(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    missing = triton_launch._missing.__wrapped__
    assert missing(torch.device("cuda", 0)) == "it needs compute capability 8.0, this GPU has 7.5"
    monkeypatch.setattr(triton_launch.importlib.util, "find_spec", lambda name: None)
    assert missing(torch.device("cpu")) == "triton is not installed"


@pytest.mark.parametrize("dim", [1, 17, 64, 65, 80, 130, 192, 256])
def test_head_dim_splits_into_two_powers_of_two(dim):
    for widest in (128, 256):
        first, second = split(dim, widest)
        assert first + second >= dim and first <= widest and (second == 0 or first < dim)
        assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in (first, second))
    assert split(80) == (64, 16) and split(96) == (64, 32) and split(256, 128) == (128, 128)


def test_second_part_of_values_is_never_narrow():
    """On an H100, second parts of 16 and 32 columns are incorrect (Triton 3.6)."""
    assert split_values(80) == (128, 0) and split_values(48) == (64, 0)
    assert split_values(192) == (128, 64) and split_values(300) == (256, 64)


def test_float32_avoids_hopper_tensor_cores():
    """On an H100, tf32 is incorrect in some shapes and reads past shared memory (Triton 3.6)."""
    assert triton_launch.precision_of_float32("sm_90", 64) == "ieee"
    assert triton_launch.precision_of_float32("sm_80", 64) == "tf32x3"


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "hip"])
def test_every_target_has_a_configuration(target):
    for dim, itemsize in itertools.product((8, 64, 80, 96, 128, 192, 256), (2, 4)):
        assert select_config(target, dim=dim, itemsize=itemsize, has_tiles=True).rows == 1
        assert 128 % select_config(target, dim=dim, itemsize=itemsize, has_tiles=False).keys == 0
        assert serves(target, dim=dim, itemsize=itemsize)
    # 512 columns of tensor memory do not fit logits and an output of more than 256 columns.
    assert serves(target, dim=512, itemsize=2) == (target != "sm_100")


def test_build_name_contains_derived_constants(monkeypatch):
    """Triton's disk cache finds builds by name, including those of other releases."""
    x = torch.ones(1, 1, 4, 8)
    call = AttentionCall(x, x, x, dense_index(1, 1, 4, 4, x.device))
    how = triton.prepare(call)[1].constants["H"]
    name = repr(how)
    monkeypatch.setattr(triton_launch.KernelConfig, "masked_keys", 8)
    assert repr(how) != name


def test_only_unassigned_rows_are_cleared():
    ragged = Ragged(rows=(1, 1), q_starts=(2, 6), q_lens=(3, 2), k_starts=(0, 3), k_lens=(3, 2))
    q, out = torch.ones(2, 1, 9, 4), torch.ones(2, 1, 9, 4)
    filled, lse = triton._results(q, 4, ragged, out)
    assert filled is out
    nobody = [[True] * 9, [True, True, False, False, False, True, False, False, True]]
    assert (out[:, 0] == 0).all(-1).tolist() == nobody
    assert (out[:, 0] == 1).all(-1).logical_not().tolist() == nobody
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("capturing", [False, True])
def test_only_another_stream_waits_and_retains_memory(capturing, monkeypatch):
    tensor, copying, other, event = (mock.Mock() for _ in range(4))
    copy = DeviceConstant(tensor, copying, event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for current in (copying, other, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, at=current: at)
        assert copy.read() is tensor
    assert copying.mock_calls == []
    assert other.mock_calls == [mock.call.wait_event(event)] * 2 * (not capturing)
    assert tensor.mock_calls == [mock.call.record_stream(other)] * 2 * (not capturing)


def test_graph_copies_persist_and_are_private_to_the_graph(monkeypatch):
    monkeypatch.setattr(copies, "_captured", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 0)
    source = mock.Mock()
    pinned = source.pin_memory()
    copy = DeviceConstant.from_host(source, device)
    copy.read()
    # Until the graph is replayed the graph's own holds anything.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    copy.read()
    assert pinned.mock_calls == [mock.call.to(device, non_blocking=True)] * 2
    # A replay reads it again.
    assert copies._captured == [pinned]


def test_cache_evicts_least_recently_used():
    builds = []

    def make_one(name):
        builds.append(name)
        return name

    keep = SizedCache(make_one, len, max_bytes=6)
    for name in ("a", "bb", "ccc", "a", "dd", "a", "ccc", "bb"):
        assert keep(name) == name
    # dd takes the place of bb, which is made again.
    assert builds == ["a", "bb", "ccc", "dd", "bb"]
    # A result larger than max_bytes stays alone, until another one comes.
    for name in ("eeeeeeee", "eeeeeeee", "a", "a"):
        keep(name)
    assert builds[5:] == ["eeeeeeee", "a"]


def test_cache_counts_concurrent_builds_once():
    both = threading.Barrier(2)

    def make_one(name):
        if threading.current_thread() is not threading.main_thread():
            both.wait()
        return name

    keep = SizedCache(make_one, len, max_bytes=4)
    threads = [threading.Thread(target=keep, args=("aa",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keep("bb")
    assert keep._held == 4 and len(keep._made) == 2
