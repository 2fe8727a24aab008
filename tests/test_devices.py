"""No tensor takes its device from torch.set_default_device, which is the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch.utils._device import _device_constructors

from tests.test_dtypes import FOLDERS, ROOT

# Functions of torch whose result is on the default device if their arguments name none.
FACTORIES = {
    function.__name__
    for function in _device_constructors()
    if getattr(torch, function.__name__, None) is function
}


def without_device(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each call that makes a tensor on the default device, or may make one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        named = {keyword.arg for keyword in node.keywords}
        if node.func.attr in FACTORIES and not {"device", "out"} & named:
            yield node.lineno, ast.unparse(node)


def test_tensors_name_their_device():
    source = "torch.zeros(3, dtype=d); torch.tensor([1]); torch.arange(3, device=d); tl.zeros(3)"
    assert [line for line, _ in without_device(source)] == [1, 1]
    assert {"arange", "as_tensor", "randperm", "tensor", "zeros"} <= FACTORIES
    calls = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, call in without_device(path.read_text(encoding="utf-8"))
    ]
    assert calls == []


def test_device_of_a_model_is_the_one_that_computes():
    """Of an offloaded model `device` is where its weights wait: runtime.devices knows the other."""
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "device" and _is_model(node.value)
    ]
    assert reads == []


def _is_model(node: ast.AST) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name.strip("_") == "model"
