"""The artifact: a YAML and a safetensors file that say which attention pattern each head can live with.

Data only: imports neither torch nor, until arrays are read or written, numpy.
"""

from artifacts.costs import DeviceCosts
from artifacts.decode import Decode, OmniKV, Similarity
from artifacts.errors import ArtifactError, HeadwiseError
from artifacts.front import Front, Point, at_target
from artifacts.growth import Growth, grown
from artifacts.imported import Imported
from artifacts.kv_cache import H2O, Full, KVCache, SnapKV, Streaming
from artifacts.patterns import (
    AShape,
    BlockSparse,
    Dense,
    Dilated,
    MemoryUnits,
    Pattern,
    Static,
    Strided,
    TriShape,
    VerticalSlash,
    pattern_name,
)
from artifacts.schema import (
    Artifact,
    Calibration,
    Measurement,
    ModelInfo,
    Prefill,
    SearchCost,
    SearchInfo,
    Sidecar,
    Summary,
)
from artifacts.store import load, load_arrays, load_pair, save, update

__all__ = [
    "H2O",
    "AShape",
    "Artifact",
    "ArtifactError",
    "BlockSparse",
    "Calibration",
    "Decode",
    "Dense",
    "DeviceCosts",
    "Dilated",
    "Front",
    "Full",
    "Growth",
    "HeadwiseError",
    "Imported",
    "KVCache",
    "Measurement",
    "MemoryUnits",
    "ModelInfo",
    "OmniKV",
    "Pattern",
    "Point",
    "Prefill",
    "SearchCost",
    "SearchInfo",
    "Sidecar",
    "Similarity",
    "SnapKV",
    "Static",
    "Streaming",
    "Strided",
    "Summary",
    "TriShape",
    "VerticalSlash",
    "at_target",
    "grown",
    "load",
    "load_arrays",
    "load_pair",
    "pattern_name",
    "save",
    "update",
]
