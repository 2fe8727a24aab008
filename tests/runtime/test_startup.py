"""What serving imports: `import runtime` costs as much as what it brings along."""

from __future__ import annotations

import subprocess
import sys

ALLOWED = {
    "annotated_types",
    "artifacts",
    "pydantic",
    "pydantic_core",
    "runtime",
    "typing_extensions",
    "typing_inspection",
    "yaml",
}
CODE = """
import sys
before = set(sys.modules)
import runtime
try: runtime.load("missing.yaml")
except ValueError: pass
print(*(set(sys.modules) - before))
"""


def test_runtime_imports_and_loads_an_artifact_with_the_artifact_s_packages_alone():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    # Cython and the build of Python leave modules of their own.
    private = {name for name in packages if name.startswith("_") or name == "cython_runtime"}
    assert "runtime" in packages
    assert packages - private - sys.stdlib_module_names <= ALLOWED
