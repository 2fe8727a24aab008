"""lint: what an expert would ask about before serving with an artifact that is whole."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from artifacts.commands import FOUND, Outcome, add_file, add_json
from artifacts.errors import ArtifactError, one_line
from artifacts.lint import SEVERITIES, Finding, Severity
from artifacts.lint.fields import broken
from artifacts.lint.finding import Case
from artifacts.lint.run import lint
from artifacts.store import load, load_arrays

SHORT = "say what is odd: uniform patterns, patterns as dense as dense, impossible budgets, scores of two scales"
EXAMPLES = """\
Each finding is one line: severity, code, where; what is odd, why it matters, what to do.

  error    the file contradicts itself: head counts, sidecar, scores, summary
  warning  most likely a mistake: uniform, near-dense, impossible-budget, mixed-scales, foreign-scores,
           low-recall, no-evidence, no-fingerprint, slower, ...
  note     worth knowing: one-prompt, short-search, below-tile, ...

The exit status is 1 if there is a finding of --level or above (warning), 2 if FILE is no artifact at all.
Patterns that a prompt chooses are counted from their sizes: columns as if they were the first, diagonals
as if they were the nearest: an estimate.

examples:
  python -m artifacts lint cfg.yaml
  python -m artifacts lint cfg.yaml --length 8192            also look at prompts of 8,192 tokens
  python -m artifacts lint cfg.yaml --level error            fail on contradictions only
  python -m artifacts lint cfg.yaml --ignore no-evidence one-prompt
  python -m artifacts lint cfg.yaml --json | jq '.findings[] | select(.severity == "error")'
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which file, from which severity on it fails, which codes it leaves out, and a length to look at."""

    file: Path
    level: Severity = "warning"
    ignore: tuple[str, ...] = ()
    length: int | None = None
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    add_file(parser)
    parser.add_argument("--level", choices=SEVERITIES, default="warning", help="exit with 1 from this severity on")
    parser.add_argument("--ignore", metavar="CODE", nargs="+", default=(), help="leave findings of these codes out")
    parser.add_argument("--length", metavar="N", type=int, help="look at prompts of this length, too, in tokens")
    add_json(parser)


def run(config: Config) -> Outcome:
    """The findings.

    Raises:
        ArtifactError: the file is no artifact at all, so that there is nothing to look at.
    """
    if config.length is not None and config.length < 1:
        raise ArtifactError(f"--length must be at least 1, got {config.length}")
    found = [finding for finding in findings(config.file, config.length) if finding.code not in config.ignore]
    failing = SEVERITIES[: SEVERITIES.index(config.level) + 1]
    status = FOUND if any(finding.severity in failing for finding in found) else 0
    counts = Counter(finding.severity for finding in found)
    if config.as_json:
        whole = {
            "file": str(config.file),
            "findings": [asdict(finding) for finding in found],
            "counts": {severity: counts[severity] for severity in SEVERITIES},
        }
        return Outcome(text=json.dumps(whole) + "\n", status=status)
    lines = [f"{f.severity:<8} {f.code}  {f.where}: {f.message}" for f in found]
    total = ", ".join(f"{counts[severity]} {severity}{'s' * (counts[severity] != 1)}" for severity in SEVERITIES)
    lines.append(f"{config.file}: {total}" if found else f"{config.file}: nothing odd")
    return Outcome(text="".join(f"{one_line(line)}\n" for line in lines), status=status)


def findings(file: Path, length: int | None = None) -> list[Finding]:
    """All findings of a file, errors first.

    Raises:
        ArtifactError: the file is no artifact at all.
    """
    try:
        artifact = load(file, check_sidecar=False)
    except ArtifactError as error:
        if faults := broken(file, error):
            return faults
        raise
    try:
        return lint(Case(artifact=artifact, arrays=load_arrays(file), length=length))
    except ArtifactError as error:
        fault = str(error).removeprefix(f"{file}: ")
        return lint(Case(artifact=artifact, arrays=None, fault=fault, length=length))
