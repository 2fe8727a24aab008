"""Artifacts: YAML and safetensors files with an attention pattern for each head.

Data only: imports neither torch nor, until arrays are read or written, numpy.
"""

from artifacts.errors import ArtifactError, Finding, HeadwiseError
from artifacts.schema.artifact import Artifact, Prefill, Sidecar
from artifacts.schema.decode import Decode, OmniKV, Similarity
from artifacts.schema.evidence import Evidence, Measurement, PromptSet, TaskFigures, Verdict
from artifacts.schema.fields import Imported
from artifacts.schema.front import Front, Point
from artifacts.schema.kv_cache import H2O, Full, KVCache, SnapKV, Streaming
from artifacts.schema.model import ModelInfo
from artifacts.schema.patterns import (
    AShape,
    BlockSparse,
    Dense,
    Pattern,
    SkipSoftmax,
    VerticalSlash,
    grown,
    pattern_name,
)
from artifacts.schema.search import Calibration, SearchCost, SearchInfo, Summary
from artifacts.store.read import load, load_arrays, load_pair
from artifacts.store.windows import seen_windows, window_arrays
from artifacts.store.write import save, update

__all__ = [
    "H2O",
    "AShape",
    "Artifact",
    "ArtifactError",
    "BlockSparse",
    "Calibration",
    "Decode",
    "Dense",
    "Evidence",
    "Finding",
    "Front",
    "Full",
    "HeadwiseError",
    "Imported",
    "KVCache",
    "Measurement",
    "ModelInfo",
    "OmniKV",
    "Pattern",
    "Point",
    "Prefill",
    "PromptSet",
    "SearchCost",
    "SearchInfo",
    "Sidecar",
    "Similarity",
    "SkipSoftmax",
    "SnapKV",
    "Streaming",
    "Summary",
    "TaskFigures",
    "Verdict",
    "VerticalSlash",
    "grown",
    "load",
    "load_arrays",
    "load_pair",
    "pattern_name",
    "save",
    "seen_windows",
    "update",
    "window_arrays",
]
