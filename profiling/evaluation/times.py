"""Speed part of an evaluation; measurements are kept in the resume file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from profiling.environment import environment
from profiling.evaluation.config import Speed
from profiling.evaluation.methods import Methods
from profiling.evaluation.peak_memory import peak_of
from profiling.evaluation.speed import (
    Timed,
    attention_seconds,
    decode_times,
    prefill_times,
)
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.quality.method import Method
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL
from runtime.devices import execution_device

# Both are timed in the same rounds as whatever is compared with them.
_DENSE = (MODEL, KERNEL)
# Whose decode differs from dense attention's only by Headwise's own growing cache: one of them is
# enough.
_PLAIN = (*_DENSE, HEADWISE)
# Increment if the stored form of a measurement changes.
_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Times:
    """Measurements by (method, length); memory in bytes.

    Attributes:
        attention: seconds of attention alone, by name: a method with patterns, and both dense
            attentions timed with it.
    """

    prefill: dict[tuple[str, int], Timed]
    attention: dict[tuple[str, int], dict[str, float]]
    decode: dict[tuple[str, int], Timed]
    memory: dict[tuple[str, int], int]


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
    return _Clock(config, loaded, methods, ledger, again).run(
        lambda m, at: peak_of(loaded, m, at, spec=spec, revision=revision)
    )


class _Clock:
    """One run of measurements."""

    def __init__(
        self, config: Speed, loaded: LoadedModel, methods: Methods, ledger: Ledger, again: bool
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._methods = methods
        self._ledger = ledger
        self._again = again
        device = execution_device(loaded.model)
        where = [*environment(device).values(), str(loaded.model.dtype), str(device)]
        self._where = "/".join(where)

    def run(self, peak: Callable[[Method, int], int]) -> Times:
        config = self._config
        longest = max(self._config.lengths)
        prefill: dict[tuple[str, int], Timed] = {}
        decode: dict[tuple[str, int], Timed] = {}
        memory: dict[tuple[str, int], int] = {}
        attention: dict[tuple[str, int], dict[str, float]] = {}
        total = (2 + config.decode) * len(config.lengths) + config.memory
        with phase("speed", total, "measurements") as shown:
            for length in config.lengths:
                methods = [
                    self._methods.make(name, length)
                    for name in dict.fromkeys((*_DENSE, *config.methods))
                ]
                prefill |= self._timed("prefill", methods, length)
                shown.update()
                attention |= self._attention(methods, length)
                shown.update()
                if config.decode:
                    decode |= self._timed(
                        "decode", [m for m in methods if m.evicts or m.name in _PLAIN], length
                    )
                    shown.update()
                if config.memory and length == longest:
                    for method in methods:
                        memory[method.name, length] = self._kept(
                            "memory", length, method.identity, partial(peak, method, length)
                        )
                    shown.update()
        return Times(
            prefill=prefill,
            attention=attention,
            decode=decode,
            memory=memory,
        )

    def _timed(
        self, measurement: str, methods: Sequence[Method], length: int
    ) -> dict[tuple[str, int], Timed]:
        config = self._config
        units = {
            m.name: self._unit(f"{measurement}/{config.repeats}/{config.steps}", length, m.identity)
            for m in methods
        }
        missing = [m for m in methods if self._again or units[m.name] not in self._ledger]
        if missing:
            with_dense = [m for m in methods if m.name in _DENSE or m in missing]
            if measurement == "prefill":
                times = prefill_times(self._loaded, with_dense, length, repeats=config.repeats)
            else:
                times = decode_times(
                    self._loaded, with_dense, length, steps=config.steps, repeats=config.repeats
                )
            for name, value in times.items():
                self._ledger.put(units[name], asdict(value))
        return {
            (m.name, length): Timed(**_tuples(self._ledger.get(units[m.name]))) for m in methods
        }

    def _attention(
        self, evaluated: Sequence[Method], length: int
    ) -> dict[tuple[str, int], dict[str, float]]:
        """Time attention alone of methods whose prefill has patterns."""
        methods = [m for m in evaluated if m.headwise is not None and not m.evicts]
        units = {m.name: self._unit("attention", length, m.identity) for m in methods}
        missing = [m for m in methods if self._again or units[m.name] not in self._ledger]
        if missing:
            seconds = attention_seconds(self._loaded, missing, length)
            for method in missing:
                names = (method.name, *_DENSE)
                self._ledger.put(
                    units[method.name], {name: seconds[name] for name in names if name in seconds}
                )
        return {(m.name, length): self._ledger.get(units[m.name]) for m in methods}

    def _kept(self, measurement: str, length: int, identity: str, find: Callable[[], Any]) -> Any:
        unit = self._unit(measurement, length, identity)
        if self._again:
            return self._ledger.put(unit, find())
        return self._ledger.once(unit, find)

    def _unit(self, measurement: str, length: int, identity: str) -> Unit:
        return self._ledger.unit(
            f"speed/{_VERSION}/{measurement}/{length}/{identity}/{self._where}"
        )


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    def read(value: Any) -> Any:
        if isinstance(value, Iterable):
            return tuple(read(each) for each in value)
        return value

    return {name: read(value) for name, value in record.items()}
