"""A search for one section of an artifact: model, held-out prompts, resume file, and writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, load_pair, update
from artifacts.analysis.sections import check_measured, with_seen
from artifacts.files import check_writable
from profiling.evaluation.intervals import paired_difference
from profiling.ledger import Ledger
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import Seen, held_out
from profiling.prompts.prompt import Prompt, Task
from runtime.fingerprint import check

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class SectionSearch:
    """A search for a section of the artifact in `file`, which is written to `out`.

    Attributes:
        seen: windows of the prompts so far.
    """

    command: str
    file: Path
    out: Path
    artifact: Artifact
    loaded: LoadedModel
    seen: Seen

    @classmethod
    def begin(
        cls, command: str, file: Path, out: Path, model: str, *, dtype: str, device: str
    ) -> SectionSearch:
        """Load artifact and model.

        Raises:
            HeadwiseError: one of them cannot be read, they do not go together, or `out` cannot be
                written.
        """
        check_writable(out)
        artifact, arrays = load_pair(file)
        loaded = load_model(model, dtype=dtype, device=device)
        check(artifact.model, loaded.model)
        return cls(
            command=command,
            file=file,
            out=out,
            artifact=artifact,
            loaded=loaded,
            seen=Seen.by([arrays]),
        )

    def held_out(
        self, lengths: Mapping[Task, int], number: int, *, samples: int, seed: int
    ) -> dict[Task, list[Prompt]]:
        """Prompts of each task that no search has seen; sets of other numbers differ.

        Args:
            lengths: in tokens, by task.
            number: of the set.
            samples: prompts of each task.
            seed: of the prompts.

        Raises:
            HeadwiseError: a text is too short for that.
        """
        own: dict[str, Any] = {
            "samples": samples,
            "seed": seed,
            "seen": self.seen,
            "number": number,
        }
        tokenizer = self.loaded.tokenizer
        prompts = {
            task: held_out([task], tokenizer, length=length, **own)
            for task, length in lengths.items()
        }
        self.seen.add(*chain.from_iterable(prompts.values()))
        return prompts

    def ledger(self, measured: Any, *, fresh: bool) -> Ledger:
        """Open the resume file, with the settings that measurements depend on.

        The rules of the choice are not among these, so that a run with other rules reuses it.
        """
        names = (
            name
            for name in ("length", "steps", "seed", "dtype", "device")
            if hasattr(measured, name)
        )
        about = {name: getattr(measured, name) for name in names}
        identity = identity_of(self.loaded.model, self.artifact.model.name)
        return Ledger(self.out, self.command, identity, settings=about, fresh=fresh)

    def write(
        self, change: Callable[[Artifact], Artifact], arrays: Mapping[str, np.ndarray]
    ) -> Artifact:
        """Change the section in the artifact as it is by now, add arrays and windows, and write it.

        Raises:
            HeadwiseError: it is by now of another model than the one that was measured.
        """
        own = {name: array.astype(np.float32) for name, array in arrays.items()}

        def changed(
            now: Artifact, former: Mapping[str, Array]
        ) -> tuple[Artifact, dict[str, Array]]:
            # Measuring took a while, and other commands write into the same file.
            # What was measured is the model's, with any patterns.
            if now.model != self.artifact.model or now.model.weights_sha256 is None:
                check_measured(now, self.artifact, self.file)
            return with_seen(change(now), {**former, **own}, self.seen.digests)

        return update(self.file, changed, out=self.out)


def beyond_chance(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """True if errors of the same units are less beyond chance; never of one unit alone.

    Student's interval of the mean logarithm of their ratio, at 95%.
    """
    logs = [np.log(np.maximum(errors, 1e-30)).tolist() for errors in (ours, theirs)]
    return len(ours) > 1 and paired_difference(*logs).high < 0
