"""What vLLM's --additional-config says to Headwise: the path of an artifact, or fields with more."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from artifacts.fields import Record, Text
from artifacts.validation import explain
from runtime import Headwise, load

KEY = "headwise"
# Added to the engine's configuration, which enters the key of vLLM's compile cache.
HASH_KEY = "headwise_content_sha256"


class Options(Record):
    """{"headwise": "cfg.yaml"} is short for {"headwise": {"artifact": "cfg.yaml"}}.

    content_sha256: the artifact has to have this hash: every process of a cluster then serves the same one.
    verify: a public key; the artifact has to be signed by its holder.
    target_speedup, target_kl, target_recall: which point of the artifact's front, see runtime.load.
    dense: no patterns and no other section of the artifact: Headwise's kernel over every key, in every layer that can
        be served; what a speed-up is to be compared with, beside vLLM's own attention.
    """

    artifact: Text
    content_sha256: Text | None = None
    verify: Text | None = None
    target_speedup: float | None = None
    target_kl: float | None = None
    target_recall: float | None = None
    dense: bool = False

    @property
    def point(self) -> dict[str, float]:
        """The targets that are given."""
        targets = {name: getattr(self, name) for name in ("target_speedup", "target_kl", "target_recall")}
        return {name: value for name, value in targets.items() if value is not None}

    def load(self) -> Headwise:
        """The artifact, checked, at the point that was asked for.

        Raises:
            HeadwiseError: see runtime.load; or it has another hash.
        """
        headwise = load(self.artifact, verify=self.verify, **self.point)
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
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        raise HeadwiseError(f"{where}: {explain(error)}") from None
