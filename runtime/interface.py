"""Reads from a module's code if its forward reaches transformers' attention interface.

A forward is followed through what it calls: methods of its class and attributes of its instance,
functions in closures and in functools.partial, objects that are called. Code that was put in place
of a forward (on an instance, by a subclass, in the class itself) counts; what it replaced counts
where it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Packages whose functions are not followed: they do not call a model's attention.
_LIBRARIES = ("torch", "transformers")


def asks_interface(cls: type[nn.Module]) -> bool:
    """True if the forward of a class calls transformers' attention interface."""
    return any(_asks(code) for code in _reached(cls.forward, cls, {}))


def instance_asks_interface(module: nn.Module) -> bool:
    """True if the forward that a module runs, its instance's, calls the attention interface."""
    own = vars(module)
    forward = own.get("forward", type(module).forward)
    return any(_asks(code) for code in _reached(forward, type(module), own))


def bypassing(around: Iterable[nn.Module], module: nn.Module) -> nn.Module | None:
    """The module around another one whose instance has a forward that does not call the inner one.

    Args:
        around: the modules that `module` is part of, the outermost first.
        module: a module.

    Returns:
        The outermost of them; None if all call it, as far as their code tells.
    """
    chain = [*around, module]
    for outer, inner in pairwise(chain):
        own = vars(outer)
        if "forward" not in own:
            continue
        held = {name for name, child in outer.named_children() if child is inner}
        former = set(_reached(type(outer).forward, type(outer), {}))
        reached = _reached(own["forward"], type(outer), own)
        if not any(code in former or held & _names(code) for code in reached):
            return outer
    return None


def name_of_forward(module: nn.Module) -> str:
    """Name of the function that a module's instance runs as its forward."""
    own = vars(module)
    # accelerate's hooks keep the forward that they wrap.
    function = own.get("_old_forward", own.get("forward", type(module).forward))
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    name = type(function).__qualname__ if code is None else code.co_qualname
    return f"{getattr(function, '__module__', type(function).__module__)}.{name}"


def _asks(code: CodeType) -> bool:
    return _INTERFACE in _names(code)


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function, those in functions inside of it included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _reached(forward: Any, cls: type[nn.Module], own: Mapping[str, Any]) -> Iterator[CodeType]:
    """Code of all functions that a forward may call.

    Args:
        forward: a function, or anything else that is called.
        cls: the class of its module.
        own: the attributes of its module's instance.
    """
    # What was seen stays alive: its id identifies it.
    seen: dict[int, Any] = {}
    left = [forward]
    while left:
        called = left.pop()
        if id(called) in seen:
            continue
        seen[id(called)] = called
        if isinstance(called, FunctionType):
            yield called.__code__
        left += _parts(called, cls, own)


def _parts(called: Any, cls: type[nn.Module], own: Mapping[str, Any]) -> Iterator[Any]:
    """Functions that something callable calls, or holds and may call."""
    if isinstance(called, functools.partial):
        yield called.func
        yield from filter(callable, (*called.args, *called.keywords.values()))
    elif isinstance(called, MethodType):
        yield called.__func__
        yield from _held(called.__self__, cls)
    elif isinstance(called, FunctionType):
        for cell in called.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                # Not filled yet.
                continue
            if callable(content):
                yield content
        yield from _named(called, cls, own)
    elif not isinstance(called, type):
        yield from _held(called, cls)


def _held(holder: Any, cls: type[nn.Module]) -> Iterator[Any]:
    """Functions of an object that is called, or whose method is: a wrapper, another module."""
    if isinstance(holder, cls | type | ModuleType):
        return
    yield from filter(callable, getattr(holder, "__dict__", {}).values())
    call = getattr(type(holder), "forward" if isinstance(holder, nn.Module) else "__call__", None)
    if isinstance(call, FunctionType):
        yield call


def _named(function: FunctionType, cls: type[nn.Module], own: Mapping[str, Any]) -> Iterator[Any]:
    """Names in a function's code: methods, attributes of the instance, other functions."""
    names = _names(function.__code__)
    inherited = "super" in names
    for name in names - {"forward"}:
        yield from _methods(cls, name, inherited=inherited)
        if callable(attribute := own.get(name)):
            yield attribute
        helper = function.__globals__.get(name)
        if isinstance(helper, FunctionType):
            package = str(helper.__module__).partition(".")[0]
            if package not in _LIBRARIES or helper.__globals__ is function.__globals__:
                yield helper
    if "forward" in names:
        # That of a class that is named, or of the one of the module.
        about = names | set(function.__code__.co_freevars)
        if about & {"super", "type", "__class__", *(base.__name__ for base in cls.__mro__)}:
            yield from _methods(cls, "forward", inherited=True)


def _methods(cls: type[nn.Module], name: str, *, inherited: bool) -> Iterator[Callable[..., Any]]:
    """Methods of this name: the one that the class runs and, if `inherited`, those of its bases."""
    for base in cls.__mro__:
        if base is nn.Module:
            return
        member = vars(base).get(name)
        if isinstance(member, property):
            member = member.fget
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if callable(member):
            yield member
            if not inherited:
                return
