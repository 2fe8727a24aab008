"""Where a section comes from that was not searched here but taken over from another tool's file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from artifacts.patterns import Record, matching

Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, matching("[0-9a-f]{64}", "a SHA-256 of 64 lower-case hex digits")]


class Imported(Record):
    """The file that a section was converted from, and what its scores are.

    format: "minference" is MInference's list of head patterns, "sparse_attention_config" that of vLLM and SGLang,
        "duo_attention" DuoAttention's table of KV heads.
    file, sha256: its bare name and the hash of its bytes.
    scores: "recall" where the file's scores are shares of the attention kept, "other" where they are something else;
        None where it has none.
    """

    format: Literal["minference", "sparse_attention_config", "duo_attention"]
    file: Text
    sha256: Sha256
    scores: Literal["recall", "other"] | None = None
