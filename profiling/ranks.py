"""The ranks of torchrun that share a command's work: who does what, and shared results.

    torchrun --nproc_per_node 8 -m search.heads --model M --out cfg.yaml

Without torchrun there is one rank, and torch.distributed is not initialised.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from artifacts import HeadwiseError
from artifacts.cli import command
from artifacts.cli.command import INTERRUPTED, launch_number
from profiling.values import from_bytes, to_bytes

# The longest that a rank waits for the others at the end of a phase. One that has died is noticed
# at once.
TIMEOUT = 7200.0
_FAILED = "headwise/failed"
_CODE = "headwise/code"
_SECONDS_TO_TELL = 5.0

T = TypeVar("T")


class Ranks:
    """The ranks as one of them sees them; every rank makes the same calls in the same order."""

    def __init__(self, rank: int = 0, count: int = 1, local: int = 0, store: Any = None) -> None:
        """Describe one rank.

        Args:
            local: the rank among those on this machine.
            store: torch.distributed's, which tells failures.
        """
        self.rank = rank
        self.count = count
        self.local = local
        self._store = store

    @property
    def is_first(self) -> bool:
        """True for the rank that writes the output and prints."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this rank: `cuda` is a GPU of its own where there are several ranks.

        Raises:
            HeadwiseError: the machine has fewer GPUs than ranks.
        """
        if self.count == 1 or name != "cuda":
            return name
        import torch

        if self.local >= torch.cuda.device_count():
            raise HeadwiseError(
                f"rank {self.rank} needs a GPU of its own, this machine has "
                f"{torch.cuda.device_count()}: start at most so many with --nproc_per_node, or "
                "use --device cpu"
            )
        return f"cuda:{self.local}"

    def deal(
        self,
        units: Sequence[T],
        costs: Sequence[float] | None = None,
        *,
        needs: Sequence[str] | None = None,
        has: Sequence[Collection[str]] = (),
    ) -> list[T]:
        """Choose this rank's jobs: each, the longest first, goes where it ends first.

        Args:
            units: the same in every rank.
            costs: of each, in any unit; all the same if None.
            needs: for each what a rank makes for it first, as costly as itself, and then has;
                nothing if None.
            has: what each rank has of that.
        """
        if costs is None:
            costs = [1.0] * len(units)
        load = [0.0] * self.count
        known = [set(theirs) for theirs in has] or [set() for _ in load]
        mine = []
        for place in sorted(range(len(units)), key=lambda place: -costs[place]):
            if needs is None:
                need = None
            else:
                need = needs[place]
            makes = [need is not None and need not in theirs for theirs in known]
            ends = [
                (load[rank] + costs[place] * (1 + makes[rank]), makes[rank], rank)
                for rank in range(self.count)
            ]
            end, _, rank = min(ends)
            load[rank] = end
            if need is not None:
                known[rank].add(need)
            if rank == self.rank:
                mine.append(place)
        return [units[place] for place in sorted(mine)]

    def gather(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the values of all ranks, sorted by key; the first rank's wins.

        They are as profiling.values.from_bytes returns them, also where there is one rank.
        """
        merged: dict[str, Any] = {}
        for theirs in self.gather_all(dict(values)):
            merged = {**theirs, **merged}
        return dict(sorted(merged.items()))

    def gather_all(self, value: Any) -> list[Any]:
        """The value that each rank gave, by rank."""
        data = to_bytes(value)
        if self.count == 1:
            return [from_bytes(data)]
        import torch
        from torch import distributed

        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with self._together():
            distributed.all_gather(sizes, torch.tensor([len(data)], dtype=torch.long))
        longest = max(int(size) for size in sizes)
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
        with self._together():
            distributed.all_gather(
                padded, torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
            )
        return [
            from_bytes(bytes(part[: int(size)].numpy()))
            for part, size in zip(padded, sizes, strict=True)
        ]

    def broadcast(self, value: Any = None) -> Any:
        """The first rank's value, in every rank."""
        return self.gather_all(value if self.is_first else None)[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.count > 1:
            from torch import distributed

            with self._together():
                distributed.all_reduce(_nothing())

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block in the first rank, then in the others, which find its caches filled."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """End a collective call in every rank or in none: a failed rank's code ends all."""
        try:
            yield
        except RuntimeError as error:
            code = self._code_of_another()
            if code is not None:
                raise SystemExit(code) from None
            # A rank that is killed says nothing.
            raise HeadwiseError(
                f"rank {self.rank} of {self.count} lost another rank, which was killed or has not "
                f"come for long "
                f"({_last_line(error)}); what is finished is kept: start the same command again"
            ) from None

    def _code_of_another(self) -> int | None:
        try:
            self._store.wait([_CODE], timedelta(seconds=_SECONDS_TO_TELL))
            return int(self._store.get(_CODE))
        except RuntimeError:
            return None

    def _fails(self, error: BaseException) -> None:
        """Tell the other ranks this one's exit code; an earlier failure wins."""
        if isinstance(error, SystemExit):
            if isinstance(error.code, int):
                code = error.code
            else:
                code = int(error.code is not None)
        elif isinstance(error, HeadwiseError):
            code = error.status
        else:
            if isinstance(error, KeyboardInterrupt):
                code = INTERRUPTED
            else:
                code = 1
        try:
            first = self._store.add(_FAILED, 1) == 1
            if first:
                self._store.set(_CODE, str(code))
        except RuntimeError:
            # The store was the first rank's, and that is gone.
            first = True
        if not first:
            sys.exit(code)


@contextmanager
def ranks(*, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join the ranks of this launch until the block ends; leave it when all work is done.

    An error in one rank ends all of them: it is told once, and the others end with its exit code
    when they next wait for each other, or are ended by torchrun. torch.distributed speaks gloo for
    what is on the CPU, NCCL for GPUs.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    count = launch_number("WORLD_SIZE", 1)
    if count == 1:
        yield Ranks()
        return
    import torch
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    local = launch_number("LOCAL_RANK", 0)
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if torch.cuda.is_available():
        backends = "cpu:gloo,cuda:nccl"
    else:
        backends = "gloo"
    distributed.init_process_group(
        backends,
        store=PrefixStore("headwise", store),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
    )
    joined = Ranks(rank, count, local, store)
    try:
        yield joined
        # One that leaves early may take the store with it.
        joined.barrier()
    except BaseException as error:
        # gloo's threads abort when the interpreter ends under them.
        command.leave_at_once = True
        joined._fails(error)
        raise
    distributed.destroy_process_group()


def _nothing() -> Any:
    import torch

    return torch.zeros(1, dtype=torch.float32)


def _last_line(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
