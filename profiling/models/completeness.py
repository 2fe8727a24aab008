"""Loads weights by transformers, and refuses a checkpoint that is not the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from logging import LogRecord, getLogger
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import plural, shorten


def complete_model(*where: str, **options: Any) -> Any:
    """Load a causal language model whose checkpoint has all its weights, and no others.

    transformers draws missing weights at random, and drops those that it does not know. Tied
    weights, and those that a class declares as ignorable, count as neither.

    Args:
        where: folder or hub id.
        options: of transformers' from_pretrained.

    Raises:
        HeadwiseError: a weight is missing, unknown or of another shape.
    """
    from transformers import AutoModelForCausalLM

    with _without_table():
        # Weights of another shape are in the report then, with both shapes.
        model, report = AutoModelForCausalLM.from_pretrained(
            *where, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if report["missing_keys"]:
        raise HeadwiseError(f"{_listed(report['missing_keys'])} missing from its files")
    if report["unexpected_keys"]:
        raise HeadwiseError(
            f"{_listed(report['unexpected_keys'])} unknown to {type(model).__name__}, which would "
            "leave out what its files have"
        )
    if report["mismatched_keys"]:
        name, stored, own = min(report["mismatched_keys"])
        raise HeadwiseError(
            f"the weight {shorten(name, 120)} has shape {list(stored)} in its files, and "
            f"{list(own)} by its configuration"
        )
    return model


def _listed(names: Collection[str]) -> str:
    """Name the first weight, and say how many there are."""
    first = shorten(min(names), 120)
    if len(names) == 1:
        return f"the weight {first} is"
    return f"{plural(len(names), 'weight')} (first {first}) are"


@contextlib.contextmanager
def _without_table() -> Iterator[None]:
    """Keep transformers' table of such weights off stderr: the error has one line."""
    logger = getLogger("transformers.modeling_utils")

    def has_no_table(record: LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(has_no_table)
    try:
        yield
    finally:
        logger.removeFilter(has_no_table)
