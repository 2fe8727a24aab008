"""The artifact: a YAML and a safetensors file that say which attention pattern each head can live with.

Data only: imports neither torch nor, until arrays are read or written, numpy.
"""

from artifacts.errors import ArtifactError, HeadwiseError
from artifacts.patterns import AShape, BlockSparse, Dense, Pattern, VerticalSlash, pattern_name
from artifacts.schema import (
    Artifact,
    Calibration,
    Measurement,
    ModelInfo,
    Prefill,
    SearchInfo,
    Sidecar,
    Summary,
)
from artifacts.store import load, load_arrays, save

__all__ = [
    "AShape",
    "Artifact",
    "ArtifactError",
    "BlockSparse",
    "Calibration",
    "Dense",
    "HeadwiseError",
    "Measurement",
    "ModelInfo",
    "Pattern",
    "Prefill",
    "SearchInfo",
    "Sidecar",
    "Summary",
    "VerticalSlash",
    "load",
    "load_arrays",
    "pattern_name",
    "save",
]
