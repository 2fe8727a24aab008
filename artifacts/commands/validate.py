"""validate: whether both files are whole, and what is odd about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from artifacts.analysis.findings import SEVERITIES, Case, Severity
from artifacts.analysis.lint import lint
from artifacts.cli.command import FOUND
from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.errors import plural
from artifacts.store.read import read_pair
from artifacts.store.write import rehash

SHORT = (
    "check fields, hashes and sidecar, and say what is odd; exit status 2 "
    "if it is not whole, 3 for findings"
)
EXAMPLES = """\
A file that is not whole ends with one line and exit status 2. Of one that is, each finding is a
line: severity, code, where; what is odd, why it matters, what to do.

  error    the file contradicts itself: head counts, scores, summary
  warning  most likely a mistake: uniform, near-dense, impossible-budget, mixed-scales,
           foreign-scores, low-recall, no-evidence, no-fingerprint, ...
  note     worth knowing: one-prompt, short-search, edited

The exit status is 3 if there is a finding of --level or above (warning).

After a change by hand --rehash writes the file anew with the right content hash. It refuses what is
not valid. What the search found and what was measured is of the artifact before the change.

examples:
  headwise validate cfg.yaml
  headwise validate --rehash cfg.yaml   after an edit of cfg.yaml
  headwise validate cfg.yaml --level error && scp cfg.yaml cfg.*.safetensors server:
  headwise validate cfg.yaml --ignore no-evidence one-prompt
  headwise validate cfg.yaml --json     hash, sidecar, findings, every array with dtype and shape
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to check, the severity from which on it fails, and codes to leave out."""

    file: Path = file_arg()
    level: Severity = arg(
        "--level", choices=SEVERITIES, default="warning", help="exit with 3 from this severity on"
    )
    ignore: tuple[str, ...] = arg(
        "--ignore", metavar="CODE", nargs="+", default=(), help="leave these codes out"
    )
    rehash: bool = arg(
        "--rehash",
        action="store_true",
        default=False,
        help="write the file anew with the right content hash, after a change by hand",
    )
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """A line for each finding and one for the files, or one JSON object.

    Raises:
        ArtifactError: the pair is not whole.
        HeadwiseError: with --rehash, the file cannot be written.
    """
    if config.rehash:
        rehash(config.file)
    pair = read_pair(config.file)
    artifact = pair.artifact
    entries = pair.entries
    findings = [
        finding
        for finding in lint(Case(artifact=artifact, arrays=pair.arrays))
        if finding.code not in config.ignore
    ]
    counts = Counter(finding.severity for finding in findings)
    if artifact.sidecar:
        file = artifact.sidecar.file
    else:
        file = None
    whole = {
        "valid": True,
        "file": str(config.file),
        "schema_version": artifact.schema_version,
        "content_sha256": artifact.content_sha256,
        "fingerprint": not artifact.model.unknown,
        "sidecar": file,
        "arrays": {
            name: {"dtype": e.dtype, "shape": list(e.shape)} for name, e in sorted(entries.items())
        },
        "findings": [asdict(finding) for finding in findings],
        "counts": {severity: counts[severity] for severity in SEVERITIES},
    }
    if file:
        beside = f"sidecar {file}, arrays: {len(entries)}"
    else:
        beside = "no sidecar"
    if unknown := artifact.model.unknown:
        fits = f"; fits any model of its shape: {', '.join(unknown)} open"
    else:
        fits = ""
    if findings:
        odd = ", ".join(plural(counts[severity], severity) for severity in SEVERITIES)
    else:
        odd = "nothing odd"
    facts = (
        f"schema {artifact.schema_version}, content {artifact.content_sha256[:12]}, {beside}{fits}"
    )
    lines = [f"{f.severity:<8} {f.code}  {f.where}: {f.message}" for f in findings]
    failing = SEVERITIES[: SEVERITIES.index(config.level) + 1]
    if any(finding.severity in failing for finding in findings):
        status = FOUND
    else:
        status = 0
    return answer(
        config.as_json, whole, [*lines, f"ok: {config.file} ({facts}): {odd}"], status=status
    )
