"""Device and dtype of a command: the GPU where torch sees one, and the dtype that is fast there."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch

from artifacts import HeadwiseError
from artifacts.cli import command
from artifacts.errors import one_line
from profiling.environment import device_name
from runtime.devices import execution_device

Config = TypeVar("Config")


def resolve_device(device: str) -> str:
    """Return the device that --device names; auto is cuda where torch sees a GPU, else cpu."""
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def default_dtype(device: str) -> str:
    """Dtype that serves fastest: bfloat16, or float32 on a CPU without instructions for it.

    There torch emulates matrix products in bfloat16: 10 GFLOP/s a core instead of 83 in float32
    (EPYC Zen 3, torch 2.13).
    """
    if device.partition(":")[0] != "cpu" or not torch.backends.mkldnn.is_available():
        return "bfloat16"
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bfloat16"
    return "float32"


def settled(config: Config, model: Any = None, *, quiet: bool = False) -> Config:
    """Copy a command's config with its device and dtype decided, and report the device on stderr.

    Args:
        config: has `device` and `dtype`, each of which may be "auto".
        model: one that is loaded already decides both, and nothing is reported.
        quiet: report nothing, as ranks after the first do, and every command with -q.

    Raises:
        HeadwiseError: the device cannot be used.
    """
    untyped: Any = config
    if model is not None:
        return untyped.replace(device=device_of(model), dtype=dtype_of(model))
    device = resolve_device(untyped.device)
    check_device(device)
    if not quiet and command.verbosity >= 0:
        print(f"device: {described(device)}", file=sys.stderr, flush=True)
    dtype = untyped.dtype
    if dtype == "auto":
        dtype = default_dtype(device)
    decided: Config = untyped.replace(device=device, dtype=dtype)
    return decided


def described(device: str) -> str:
    """Describe a device: `cuda:0 NVIDIA H100` or `cpu (2 threads, AMD EPYC 9R14)`."""
    name = device_name(device)
    if device.partition(":")[0] == "cpu":
        return f"cpu ({torch.get_num_threads()} threads, {name})"
    return f"{torch.empty(0, device=device, dtype=torch.float32).device} {name}"


def check_device(device: str) -> None:
    """Raise HeadwiseError for a device that torch cannot use."""
    try:
        torch.empty(0, device=device, dtype=torch.float32)
    # torch has an AssertionError for a build without CUDA.
    except (RuntimeError, AssertionError) as error:
        reason = one_line(str(error).strip().splitlines()[0])[:150]
        raise HeadwiseError(
            f"cannot use the device {device!r}: {reason}; --device is auto, cpu, cuda, cuda:1, ..."
        ) from error


def dtype_of(model: Any) -> str:
    """The dtype that a model computes in, as --dtype names it."""
    return str(model.dtype).removeprefix("torch.")


def device_of(model: Any) -> str:
    """The device of a model as --device names it: the current GPU is cuda."""
    device = execution_device(model)
    if device == torch.empty(0, device=device.type, dtype=torch.float32).device:
        return str(device.type)
    return str(device)
