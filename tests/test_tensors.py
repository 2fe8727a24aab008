"""No tensor takes dtype or device from torch.set_default_dtype and set_default_device: these are
the user's."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "headwise", "kernels", "profiling", "runtime", "search")
# Functions of torch whose result has the default dtype if their arguments have none.
OF_A_DTYPE = {
    "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace",
    "logspace", "normal", "ones", "rand", "randn", "range", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
# Never: they take no dtype.
CLASSES = {"FloatTensor", "Tensor"}
# Functions of torch whose result is on the default device if their arguments name none.
ON_A_DEVICE = {
    function.__name__
    for function in _device_constructors()
    if getattr(torch, function.__name__, None) is function
}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Syntax of every file of code."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def torch_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, set[str | None]]]:
    """Each call of a function of torch, the function's name and the names of the arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            yield node, node.func.attr, {keyword.arg for keyword in node.keywords}


def without_dtype(tree: ast.AST) -> list[int]:
    """Line of each call that makes floats of the default dtype, or may make them."""
    lines = []
    for call, name, named in torch_calls(tree):
        asks = name in OF_A_DTYPE and not _integers(call)
        # Between integers torch counts in integers.
        asks = asks or (name == "arange" and any(map(_fraction, call.args)))
        if name in CLASSES or (asks and not {"dtype", "out"} & named):
            lines.append(call.lineno)
    return lines


def without_device(tree: ast.AST) -> list[int]:
    """Line of each call that makes a tensor on the default device, or may make one."""
    return [
        call.lineno
        for call, name, named in torch_calls(tree)
        if name in ON_A_DEVICE and not {"device", "out"} & named
    ]


def device_of_a_model(tree: ast.AST) -> list[int]:
    """Line of each `model.device`, where an offloaded model waits: runtime.devices knows where it
    computes."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "device" and _is_model(node.value)
    ]


def _is_model(node: ast.AST) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name.strip("_") == "model"


def _integers(call: ast.Call) -> bool:
    """True for torch.tensor of integers that are written out."""
    if call.func.attr != "tensor" or len(call.args) != 1:
        return False
    leaves = [node for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant | ast.Name)]
    return bool(leaves) and all(
        isinstance(leaf, ast.Constant) and isinstance(leaf.value, int) for leaf in leaves
    )


def _fraction(argument: ast.AST) -> bool:
    """True where a float or a division is part of an argument."""
    return any(
        isinstance(node, ast.Div)
        or (isinstance(node, ast.Constant) and isinstance(node.value, float))
        for node in ast.walk(argument)
    )


@pytest.mark.parametrize(
    ("lines_of", "source", "expected"),
    [
        (
            without_dtype,
            "torch.zeros(3)\ntorch.tensor(weights)\ntorch.arange(0, 1, 0.1)\ntorch.tensor([1])",
            [1, 2, 3],
        ),
        (
            without_device,
            "torch.zeros(3, dtype=d)\ntorch.tensor([1])\ntorch.arange(3, device=d)\ntl.zeros(3)",
            [1, 2],
        ),
        (device_of_a_model, "self.model.device\nx.device", [1]),
    ],
)
def test_tensors_name_their_dtype_and_device(lines_of, source, expected):
    assert {"arange", "as_tensor", "randperm", "tensor", "zeros"} <= ON_A_DEVICE
    assert lines_of(ast.parse(source)) == expected
    assert [f"{path}:{line}" for path, tree in trees().items() for line in lines_of(tree)] == []
