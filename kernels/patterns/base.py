"""Base of the attention patterns: a frozen set of sizes, and a builder that lowers many heads.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, h heads of one
kind in a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import registry
from kernels.copies import DeviceConstant, on_device, sized_cache
from kernels.index import PAD, SparseIndex, no_lists, num_rows, num_tiles
from kernels.patterns.paged import Keys
from kernels.topk import count_entries


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Builder:
    """State that heads of one kind compute once from their inputs; builds an index of patterns.

    It holds neither queries nor keys. Fields are as in Inputs.
    """

    batch: int
    q_len: int
    k_len: int
    scale: float
    window: int | None
    device: torch.device

    @classmethod
    def read(cls, inputs: Inputs, **what: Any) -> Self:
        """The builder that has read `what` of these inputs."""
        q = inputs.q
        return cls(
            batch=q.shape[0],
            q_len=q.shape[2],
            k_len=inputs.k.shape[2],
            scale=inputs.scale,
            window=inputs.window,
            device=q.device,
            **what,
        )

    @property
    def rows(self) -> int:
        """Query tiles."""
        return num_rows(self.q_len, self.k_len)

    def __call__(self, patterns: Sequence[Any]) -> SparseIndex:
        """The index of heads with these patterns, one a head."""
        return SelectCall([Part(range(len(patterns)), patterns, self)]).run()

    def widths(self, patterns: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
        """Most diagonals, tiles of a row, and columns of each head, as in SparseIndex.widths."""
        n = num_tiles(self.k_len)
        limits = [pattern.limits() for pattern in patterns]
        return tuple(
            (min(diagonals, n), 0, min(columns, self.k_len)) for columns, diagonals in limits
        )

    def entries(self, place: int, pattern: Any) -> Entries:
        """What head `place` of this kind names with a pattern, in torch: the definition."""
        raise NotImplementedError


class Entries(NamedTuple):
    """What one head names, as fields of a SparseIndex: ascending, and padded with PAD.

    diagonals (B, any), columns (B, any); tiles (B, R, any), None for no lists.
    """

    diagonals: Tensor
    columns: Tensor
    tiles: Tensor | None


class Part(NamedTuple):
    """Heads of one kind in a layer, their patterns, and what they read."""

    heads: Sequence[int]
    patterns: Sequence[Any]
    builder: Builder


@dataclass(frozen=True, eq=False, slots=True)
class SelectCall:
    """A build of the index of a layer from its parts, which together have heads 0, 1 ..."""

    parts: Sequence[Part]

    @property
    def builder(self) -> Builder:
        """Any of the builders: they share the fields of Builder."""
        return self.parts[0].builder

    @property
    def device(self) -> torch.device:
        """Device of the builder."""
        return self.builder.device

    def unknown(self, *known: type[Builder]) -> str | None:
        """The reason why a backend that knows some builders cannot serve; None where it can."""
        kinds = [type(part.builder) for part in self.parts]
        if others := [kind.__name__ for kind in kinds if kind not in known]:
            return f"it does not know what {others[0]} selects"
        return None

    @property
    def nothing_to_select(self) -> bool:
        """True if no head reads anything: the index follows from sizes and lengths."""
        return all(type(part.builder) is First for part in self.parts)

    def run(self, backend: str = "auto") -> SparseIndex:
        """The index of the layer; the reference is torch."""
        if backend == "auto" and self.nothing_to_select:
            return first_entries(self)
        index: SparseIndex = registry.run("select", self, backend)
        return index


class First(Builder):
    """A builder of what depends on no input: the first diagonals and the first columns."""

    def entries(self, place: int, pattern: Pattern) -> Entries:
        """See Builder.entries."""
        ((diagonals, _, columns),) = self.widths([pattern])
        most = max(diagonals, columns)
        first = torch.arange(most, dtype=torch.int32, device=self.device).expand(self.batch, -1)
        return Entries(first[:, :diagonals], first[:, :columns], None)


def layout(call: SelectCall) -> tuple[SparseIndex, list[tuple[Any, Builder, int]]]:
    """Memory for the index of a layer, and of each head its pattern, builder and place in its kind.

    Nothing but the bounds of skipping is written yet.
    """
    some = call.builder
    found: dict[int, tuple[tuple[Any, Builder, int], tuple[int, int, int]]] = {}
    for heads, patterns, builder in call.parts:
        places = ((pattern, builder, place) for place, pattern in enumerate(patterns))
        found |= zip(heads, zip(places, builder.widths(patterns), strict=True), strict=True)
    heads, widths = zip(*(found[head] for head in range(len(found))), strict=True)
    shape = (some.batch, len(heads))
    most = [max(each) for each in zip(*widths, strict=True)]
    lists = no_lists(*shape, some.rows, device=some.device)
    if most[1]:
        first = num_tiles(some.k_len) - some.rows
        total = sum(count_entries(width, some.rows, first) for _, width, _ in widths)
        lists = {
            "tiles": torch.empty(some.batch * total, dtype=torch.int32, device=some.device),
            "offsets": torch.empty(*shape, some.rows + 1, dtype=torch.int64, device=some.device),
        }
    diagonals, columns = (
        torch.empty(*shape, width, dtype=torch.int32, device=some.device) for width in most[::2]
    )
    index = SparseIndex.built(
        widths=widths,
        q_len=some.q_len,
        k_len=some.k_len,
        diagonals=diagonals,
        columns=columns,
        **lists,
        skip=skip_bounds([pattern for pattern, _, _ in heads], some.batch, some.k_len, some.device),
    )
    return index, list(heads)


class ReferenceSelect:
    """The index of each head by itself, on any device, one after the other."""

    @staticmethod
    def supports(call: SelectCall) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None

    @staticmethod
    def run(call: SelectCall) -> SparseIndex:
        """See SelectCall.run."""
        index, heads = layout(call)
        named = [builder.entries(place, pattern) for pattern, builder, place in heads]
        for head, entries in enumerate(named):
            for to, some in (
                (index.diagonals, entries.diagonals),
                (index.columns, entries.columns),
            ):
                to[:, head] = PAD
                width = min(some.shape[-1], to.shape[-1])
                to[:, head, :width] = some[:, :width]
        if any(width for _, width, _ in index.widths()):
            _write_lists(index, [entries.tiles for entries in named])
        return index


def _write_lists(index: SparseIndex, named: Sequence[Tensor | None]) -> None:
    """Write the lists of each head end to end, from its tiles (B, R, any); None for no lists."""
    device = index.tiles.device
    # On the host, as nothing may be read back: the first rows list fewer tiles than others.
    before = torch.arange(index.num_rows, device="cpu") + index.first_row
    index.offsets.zero_()
    end = 0
    for b in range(index.batch):
        for head, (tiles, (_, width, _)) in enumerate(zip(named, index.widths(), strict=True)):
            if tiles is None or not width:
                continue
            counts = before.clamp_max(width)
            at = (torch.arange(width, device="cpu") < counts[:, None]).flatten().nonzero()[:, 0]
            listed = pad(tiles[b], (0, width), value=PAD)[:, :width].flatten()
            index.tiles[end : end + len(at)] = listed[DeviceConstant.from_host(at, device).read()]
            ends = pad(counts.cumsum(0), (1, 0)) + end
            index.offsets[b, head] = DeviceConstant.from_host(ends, device).read()
            end += len(at)


def first_entries(call: SelectCall) -> SparseIndex:
    """The index of heads that read nothing; its entries are made once for each length."""
    some = call.builder
    patterns = {head: p for part in call.parts for head, p in zip(*part[:2], strict=True)}
    every = [patterns[head] for head in range(len(patterns))]
    widths = some.widths(every)
    diagonals, columns = (copy.read() for copy in _first(widths, some.batch, some.device))
    return SparseIndex.built(
        widths=widths,
        q_len=some.q_len,
        k_len=some.k_len,
        diagonals=diagonals,
        **no_lists(some.batch, len(every), some.rows, device=some.device),
        columns=columns,
        skip=skip_bounds(every, some.batch, some.k_len, some.device),
    )


@sized_cache(lambda copies: sum(copy.nbytes for copy in copies), 1 << 26)
def _first(
    widths: tuple[tuple[int, int, int], ...], batch: int, device: torch.device
) -> tuple[DeviceConstant, DeviceConstant]:
    """Diagonals and columns (B, h, any width), made once for each length; not to be written to."""
    diagonals, _, columns = zip(*widths, strict=True)
    with torch.inference_mode(False):
        return _counted(diagonals, batch, device), _counted(columns, batch, device)


def _counted(counts: Sequence[int], batch: int, device: torch.device) -> DeviceConstant:
    """0, 1 ... counts[i] - 1 for each head i: (B, h, any width) int32, padded."""
    at = torch.arange(max(counts), dtype=torch.int32, device="cpu")
    limit = torch.tensor(counts, dtype=torch.int32, device="cpu")[:, None]
    entries = torch.where(at < limit, at, PAD).expand(batch, -1, -1).contiguous()
    return DeviceConstant.from_host(entries, device)


def skip_bounds(
    patterns: Sequence[Pattern], batch: int, k_len: int, device: torch.device
) -> Tensor | None:
    """`skip` of an index of heads with these patterns."""
    bounds = [pattern.bound(k_len) for pattern in patterns]
    if all(bound is None for bound in bounds):
        return None
    known = tuple(-math.inf if bound is None else bound for bound in bounds)
    return on_device(known, device, torch.float32).expand(batch, -1)


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

    def limits(self) -> tuple[int, int]:
        """Most columns and most diagonals of a head: the first, where nothing is read.

        Vertical-slash counts distances in place of diagonals.
        """
        raise NotImplementedError

    def bound(self, k_len: int) -> float | None:
        """The log of a threshold on `k_len` keys (SparseIndex.skip); None: no tile is skipped."""
        return None

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
        return First.read(inputs)
