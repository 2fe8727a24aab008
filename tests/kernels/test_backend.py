"""Every backend has the ops of its protocol in kernels.backend, argument for argument."""

from __future__ import annotations

import importlib
import inspect
from inspect import Parameter

import pytest

from kernels import backend
from kernels.dispatch import BACKENDS

MODULES = [
    *((f"attention.{name}", backend.AttentionBackend) for name in BACKENDS),
    *((f"decode.{name}", backend.DecodeBackend) for name in BACKENDS),
    *((f"gradient.{name}", backend.GradientBackend) for name in ("cpu", "reference")),
]


@pytest.mark.parametrize(("name", "protocol"), MODULES)
def test_a_backend_has_the_ops_of_its_protocol(name, protocol):
    module = importlib.import_module(f"kernels.{name}")
    ops = [op for op, value in vars(protocol).items() if op[0] != "_" and callable(value)]
    assert ops
    for op in ops:
        declared = dict(list(inspect.signature(getattr(protocol, op)).parameters.items())[1:])
        given = dict(inspect.signature(getattr(module, op)).parameters)
        if any(p.kind is Parameter.VAR_KEYWORD for p in given.values()):
            # Handed on to `prepare`, which has them.
            prepare = inspect.signature(module.prepare).parameters
            given = {n: p for n, p in given.items() if p.kind is not Parameter.VAR_KEYWORD}
            given = {**prepare, **given}
        for argument, wanted in declared.items():
            assert argument in given, f"{name}.{op} has no {argument}"
            assert given[argument].kind is wanted.kind, f"{name}.{op}: {argument}"
            if wanted.default is not Parameter.empty:
                assert given[argument].default == wanted.default, f"{name}.{op}: {argument}"
        for argument in given.keys() - declared.keys():
            assert given[argument].default is not Parameter.empty, f"{name}.{op} wants {argument}"
