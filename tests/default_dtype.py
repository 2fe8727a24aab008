"""torch's default dtype, for a test that everything is the same under another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

OTHERS = (torch.bfloat16, torch.float64)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.set_default_dtype for a while."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
