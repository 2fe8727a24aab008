"""The checkout that a benchmark runs in, for its result file."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The short hash of the commit that is checked out."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=True,
    )
    return done.stdout.strip()
