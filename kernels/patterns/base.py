"""Base of the attention patterns: a frozen set of sizes, and a builder that lowers many heads.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, h heads of one
kind in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from kernels.index import SparseIndex
from kernels.patterns.paged import Keys


class Inputs(NamedTuple):
    """Heads of one kind in a layer, and the tensors by which they choose.

    Attributes:
        heads: the h query heads of q.
        q: (B, H, Q, D), the last Q of the K positions.
        k: (B, G, K, D) keys, or pages that hold them; query head i reads KV head i // (H // G).
        scale: factor on the logits.
        window: in a sliding layer, how many keys a query sees, itself included: nothing is chosen
            for what lies beyond. The index may name it all the same; it has a window, too.
    """

    heads: Sequence[int]
    q: Tensor
    k: Keys
    scale: float
    window: int | None = None


Builder = Callable[[Sequence[Any]], SparseIndex]
"""Function from patterns of a kind, one a head, to the index of those heads."""


def _no_size(value: object) -> str | None:
    """The reason why the value is no size, None if it is one."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if fits:
        return None
    return f"must be a positive integer, got {value!r}"


def _no_share(value: object) -> str | None:
    fits = value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    )
    if fits:
        return None
    return f"must be above 0 and at most 1, got {value!r}"


# Fields of patterns that are no sizes.
NOT_SIZES = ("last_q", "coverage")
# `metadata` of a field that is no size: the rule its value is checked by.
SHARE: Mapping[str, Any] = {"fault": _no_share}


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Base of all patterns: fields are positive integers, in tokens unless a pattern says not.

    A field of another type has its rule in its metadata, as "fault": a function from the value to
    the fault, or None.

    Attributes:
        growing: the sizes that grow in proportion to the number of keys, on more keys than the
            pattern was searched on. Sinks do not.
    """

    kind: ClassVar[str]
    growing: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if fault := field.metadata.get("fault", _no_size)(getattr(self, field.name)):
                raise ValueError(f"{self.kind}: {field.name} {fault}")

    def scaled(self, ratio: float) -> Self:
        """The pattern with its growing sizes multiplied by `ratio`."""
        sizes = {name: round(getattr(self, name) * ratio) for name in self.growing}
        return replace(self, **sizes)

    @classmethod
    def prepare(cls, largest: Sequence[Self], inputs: Inputs) -> Builder:
        """Do once what does not depend on sizes, to build many indices over the same tensors.

        Args:
            largest: h patterns of this kind, one a head; no later pattern may be larger or differ
                in `last_q`.
            inputs: the h heads, and the tensors they read.

        Returns:
            A function from h patterns to the index of those h heads. Building waits for no device,
            and the widths of the index follow from sizes and lengths alone.
        """
        raise NotImplementedError
