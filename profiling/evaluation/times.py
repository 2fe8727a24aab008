"""Speed part of an evaluation; measurements are kept in the resume file.

Methods are timed in rounds with both dense attentions. Those of other rounds, on a busier machine,
are put on one scale: that of Headwise's dense kernel in its last rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from profiling.environment import environment
from profiling.evaluation.config import Speed
from profiling.evaluation.methods import Methods
from profiling.evaluation.peak_memory import peak_of
from profiling.evaluation.speed import (
    Timed,
    attention_seconds,
    decode_times,
    prefill_times,
    prompted,
    shared_layers,
)
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.quality.method import Method
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL
from runtime.devices import execution_device

# Both are timed in the same rounds as whatever is compared with them.
DENSE = (MODEL, KERNEL)
# Whose decode differs from dense attention's only by Headwise's own growing cache: one of them is
# enough.
_PLAIN = (*DENSE, HEADWISE)
# Increment if the stored form of a measurement changes.
_VERSION = 4


class _At(Protocol):
    @property
    def method(self) -> str: ...
    @property
    def length(self) -> int: ...


_Row = TypeVar("_Row", bound=_At)


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """Times of a method at a length, of a prefill or of a step of decode.

    Attributes:
        seconds: of a prefill, or of a token, on the scale of all rows of that length.
        timed: the rounds, with those of dense attention.
    """

    method: str
    length: int
    seconds: float
    timed: Timed


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """Seconds of attention alone by a method with patterns, and by dense attention beside it."""

    method: str
    length: int
    seconds: float
    dense: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Peak bytes of a prefill on top of the model's."""

    method: str
    length: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Times:
    """All measured times of an evaluation."""

    prefill: list[TimeRow] = field(default_factory=list)
    attention: list[AttentionRow] = field(default_factory=list)
    decode: list[TimeRow] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)


def row_of(rows: Iterable[_Row], method: str, length: int) -> _Row | None:
    """The row of a method at a length; None where there is none."""
    return next((row for row in rows if (row.method, row.length) == (method, length)), None)


def time_rows(times: Mapping[str, Timed], length: int) -> list[TimeRow]:
    """Rows of the times at one length, by method, on the scale of Headwise's dense kernel.

    A method's seconds are its ratio to that kernel in its own rounds, times the kernel's seconds.
    """
    dense = times[KERNEL].median
    return [
        TimeRow(
            method=name,
            length=length,
            seconds=timed.median * (dense / timed.speedup.over[KERNEL] / timed.median),
            timed=timed,
        )
        for name, timed in times.items()
    ]


def measure(
    config: Speed,
    loaded: LoadedModel,
    methods: Methods,
    ledger: Ledger,
    *,
    spec: str,
    revision: str | None,
    again: bool,
) -> Times:
    """Measure the times that the ledger lacks for this machine, or all of them if `again`.

    Args:
        config: what to time.
        loaded: the model.
        methods: the methods to time.
        ledger: the resume file.
        spec: the source that the model was loaded from.
        revision: its revision.
        again: measure times that the resume file has, too.
    """
    device = execution_device(loaded.model)
    where = "/".join([*environment(device).values(), str(loaded.model.dtype), str(device)])
    stored = _Stored(ledger, where, again)
    repeats = config.repeats
    rounds = f"{repeats}/{config.steps}"
    longest = max(config.lengths)
    result = Times()
    total = (2 + config.decode) * len(config.lengths) + config.memory
    with phase("speed", total, "measurements") as shown:
        for length in config.lengths:
            made = [methods.make(name, length) for name in dict.fromkeys((*DENSE, *config.methods))]
            prefills = stored.timed(
                f"prefill/{rounds}",
                made,
                length,
                partial(prefill_times, loaded, length=length, repeats=repeats),
            )
            result.prefill.extend(time_rows(prefills, length))
            shown.update()
            result.attention.extend(stored.attention(loaded, made, length))
            shown.update()
            if config.decode:
                steps = stored.timed(
                    f"decode/{rounds}",
                    [each for each in made if each.evicts or each.name in _PLAIN],
                    length,
                    partial(
                        decode_times,
                        loaded,
                        fill=partial(prompted, loaded, length),
                        length=length,
                        steps=config.steps,
                        repeats=repeats,
                    ),
                )
                result.decode.extend(time_rows(steps, length))
                shown.update()
            if config.memory and length == longest:
                for method in made:
                    peak = partial(peak_of, loaded, method, length, spec=spec, revision=revision)
                    held = stored.once(stored.unit("memory", length, method), peak)
                    result.memory.append(MemoryRow(method=method.name, length=length, bytes=held))
                shown.update()
    return result


@dataclass(frozen=True)
class _Stored:
    """Times of this machine in the resume file; with `again` none of them counts."""

    ledger: Ledger
    where: str
    again: bool

    def unit(self, measurement: str, length: int, method: Method) -> Unit:
        name = f"speed/{_VERSION}/{measurement}/{length}/{method.identity}/{self.where}"
        return self.ledger.unit(name)

    def once(self, unit: Unit, find: Callable[[], Any]) -> Any:
        if self.again:
            return self.ledger.put(unit, find())
        return self.ledger.once(unit, find)

    def lacks(self, unit: Unit) -> bool:
        return self.again or unit not in self.ledger

    def timed(
        self,
        measurement: str,
        methods: Sequence[Method],
        length: int,
        find: Callable[[Sequence[Method]], Mapping[str, Timed]],
    ) -> dict[str, Timed]:
        """Times of methods by name; those that are missing are timed with both dense ones."""
        units = {each.name: self.unit(measurement, length, each) for each in methods}
        missing = [each for each in methods if self.lacks(units[each.name])]
        if missing:
            beside = [each for each in methods if each.name in DENSE or each in missing]
            for name, value in find(beside).items():
                self.ledger.put(units[name], asdict(value))
        return {name: Timed(**_tuples(self.ledger.get(unit))) for name, unit in units.items()}

    def attention(
        self, loaded: LoadedModel, evaluated: Sequence[Method], length: int
    ) -> list[AttentionRow]:
        """Time attention alone of methods whose prefill has patterns, over their common layers."""
        methods = [each for each in evaluated if each.headwise is not None and not each.evicts]
        layers = shared_layers(methods)
        if not layers:
            return []
        # Methods with other patterns, in other layers, may be added later.
        measurement = f"attention/{','.join(map(str, layers))}"
        units = {each.name: self.unit(measurement, length, each) for each in methods}
        missing = [each for each in methods if self.lacks(units[each.name])]
        if missing:
            seconds = attention_seconds(loaded, missing, length, layers)
            dense = {name: seconds[name] for name in DENSE if name in seconds}
            for method in missing:
                # Without its name: a method of another name can have the same identity.
                taken = {"seconds": seconds[method.name], "dense": dense}
                self.ledger.put(units[method.name], taken)
        return [
            AttentionRow(method=name, length=length, **self.ledger.get(unit))
            for name, unit in units.items()
        ]


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    def read(value: Any) -> Any:
        if isinstance(value, Iterable):
            return tuple(read(each) for each in value)
        return value

    return {name: read(value) for name, value in record.items()}
