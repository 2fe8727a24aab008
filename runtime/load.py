"""Load an artifact, ready to be applied to a model. Imports neither torch nor transformers."""

from __future__ import annotations

import logging
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING

import artifacts
from artifacts.errors import HeadwiseError, one_line

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache

    from runtime.apply import Handle

_log = logging.getLogger("headwise")


def load(
    path: str | PathLike[str],
    *,
    point: str | None = None,
    verify: str | PathLike[str] | None = None,
) -> LoadedArtifact:
    """Load an artifact; with `point`, at a point of its front.

    Warns once if no gate has proven its patterns.

    Args:
        path: the YAML file.
        point: "lost=0.02" for at most 2% of the correct answers lost: of these points the fastest.
            "speedup=1.5" for at least 1.5 times the speed of dense attention (attention alone,
            predicted at the front's length): of these points the one nearest to dense. "kl=0.01"
            for at most 0.01 nats a token from dense, "recall=0.95" for at least 0.95 of the
            attention mass: of these points the fastest.
        verify: the PEM file of a public key: an artifact that its holder did not sign is refused.

    Raises:
        ArtifactError: the file or its sidecar is missing, damaged, or of a newer schema; it is not
            signed by the key.
        HeadwiseError: `point` cannot be parsed, no point meets it (the line has the ranges), or
            there is no front; `verify` is no public key.
    """
    artifact = artifacts.load(path, verify=verify)
    shown = one_line(str(path))
    if point is not None:
        try:
            artifact = artifact.at_point(point)
        except HeadwiseError as error:
            raise HeadwiseError(f"{shown}: {error}") from None
        shown += f" at {one_line(point)}"
    verdict = artifact.evidence.verdict
    sparse = any(pattern.kind != "dense" for pattern in artifact.patterns.values())
    if sparse and (verdict is None or not verdict.proven):
        _warn_once(f"{shown} is {artifact.evidence.proof}")
    return LoadedArtifact(artifact)


@cache
def _warn_once(line: str) -> None:
    _log.warning("%s", line)


class LoadedArtifact:
    """An artifact that can be applied to its model, any number of times."""

    def __init__(self, artifact: artifacts.Artifact) -> None:
        """Hold an artifact."""
        self.artifact = artifact

    def apply(
        self,
        model: nn.Module,
        *,
        strict: bool = False,
        check_weights: bool = True,
        backend: str = "auto",
        dense_kernels: bool = True,
        check_fingerprint: bool = False,
    ) -> Handle:
        """Serve the model's prefill with the artifact's patterns until the handle is undone.

        Args:
            model: the transformers model that the artifact was made for.
            strict: raise HeadwiseError where a prefill cannot be sparse, instead of serving it
                densely.
            check_weights: compare a sample of the weights too, not only the configuration.
            backend: the kernel; "auto" takes the fastest that serves the call, and dense attention
                where none is fast.
            dense_kernels: serve dense calls by Headwise's kernels where they are faster than sdpa.
                On a CPU prefills on 1,024 keys or more ("dense by kernel" in stats()), and decode
                over every key in half precision or on 256 keys or more ("decode by kernel"); on
                every device layers that slide, which compute their window and no mask ("window by
                kernel"), and soft-caps and sinks, which sdpa has not.
            check_fingerprint: refuse an artifact without a fingerprint of its model, such as an
                import; otherwise it is applied with a warning, to any model of its shape.

        Returns:
            The handle: leaving it as a context manager, or its undo(), restores the model.

        Raises:
            HeadwiseError: the model is another one (the first field that differs is named), does
                not go through transformers' attention interface, or has an artifact applied
                already; an option is unknown.
        """
        from runtime.apply import attach
        from runtime.attention.layer import Settings

        if unknown := self.artifact.model.unknown:
            name = one_line(self.artifact.model.name)
            line = (
                f"the artifact for {name} has no fingerprint ({', '.join(unknown)} "
                f"open): any model of its shape passes"
            )
            if check_fingerprint:
                raise HeadwiseError(f"{line}; headwise gate --out fills it in")
            _log.warning("%s", line)
        # The reference is slower than dense attention.
        by_kernel = dense_kernels and backend != "reference"
        settings = Settings(
            dense_below=self.artifact.prefill.dense_below,
            dense_by="auto" if by_kernel else "model",
            strict=strict,
            backend=backend,
            evidence=self.artifact.evidence,
        )
        return attach(model, settings, self.artifact, check_weights=check_weights)

    def new_cache(self, model: nn.Module, *, offload: str = "auto") -> Cache:
        """Make an empty cache for the model's `past_key_values`, by the artifact's sections.

        A new token costs its own bytes in it, not a copy of all before; it grows, crops and
        reorders as transformers' own does. Layers under a policy of kv_cache drop tokens and free
        their memory; so do, with that section, layers that slide over a window (a rolling buffer).
        A decode section needs such a cache: with any other, decode is dense.

        Args:
            model: the model whose cache it is; before the cache is used the artifact has to be
                applied to it.
            offload: of a decode section: "packed" keeps keys and values of sparse layers in CPU
                memory and fetches selected tokens; "never" keeps all on the device; "auto" is
                "packed" for layers on a GPU and "never" for others.

        Raises:
            HeadwiseError: the model is of another kind; a policy cannot serve one of its layers;
                offload is unknown.
        """
        from runtime.caches.make import make_cache

        return make_cache(self.artifact, model, offload)
