"""Runs notebooks and stores their outputs: python -m tests.notebook_runs [FILE ...], or all.

HEADWISE_NOTEBOOK=small runs them at a small setting, as the tests do without storing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# No progress and no warnings of other libraries, which name paths of this machine.
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


def executed(path: Path) -> Any:
    """Run all cells of a notebook in a new kernel and return it with their outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, _QUIET | {"PYTHONPATH": paths}):
        nbclient.NotebookClient(
            notebook,
            timeout=3600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
        ).execute(cwd=str(path.parent))
    return notebook


def main() -> None:
    """Run and store the notebooks that are named, or all."""
    import nbformat

    for path in map(Path, sys.argv[1:] or NOTEBOOKS):
        print(path, flush=True)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
