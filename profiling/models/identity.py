"""Identity of a model: everything that a figure measured on it depends on, as one key.

Resume files and the harness's cache of answers use it. The fingerprint of an artifact names a
checkpoint in any dtype, by samples, and has no hash of adapters and quantized weights. An identity
covers every byte of every tensor that modules hold, the values of their attributes, their classes,
the configuration, the dtypes, the kind of device and the model's own attention. A model with
something that cannot be read gets a random key, so that none of its figures is used again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import secrets
import threading
import types
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.devices import execution_device
from runtime.fingerprint import brought_in
from runtime.layers import text_config

# Attributes that every module has, labels, and what accelerate needs to load weights.
_LEFT_OUT = {
    *vars(nn.Module()),
    "config",
    "generation_config",
    "gradient_checkpointing",
    "hf_device_map",
    "name_or_path",
    "peft_config",
    "warnings_issued",
    "_compiled_call_impl",
    "_hf_hook",
    "_is_hf_initialized",
    "_old_forward",
}
# Fields of a configuration that are labels or caches' switches.
_LABELS = {"_commit_hash", "_name_or_path", "dtype", "torch_dtype", "transformers_version"}
# Packages whose functions compute what their names and arguments say, whatever they refer to.
_KNOWN = {"accelerate", "kernels", "peft", "profiling", "runtime", "torch", "transformers"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Objects without any influence on a result.
_NO_CONTENT = (logging.Logger, weakref.ref, type(threading.Lock()), type(threading.RLock()))
_BUILT_IN = (types.BuiltinFunctionType, types.BuiltinMethodType, np.ufunc)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a model.

    Attributes:
        name: of the model, a label.
        key: 64 hexadecimal digits; equal keys mean equal figures.
        unknown: what cannot be read, so that the key is a random one; None where there is nothing.
    """

    name: str
    key: str
    unknown: str | None = None


class _UnknownError(Exception):
    """Something that a model may compute with cannot be read; its description."""


def identity_of(model: Any, name: str) -> Identity:
    """Read a model; call it before anything is applied to it.

    Args:
        model: a transformers model.
        name: of the model.
    """
    content = _Content()
    try:
        content.add_model(model)
        return Identity(name=name, key=content.sha256())
    except _UnknownError as error:
        return Identity(name=name, key=secrets.token_hex(32), unknown=str(error))


