"""Ranks of torchrun that share a command's work: who does what, and shared results.

    torchrun --nproc_per_node 8 -m headwise search --model M --out cfg.yaml

Without torchrun there is one rank, and torch.distributed is not initialized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from artifacts import HeadwiseError
from artifacts.cli import command
from artifacts.cli.command import launch_number

# Seconds that a rank waits for the others at the end of a phase. One that dies is noticed at once.
TIMEOUT = 7200.0
# Seconds in which torchrun ends the other ranks of one that has failed.
_GRACE = 5.0

T = TypeVar("T")


class Ranks:
    """The ranks as one of them sees them; every rank makes the same calls in the same order.

    Attributes:
        rank: number of this one.
        count: number of ranks.
        local: number of this one on its machine.
    """

    def __init__(self, rank: int = 0, count: int = 1, local: int = 0) -> None:
        self.rank = rank
        self.count = count
        self.local = local

    @property
    def is_first(self) -> bool:
        """True for the rank that writes the output and prints."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Return the device of this rank: `cuda` is a separate GPU if there are several ranks.

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

    def deal(self, jobs: Sequence[T], group: Callable[[T], Hashable]) -> list[T]:
        """Return this rank's jobs: whole groups, and a part of the groups left over.

        Args:
            jobs: the same in every rank.
            group: of a job. A group shares work, such as the dense pass of a prompt, which each
                rank with one of its jobs has to do.
        """
        groups: dict[Hashable, list[int]] = {}
        for place, job in enumerate(jobs):
            groups.setdefault(group(job), []).append(place)
        # Those with the most jobs first.
        in_order = sorted(groups.values(), key=lambda places: (-len(places), places[0]))
        whole = len(in_order) // self.count * self.count
        mine = [place for places in in_order[self.rank : whole : self.count] for place in places]
        shared = in_order[whole:]
        if shared:
            turn, at = divmod(self.rank, len(shared))
            sharing = len(range(at, self.count, len(shared)))
            mine += shared[at][turn::sharing]
        return [jobs[place] for place in sorted(mine)]

    def gather(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the values of all ranks, sorted by key; the first rank's wins."""
        merged: dict[str, Any] = {}
        for gathered in self.gather_all(dict(values)):
            merged = {**gathered, **merged}
        return dict(sorted(merged.items()))

    def gather_all(self, value: T) -> list[T]:
        """Return the value that each rank gave, by rank."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        with _collective():
            values: list[T] = gather_object([value])
            return values

    def broadcast(self, value: Any = None) -> Any:
        """Return the first rank's value, in every rank."""
        return self.gather_all(value if self.is_first else None)[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather_all(None)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block in the first rank, then in the others, which find its caches filled."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()


@contextmanager
def _collective() -> Iterator[None]:
    """Turn the error of a collective call into one line.

    torchrun ends this rank before that if another one has failed, which has reported why.
    """
    try:
        yield
    except RuntimeError as error:
        time.sleep(_GRACE)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise HeadwiseError(
            "another rank was killed or did not answer "
            f"({lines[-1][:200]}); finished jobs are kept: rerun the command to resume"
        ) from None


@contextmanager
def ranks(*, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join the ranks of this launch until the block ends, and leave when all work is done.

    An error in one rank ends all of them: torchrun ends the others.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    if launch_number("WORLD_SIZE", 1) == 1:
        yield Ranks()
        return
    import torch
    from accelerate import PartialState
    from torch import distributed

    state = PartialState(cpu=True, timeout=timedelta(seconds=timeout))
    local = state.local_process_index
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    joined = Ranks(state.process_index, state.num_processes, local)
    try:
        yield joined
        # The first rank serves the others' connections: it leaves last.
        joined.barrier()
    except BaseException as error:
        # gloo's threads abort when the interpreter ends under them.
        command.leave_at_once = True
        if isinstance(error, HeadwiseError) and not joined.is_first:
            # The first rank reports an error that all of them find.
            time.sleep(_GRACE)
        raise
    distributed.destroy_process_group()
