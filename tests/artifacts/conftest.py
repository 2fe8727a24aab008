"""Artifacts to test with: small, with every kind of pattern, and a way to damage a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785

import artifacts
from artifacts.schema.validation import to_artifact
from artifacts.store import strict_yaml

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "v1.yaml"
SMALL = to_artifact(strict_yaml.parse((HERE / "small.yaml").read_text()))


def build(**changes: Any) -> artifacts.Artifact:
    """The small artifact with changed fields, and a summary that counts its rows."""
    fields = dict(SMALL) | changes
    if fields["search"] is not None:
        fields["search"] = counting(fields["search"], fields["prefill"].layers, fields["patterns"])
    return artifacts.Artifact(**fields)


def counting(search: artifacts.SearchInfo, rows: Any, patterns: Any) -> artifacts.SearchInfo:
    """The section with a summary that counts the heads of each kind in the rows."""
    winners = dict(Counter(patterns[name].kind for row in rows for name in row or ()))
    summary = search.summary.model_copy(update={"winners": winners})
    return search.model_copy(update={"summary": summary})


def as_yaml(fields: Any, **how: Any) -> str:
    """JSON data as YAML on one line, with floats that every reader of YAML takes for floats."""
    return re.sub(r"(?<![\w.\"])(-?[0-9]+)(e[-+][0-9]+)", r"\1.0\2", json.dumps(fields, **how))


def replace_field(fields: Any, path: str, *value: Any) -> None:
    """Replace the field at a path such as prefill/layers/0; without a value it is left out."""
    *folders, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in folders:
        fields = fields[key]
    if value:
        (fields[last],) = value
    else:
        del fields[last]


def hash_by_other_tools(fields: dict[str, Any]) -> str:
    """The content's hash as docs/artifact.md defines it, by rfc8785; takes the fields apart."""
    for name in ("content_sha256", "created_at"):
        fields.pop(name)
    if fields["search"] is not None:
        fields["search"].pop("command")
    if fields["sidecar"] is not None:
        fields["sidecar"].pop("file")
    for entry in fields["evidence"].get("measurements", ()):
        entry.pop("command")
    return hashlib.sha256(rfc8785.dumps(fields)).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def make_key(private: Path, public: Path, key: Any = None) -> None:
    """Write a key, one of P-256 by default, in PEM; skips the test without model-signing."""
    pytest.importorskip("model_signing", reason="signatures need model-signing")
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    key = key or ec.generate_private_key(ec.SECP256R1())
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    form = s.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, form))


def build_arrays() -> dict[str, np.ndarray]:
    recall = np.linspace(0.5, 1.0, 12, dtype=np.float32).reshape(3, 4)
    recall[1] = np.nan
    return {
        "chosen.recall": recall,
        "chosen.candidate": np.arange(12, dtype=np.int32).reshape(3, 4),
    }


def build_every_kind() -> tuple[artifacts.Artifact, dict[str, np.ndarray]]:
    """The golden artifact as before it was saved, with every kind of pattern, and its arrays."""
    artifact, arrays = artifacts.load_pair(GOLDEN)
    return artifact.model_copy(update={"sidecar": None, "content_sha256": ""}), dict(arrays)


@pytest.fixture
def every_kind() -> tuple[artifacts.Artifact, dict[str, np.ndarray]]:
    """See build_every_kind."""
    return build_every_kind()


@pytest.fixture
def make() -> Callable[..., artifacts.Artifact]:
    """make(field=value, ...) -> an artifact that was never saved."""
    return build


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return build_arrays()


@pytest.fixture
def saved(tmp_path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """The YAML file of a saved artifact with a sidecar."""
    path = tmp_path / "cfg.yaml"
    artifacts.save(build(), path, arrays)
    return path
