"""No tensor of floats takes its dtype from torch.set_default_dtype, which is the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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


def test_tensors_of_floats_name_their_dtype():
    source = "torch.zeros(3); torch.tensor(weights); torch.arange(0, 1, 0.1); torch.tensor([1])"
    assert [line for line, _ in without_dtype(source)] == [1, 1, 1]
    calls = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, call in without_dtype(path.read_text(encoding="utf-8"))
    ]
    assert calls == []
