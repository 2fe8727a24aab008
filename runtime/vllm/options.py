"""What vLLM's --additional-config says to Headwise: the path of an artifact, or fields with more."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from runtime import Headwise, load

KEY = "headwise"
# Added to the engine's configuration, which enters the key of vLLM's compile cache.
HASH_KEY = "headwise_content_sha256"

# What JSON has for the types of the fields below.
_FITS = {
    "str": lambda entry: isinstance(entry, str) and entry != "",
    "float": lambda entry: isinstance(entry, int | float) and not isinstance(entry, bool),
    "bool": lambda entry: isinstance(entry, bool),
}
_WORDS = {"str": "a text", "float": "a number", "bool": "true or false"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """{"headwise": "cfg.yaml"} is short for {"headwise": {"artifact": "cfg.yaml"}}.

    content_sha256: the artifact has to have this hash: every process of a cluster then serves the same one.
    verify: a public key; the artifact has to be signed by its holder.
    target_speedup, target_kl, target_recall: which point of the artifact's front, see runtime.load.
    stats: a folder where each process keeps what it served, as headwise-<rank>.json.
    dense: no patterns and no other section of the artifact: Headwise's kernel over every key, in every layer that can
        be served; what a speed-up is to be compared with, beside vLLM's own attention.
    """

    artifact: str
    content_sha256: str | None = None
    verify: str | None = None
    target_speedup: float | None = None
    target_kl: float | None = None
    target_recall: float | None = None
    stats: str | None = None
    dense: bool = False

    def load(self) -> Headwise:
        """The artifact, checked, at the point that was asked for.

        Raises:
            HeadwiseError: see runtime.load; or it has another hash.
        """
        headwise = load(
            self.artifact,
            verify=self.verify,
            target_speedup=self.target_speedup,
            target_kl=self.target_kl,
            target_recall=self.target_recall,
        )
        content = headwise.artifact.content_sha256
        if self.content_sha256 not in (None, content):
            raise HeadwiseError(
                f"{one_line(self.artifact)} has the content hash {content}, "
                f"--additional-config wants {shorten(self.content_sha256)}"
            )
        return headwise


def options_of(additional_config: Any) -> Options | None:
    """What an engine's additional configuration asks for, None where that is nothing.

    Raises:
        HeadwiseError: it is not understood.
    """
    value = additional_config.get(KEY) if isinstance(additional_config, dict) else None
    if value is None:
        return None
    given = {"artifact": value} if isinstance(value, str) else value
    where = f'"{KEY}" in --additional-config'
    if not isinstance(given, dict):
        raise HeadwiseError(f"{where} must be a path or an object, got {shorten(value)}")
    kinds = {field.name: str(field.type).partition(" ")[0] for field in fields(Options)}
    for name, entry in given.items():
        if name not in kinds:
            raise HeadwiseError(f"{where} has no field {shorten(name)}; it has: {', '.join(kinds)}")
        if not _FITS[kinds[name]](entry):
            raise HeadwiseError(f"{where}: {name} must be {_WORDS[kinds[name]]}, got {shorten(entry)}")
    if "artifact" not in given:
        raise HeadwiseError(f"{where} needs a field 'artifact'")
    return Options(**given)


def ranges(numbers: list[int]) -> str:
    """0-3, 5 for [0, 1, 2, 3, 5]."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def count(text: str) -> int:
    """A positive number of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)
