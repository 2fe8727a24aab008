"""The check of interpreted kernels' memory finds its faults; every case runs under it."""

from __future__ import annotations

import pytest

from tests.processes import interpret


@pytest.mark.slow
def test_each_fault_of_memory_is_found() -> None:
    found = interpret("tests.conformance.interpreter_cases")
    assert found["right"] == ""
    assert "reads_beyond: program 2 reads outside of the call's tensors" in found["reads_beyond"]
    assert "writes_before: program 0 writes outside of the call's tensors" in found["writes_before"]
    assert "writes_twice: programs 0 and 1 write the same element" in found["writes_twice"]
    assert "reads what program" in found["reads_another_s"]
