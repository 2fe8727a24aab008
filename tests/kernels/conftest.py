"""Memory that is never handed out clean, and builders with native code and without."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.recording import BUILDERS, served_by


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Have torch.empty return NaN (or the largest integer), which reveals unwritten elements."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3, dtype=torch.bfloat16).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """One thread: thousands of small torch calls wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "torch"])
def builder(request):
    """Builders with their native code, where this machine has it, and in plain torch."""
    if request.param == "native":
        yield
        return
    with served_by("reference", ops=BUILDERS):
        yield
