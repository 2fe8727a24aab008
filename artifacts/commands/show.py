"""Print it as a page: model, search, winners by kind, layer map, evidence."""

from __future__ import annotations

import shutil

from artifacts.cli.arguments import Json, YamlFile, deliver
from artifacts.cli.command import FOUND
from artifacts.cli.options import CommandConfig
from artifacts.page.artifact import render
from artifacts.store.read import read_lenient

EXAMPLES = """\
The page needs only the YAML file; the line `sidecar` reports a missing or changed sidecar, and
the exit status is then 3.

examples:
  headwise show cfg.yaml
  headwise show cfg.yaml --json | jq .search.summary
"""


class Config(CommandConfig):
    """File to show, and whether to print JSON."""

    file: YamlFile
    as_json: Json = None


def run(config: Config) -> int:
    """Print the page, or the artifact as one JSON object; 3 for a faulty sidecar.

    Raises:
        ArtifactError: the YAML file is invalid.
    """
    pair = read_lenient(config.file)
    artifact = pair.artifact
    if artifact.sidecar:
        state = f"{artifact.sidecar.file} (arrays: {len(pair.arrays)})"
    else:
        state = "none"
    if pair.fault:
        # The page needs only the YAML file, which is often copied without its arrays.
        state = f"PROBLEM: {pair.fault}"
    width = min(max(shutil.get_terminal_size((96, 24)).columns, 80), 100)
    text = render(artifact, file=config.file.name, arrays=pair.arrays, sidecar=state, width=width)
    deliver(text.removesuffix("\n"), artifact.model_dump_json(), config.as_json)
    return FOUND if pair.fault else 0
