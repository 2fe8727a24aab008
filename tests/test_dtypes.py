"""No tensor of floats takes its dtype from torch.set_default_dtype, which is the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "headwise", "kernels", "profiling", "runtime", "search")
# Functions of torch whose result has the default dtype if their arguments have none.
FACTORIES = {
    "as_tensor",
    "asarray",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randn",
    "range",
    "scalar_tensor",
    "tensor",
    "zeros",
}
# Never: they take no dtype.
CLASSES = {"FloatTensor", "Tensor"}


def without_dtype(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each call that makes floats of the default dtype, or may make them."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name = node.func.attr
        asks = name in FACTORIES and not _integers(node)
        # Between integers torch counts in integers.
        asks = asks or (name == "arange" and any(map(_fraction, node.args)))
        if name in CLASSES or (asks and not {"dtype", "out"} & {k.arg for k in node.keywords}):
            yield node.lineno, ast.unparse(node)


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_tensors_of_floats_name_their_dtype(folder):
    calls = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, call in without_dtype(path.read_text(encoding="utf-8"))
    ]
    assert calls == []


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("torch.zeros(3)", True),
        ("torch.zeros(3, device=x.device)", True),
        ("torch.tensor(weights)", True),
        ("torch.tensor([x.shape[0] / 2])", True),
        ("torch.full((2,), float('-inf'))", True),
        ("torch.arange(3) / torch.arange(0, 1, 0.1)", True),
        ("torch.Tensor(3)", True),
        ("torch.zeros(3, dtype=torch.float32)", False),
        ("torch.tensor([[1, 2], [3, -4]])", False),
        ("torch.arange(n)", False),
        ("x.new_zeros(3)", False),
    ],
)
def test_without_dtype_finds_calls_that_take_the_default(source, caught):
    assert bool(list(without_dtype(source))) is caught
