"""Similarity profiles of random numbers."""

from __future__ import annotations

import numpy as np

from profiling.similarities.mass import ability
from profiling.similarities.similarity_profile import Profile


def random_profile(layers: int, *, sliding: bool = False) -> Profile:
    """A profile of two tasks; every sixth layer slides."""
    tasks = ("multi_hop:a.txt", "passkey")
    random = np.random.default_rng(0)
    left_out = np.arange(layers) % 6 == 5 if sliding else np.zeros(layers, dtype=bool)
    arrays: dict[str, np.ndarray] = {"agreement": np.ones((2, 2))}
    for task in tasks:
        mass = random.random((layers, layers))
        mass[left_out] = mass[:, left_out] = np.nan
        arrays |= {f"mass.{task}.{by}": mass for by in ("max", "mean")}
        by_head = np.tile(mass[:, :, None], (1, 1, 2))
        arrays |= {f"{kind}.{task}": by_head for kind in ("error", "worst")}
        arrays |= {f"ability.{task}.next{reach}": ability(mass, reach) for reach in (8, 16)}
        arrays[f"hit.{task}"] = np.where(left_out, np.nan, random.random(layers))
        missed = random.random((layers, 20))
        arrays[f"variability.{task}"] = np.where(left_out[:, None], np.nan, missed)
    about = {
        "format": 5,
        "kv_heads": 2,
        "model": "some-model",
        "num_layers": layers,
        "command": "headwise similarity --x",
        "layers": np.flatnonzero(~left_out).tolist(),
        "sliding_layers": np.flatnonzero(left_out).tolist(),
        "tasks": [{"name": task, "sha256": "0123456789" * 6} for task in tasks],
        "weights_sha256": "f" * 64,
        "length": 4096,
        "samples": 2,
        "steps": 20,
        "top_k": 512,
        "dtype": "bfloat16",
        "device": "cpu",
    }
    return Profile(arrays=arrays, about=about)
