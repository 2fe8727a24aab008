"""Options in vLLM's --additional-config: the path of an artifact, or fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from artifacts.schema.fields import Record, Text
from artifacts.schema.front import POINT, read_point
from artifacts.schema.validation import explain
from runtime import LoadedArtifact, load

KEY = "headwise"
# Added to the engine's configuration, which enters the key of vLLM's compile cache.
HASH_KEY = "headwise_content_sha256"


def _check_point(point: str) -> str:
    if read_point(point) is None:
        raise ValueError(f"must be {POINT}")
    return point


class Options(Record):
    """{"headwise": "cfg.yaml"} is short for {"headwise": {"artifact": "cfg.yaml"}}.

    Attributes:
        content_sha256: the artifact has to have this hash: all processes of a cluster serve the
            same.
        verify: a public key; the artifact has to be signed by its holder.
        point: of the artifact's front, see runtime.load.
        dense: no section of the artifact, but Headwise's kernel over every key in every layer that
            it can serve: a baseline for speed, next to vLLM's own attention.
    """

    artifact: Text
    content_sha256: Text | None = None
    verify: Text | None = None
    point: Annotated[str, AfterValidator(_check_point)] | None = None
    dense: bool = False

    def load(self) -> LoadedArtifact:
        """Load the artifact at its point; HeadwiseError as runtime.load, and for another hash."""
        headwise = load(self.artifact, point=self.point, verify=self.verify)
        content = headwise.artifact.content_sha256
        if self.content_sha256 not in (None, content):
            has = f"{one_line(self.artifact)} has the content hash {content}"
            wants = shorten(self.content_sha256)
            raise HeadwiseError(f"{has}, --additional-config wants {wants}")
        return headwise


def options_of(additional_config: Any) -> Options | None:
    """Options of an engine's additional configuration, if any; HeadwiseError for bad ones."""
    if isinstance(additional_config, dict):
        value = additional_config.get(KEY)
    else:
        value = None
    if value is None:
        return None
    fields = {"artifact": value} if isinstance(value, str) else value
    where = f'"{KEY}" in --additional-config'
    if not isinstance(fields, dict):
        raise HeadwiseError(f"{where} must be a path or an object, got {shorten(value)}")
    try:
        return Options.model_validate(fields)
    except ValidationError as error:
        raise HeadwiseError(f"{where}: {explain(error)}") from None
