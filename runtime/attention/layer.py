"""State of the attention layers of one application: settings, plans, servers and counts."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from artifacts import Evidence, HeadwiseError
from kernels.patterns import LayerPlan

# In a model's configuration.
ATTENTION_NAME = "headwise"
# With fewer keys attention is a small part of a prefill, and the model's own serves.
MIN_KEYS_DENSE = 1024
_log = logging.getLogger("headwise")


class Served(NamedTuple):
    """Result of a server: (B, Q, H, E), and the name under which the call is counted."""

    out: Tensor
    name: str


Server = Callable[[Any], Served | None]
"""Serves a call, a runtime.attention.call.Call, or returns None: then the next one is asked. Why a
call has to be dense it leaves in `why_dense` of the call."""


class CallCounter:
    """Counter of attention calls by how they were served, for any number of threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # Adding to a Counter reads and writes: a thread that comes between loses a call.
        self._lock = threading.Lock()

    def add(self, name: str) -> None:
        """Count one more call."""
        with self._lock:
            self._counts[name] += 1

    def total(self) -> Counter[str]:
        """Calls of all layers so far."""
        with self._lock:
            return Counter(self._counts)


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """Options of one application of an artifact to a model, shared by its layers.

    Attributes:
        dense_by: kernel of dense calls: "auto" the faster of Headwise's and the model's, "kernel"
            Headwise's, "model" the model's.
        model_attention: the model's, "sdpa" or "eager".
        selects: the artifact has a decode section, whose steps read the context of the mask.
        evicts: the artifact has a kv_cache section, so caches may need no mask.
        evidence: the artifact's, for the length up to which it was measured.
    """

    dense_below: int
    strict: bool = False
    backend: str = "auto"
    dense_by: str = "auto"
    model_attention: str = "sdpa"
    selects: bool = False
    evicts: bool = False
    evidence: Evidence = field(default_factory=Evidence)
    calls: CallCounter = field(default_factory=CallCounter)
    warned: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def dense_kernels(self) -> bool:
        """True where Headwise's kernels may serve dense calls: decode, windows, prefills."""
        return self.dense_by != "model"

    @cached_property
    def kernel_from(self) -> int | None:
        """Fewest keys of a dense prefill for Headwise's kernel; None where it never serves one."""
        return {"auto": MIN_KEYS_DENSE, "kernel": 0}.get(self.dense_by)

    @cached_property
    def steps(self) -> bool:
        """True where Headwise's kernel may serve a decode step on the CPU."""
        return self.dense_kernels and self.backend in ("auto", "cpu")

    def refuse(self, reason: str, detail: str = "") -> None:
        """Raise if strict, as a call cannot be sparse; otherwise warn once for each reason."""
        if detail:
            line = f"{reason}: {detail}"
        else:
            line = reason
        if self.strict:
            raise HeadwiseError(f"cannot serve this call sparsely: {line}")
        self.warn_once(reason, f"serving densely: {line}")

    def check_length(self, tokens: int) -> None:
        """Warn once of a sparse prefill longer than the measured lengths."""
        line = self.evidence.beyond(tokens)
        if line is not None:
            self.warn_once("longer than measured", line)

    def warn_once(self, reason: str, line: str | None = None) -> None:
        """Warn of a reason, the first time."""
        with self._lock:
            first = reason not in self.warned
            self.warned.add(reason)
        if first:
            _log.warning("%s", line or reason)


@dataclass(frozen=True, eq=False)
class Layer:
    """State of one attention module.

    Attributes:
        plan: its prefill, None for a layer left alone.
        plug_ins: servers of the artifact's other sections, which are asked first.
        servers: all, in the order in which they are asked.
        hooks: hooks on the module, which end with the application.
        around: the modules that the module is part of, the model first.
    """

    settings: Settings
    number: int
    plan: LayerPlan | None
    plug_ins: tuple[Server, ...] = ()
    servers: tuple[Server, ...] = ()
    around: tuple[weakref.ref[nn.Module], ...] = ()
    hooks: list[RemovableHandle] = field(default_factory=list, init=False)

    @cached_property
    def planned_heads(self) -> tuple[int, int]:
        """Query and KV heads that the plan is for."""
        assert self.plan is not None
        return len(self.plan.patterns), self.plan.num_kv_heads

    @property
    def in_training(self) -> bool:
        """True if a module that the module is part of is in training mode.

        The layer that is checkpointed is around the attention, which may have been left in
        evaluation mode.
        """
        for reference in self.around:
            if (module := reference()) is not None and module.training:
                return True
        return False

    def count(self, name: str) -> None:
        """Count a call by the name of what served it, or by the reason why it was dense."""
        self.settings.calls.add(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of a module has nothing applied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