class _Content:
    """Everything that a model computes with, in order."""

    def __init__(self) -> None:
        self._parts: list[str | Tensor] = []
        self._modules: dict[int, str] = {}
        # Objects stay alive, so that no two have one id.
        self._seen: dict[int, tuple[str, Any]] = {}

    def sha256(self) -> str:
        """Hash it; tensors in parallel."""
        tensors = [part for part in self._parts if isinstance(part, Tensor)]
        # hashlib releases the interpreter's lock.
        workers = min(os.cpu_count() or 1, torch.get_num_threads())
        with ThreadPoolExecutor(workers) as pool:
            digests = pool.map(_digest, tensors)
            digest = hashlib.sha256()
            for part in self._parts:
                text = next(digests) if isinstance(part, Tensor) else part
                digest.update(f"{len(text)} {text}\n".encode())
        return digest.hexdigest()

    def add_model(self, model: Any) -> None:
        """Add modules, configuration, kind of device and attention."""
        self._modules = {id(module): name for name, module in model.named_modules()}
        config = {
            "model": model.config.to_dict(),
            "text": text_config(model).to_dict(),
            "generation": model.generation_config and model.generation_config.to_dict(),
        }
        self._parts += [
            json.dumps(_without_labels(config), sort_keys=True, default=str),
            str(text_config(model)._attn_implementation),
            execution_device(model).type,
        ]
        for name, module in model.named_modules():
            self._add_module(name, module)

    def _add_module(self, name: str, module: nn.Module) -> None:
        own = vars(module)
        self._parts.append(f"{name}: {_name_of(type(module))}")
        offloaded = "_hf_hook" in own
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if "forward" in own and not offloaded:
            hooks.append(own["forward"])
        for hook in hooks:
            self._add(f"{name} hook", hook)
        tensors = {**module._parameters, **module._buffers}
        if any(tensor is not None and tensor.is_meta for tensor in tensors.values()):
            with brought_in(module):
                for key in tensors:
                    # Only now the weights are in memory.
                    self._parts.append(f"{name}.{key}")
                    self._parts.append(self._digest_of(f"{name}.{key}", getattr(module, key)))
        else:
            for key, tensor in tensors.items():
                self._add(f"{name}.{key}", tensor)
        for key, value in own.items():
            if key not in _LEFT_OUT and not (key == "forward" and offloaded):
                self._add(f"{name}.{key}", value)

    def _digest_of(self, name: str, tensor: Tensor | None) -> str:
        if tensor is None:
            return "None"
        content = _Content()
        content._add(name, tensor)
        return content.sha256()

    def _add(self, name: str, value: Any) -> None:
        """Add a value of any type.

        Raises:
            _UnknownError: it may have content that cannot be read.
        """
        if isinstance(value, _PLAIN):
            self._parts.append(f"{name} = {value!r}")
            return
        if isinstance(value, _NO_CONTENT):
            return
        if isinstance(value, type | Enum | np.generic | np.dtype | os.PathLike):
            self._parts.append(f"{name} = {value}")
            return
        known = self._modules.get(id(value))
        if known is not None:
            self._parts.append(f"{name} is the module {known}")
            return
        if id(value) in self._seen:
            self._parts.append(f"{name} is {self._seen[id(value)][0]}")
            return
        self._seen[id(value)] = name, value
        self._parts.append(f"{name}: {_name_of(type(value))}")
        if isinstance(value, Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._parts.append(torch.from_numpy(np.ascontiguousarray(value).view(np.uint8)))
        elif isinstance(value, nn.Module):
            for inner, module in value.named_modules(prefix=name):
                self._add_module(inner, module)
        elif isinstance(value, Mapping):
            self._add_all(name, value.items())
        elif isinstance(value, list | tuple):
            self._add_all(name, enumerate(value))
        elif isinstance(value, set | frozenset):
            self._add_all(name, enumerate(sorted(value, key=repr)))
        elif callable(value) and self._add_function(name, value):
            return
        elif hasattr(value, "to_dict") and _package(type(value)) == "transformers":
            # A configuration of a part of the model.
            config = _without_labels(value.to_dict())
            self._parts.append(json.dumps(config, sort_keys=True, default=str))
        elif hasattr(value, "__dict__"):
            slots = [slot for cls in type(value).__mro__ for slot in getattr(cls, "__slots__", ())]
            self._add_all(name, ((slot, getattr(value, slot, None)) for slot in slots))
            self._add_all(name, vars(value).items())
        else:
            raise _UnknownError(f"{name} is of the type {_name_of(type(value))}")

    def _add_all(self, name: str, entries: Iterable[tuple[Any, Any]]) -> None:
        for key, value in entries:
            self._add(f"{name}.{key}", value)

    def _add_function(self, name: str, value: Any) -> bool:
        """Add a function with all that it is bound to; False for another callable object."""
        if isinstance(value, functools.partial):
            self._add(f"{name}.func", value.func)
            self._add(f"{name}.args", value.args)
            self._add(f"{name}.keywords", value.keywords)
        elif isinstance(value, types.MethodType):
            self._add(f"{name}.function", value.__func__)
            self._add(f"{name}.self", value.__self__)
        elif isinstance(value, types.FunctionType):
            code = hashlib.sha256(value.__code__.co_code).hexdigest()
            self._parts.append(f"{name} = {_name_of(value)} {code}")
            self._add(f"{name}.defaults", [value.__defaults__, value.__kwdefaults__])
            for number, cell in enumerate(value.__closure__ or ()):
                self._add(f"{name}.closure.{number}", cell.cell_contents)
            if _package(value) not in _KNOWN:
                # Such as the vector that a hook adds.
                for key in value.__code__.co_names:
                    if not isinstance(found := value.__globals__.get(key), types.ModuleType):
                        self._add(f"{name}.globals.{key}", found)
        elif isinstance(value, _BUILT_IN):
            self._parts.append(f"{name} = {value.__qualname__}")
        else:
            return False
        return True

    def _add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a tensor's elements, its attributes, and the tensors that a subclass consists of."""
        self._parts.append(f"{tensor.dtype} {tuple(tensor.shape)}")
        attributes = {key: value for key, value in vars(tensor).items() if key not in _LEFT_OUT}
        self._add_all(name, attributes.items())
        data = tensor.data
        if type(data) is Tensor:
            if tensor.is_meta:
                raise _UnknownError(f"{name} is on the meta device")
            if data.layout is not torch.strided or data.is_quantized:
                raise _UnknownError(f"{name} is a {data.layout} tensor of {data.dtype}")
            self._parts.append(data)
        elif hasattr(tensor, "__tensor_flatten__"):
            inner, context = tensor.__tensor_flatten__()
            self._add_all(name, ((key, getattr(tensor, key)) for key in inner))
            self._add(f"{name} context", context)
        elif not any(isinstance(value, Tensor) for value in attributes.values()):
            raise _UnknownError(f"{name} is of the type {_name_of(type(tensor))}")


def _digest(tensor: Tensor) -> str:
    """Hash a plain tensor's elements, bit for bit."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elements = tensor.resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(elements.view(torch.uint8).numpy().data).hexdigest()


def _without_labels(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            str(key): _without_labels(value) for key, value in config.items() if key not in _LABELS
        }
    return config


def _package(value: Any) -> str:
    """Top-level package of a class, function or bound function."""
    while isinstance(value, functools.partial):
        value = value.func
    if not isinstance(value, type | types.FunctionType | types.MethodType):
        value = type(value)
    return str(value.__module__).partition(".")[0]


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
