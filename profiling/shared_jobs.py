"""Jobs of a resume file that the ranks of a launch share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from profiling.ledger import Ledger, Unit
from profiling.progress import Phase
from profiling.ranks import Ranks


def run_jobs(
    ledger: Ledger,
    ranks: Ranks,
    jobs: Sequence[Unit],
    work: Callable[[Unit], Any],
    *,
    group: Callable[[Unit], Hashable],
    shown: Phase,
) -> list[Any]:
    """Compute the values of all jobs, in order, in every rank; missing ones are dealt to ranks.

    Args:
        ledger: keeps finished jobs.
        ranks: of this launch.
        jobs: the same in every rank.
        work: computes the value of one.
        group: of a job, as for Ranks.deal.
        shown: counts the jobs.
    """
    values = {job.key: value for job in jobs if (value := ledger.get(job)) is not None}
    # A rank that starts late may find what another has just finished: dealt is what nobody had at
    # first.
    by_rank = ranks.gather_all(set(values))
    done = set().union(*by_rank)
    left = [job for job in jobs if job.key not in done]
    mine = ranks.deal(left, group)
    shown.skip(len(jobs) - len(left))
    for job in mine:
        values[job.key] = ledger.put(job, work(job))
        shown.update()
    if ranks.count > 1:
        sent = set().union(*by_rank[: ranks.rank])
        values = ranks.gather({key: value for key, value in values.items() if key not in sent})
    shown.update(len(left) - len(mine))
    return [values[job.key] for job in jobs]
