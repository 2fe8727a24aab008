"""lint: what an expert would ask about before serving with an artifact that is whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from artifacts.command_line import FOUND
from artifacts.commands import Outcome, answer, check_length, file_arg, json_flag
from artifacts.errors import ArtifactError, plural
from artifacts.lint import SEVERITIES, Case, Finding, Severity, lint
from artifacts.lint.fields import broken
from artifacts.options import arg
from artifacts.store import look

SHORT = "say what is odd: uniform patterns, patterns as dense as dense, impossible budgets, scores of two scales"
EXAMPLES = """\
Each finding is one line: severity, code, where; what is odd, why it matters, what to do.

  error    the file contradicts itself: head counts, sidecar, scores, summary
  warning  most likely a mistake: uniform, near-dense, impossible-budget, mixed-scales, foreign-scores,
           low-recall, no-evidence, no-fingerprint, slower, ...
  note     worth knowing: one-prompt, short-search, below-tile, ...

The exit status is 3 if there is a finding of --level or above (warning), 2 if FILE is no artifact at all.
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

    file: Path = file_arg()
    level: Severity = arg("--level", choices=SEVERITIES, default="warning", help="exit with 3 from this severity on")
    ignore: tuple[str, ...] = arg("--ignore", metavar="CODE", nargs="+", default=(), help="leave these codes out")
    length: int | None = arg(
        "--length", metavar="N", type=int, default=None, help="look at prompts of this length, too, in tokens"
    )
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """The findings.

    Raises:
        ArtifactError: the file is no artifact at all, so that there is nothing to look at.
    """
    check_length(config.length)
    found = [finding for finding in findings(config.file, config.length) if finding.code not in config.ignore]
    failing = SEVERITIES[: SEVERITIES.index(config.level) + 1]
    counts = Counter(finding.severity for finding in found)
    facts = {
        "file": str(config.file),
        "findings": [asdict(finding) for finding in found],
        "counts": {severity: counts[severity] for severity in SEVERITIES},
    }
    lines = [f"{f.severity:<8} {f.code}  {f.where}: {f.message}" for f in found]
    total = ", ".join(plural(counts[severity], severity) for severity in SEVERITIES) if found else "nothing odd"
    status = FOUND if any(finding.severity in failing for finding in found) else 0
    return answer(config.as_json, facts, [*lines, f"{config.file}: {total}"], status=status)


def findings(file: Path, length: int | None = None) -> list[Finding]:
    """All findings of a file, errors first.

    Raises:
        ArtifactError: the file is no artifact at all.
    """
    try:
        pair = look(file)
    except ArtifactError as error:
        # Without what was read, which its traceback keeps: the file is read again.
        if faults := broken(file, error.with_traceback(None)):
            return faults
        raise
    return lint(
        Case(artifact=pair.artifact, arrays=None if pair.fault else pair.arrays, fault=pair.fault, length=length)
    )
