"""Speed of the kernels against torch's, side by side in one run, of right results only.

Prefill by torch's attention, by Headwise over every key, and by Headwise with patterns.

    headwise bench --length 4096 8192 --head-dims 64 128 --json out.json
"""

from __future__ import annotations

from artifacts.cli.arguments import STDOUT, Json, deliver_json
from artifacts.cli.interrupt import while_importing
from profiling.speed.config import Bench


class Config(Bench):
    """The measurement, and where its record goes."""

    as_json: Json = None


def run(config: Config) -> int:
    """Measure, and print a line for each size."""
    with while_importing():
        from profiling.models.device import settled
        from profiling.speed.run import run as compare
    record = compare(settled(config), show=config.as_json != STDOUT)
    deliver_json(record, config.as_json)
    return 0
