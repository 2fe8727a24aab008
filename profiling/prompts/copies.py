"""Which tokens of a text copy something far back: what a pattern drops shows there, whatever the rest of a text is."""

from __future__ import annotations

from profiling.prompts.tokens import Ids

# Tokens in a row before a token by which it is known to be a copy.
CONTEXT = 4
# From further back than this share of the text.
FAR = 4


def far_copies(ids: Ids, *, context: int = CONTEXT, far: int | None = None) -> list[int]:
    """Positions of tokens that continue a repetition: they and the `context` before them came before, and not lately.

    far: how many tokens the latest occurrence must at least be back; a quarter of the text if None.
    """
    least = len(ids) // FAR if far is None else far
    latest: dict[Ids, int] = {}
    found = []
    for at in range(context, len(ids)):
        piece = ids[at - context : at + 1]
        before = latest.get(piece)
        if before is not None and at - before >= least:
            found.append(at)
        latest[piece] = at
    return found
