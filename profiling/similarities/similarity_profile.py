"""The similarity profile: arrays of headwise similarity, and settings to repeat them.

Shapes: L layers of the model, G KV heads, T tasks, N steps. Arrays hold NaN for sliding-window
layers and layers without attention.

    mass.<task>  (L, L)  fraction of layer j's attention on layer i's top-k tokens
    error.<task>  (L, L, G)  change of a KV head's part of layer j's output when it sees those
                             tokens alone, squared and relative to the residual stream; i <= j
    worst.<task>  (L, L, G)  the same in the worst steps of the worst prompt
    ability.<task>.next8, ability.<task>.next16  (L)  mean attention of the next layers on a layer's
                                                      top-k tokens
    hit.<task>  (L)  fraction of the block with the answer that is in the layer's top-k tokens
    variability.<task>  (L, N)  attention missed when the prompt's top quarter is frozen
    agreement  (T, T)  correlation of mass.<task> between tasks
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from artifacts import HeadwiseError
from artifacts.errors import shorten
from artifacts.files import atomic_write
from profiling.values import csv_text

FILE = "similarity.safetensors"
FORMAT = 6


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """Arrays by the names above.

    Attributes:
        about: model, layers, tasks with their prompts' sha256, settings and versions.
    """

    arrays: dict[str, np.ndarray]
    about: dict[str, Any]

    @property
    def num_layers(self) -> int:
        """L, layers of the model."""
        return int(self.about["num_layers"])

    @property
    def layers(self) -> list[int]:
        """The layers that were measured: those that see every key."""
        return list(self.about["layers"])

    @property
    def sliding_layers(self) -> list[int]:
        """Layers that were left out: those with a sliding window."""
        return list(self.about["sliding_layers"])

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return [task["name"] for task in self.about["tasks"]]

    @property
    def agreement(self) -> np.ndarray:
        """(T, T) correlation of the tasks' similarities."""
        return self.arrays["agreement"]

    def mass(self, task: str | None = None) -> np.ndarray:
        """(L, L) similarity of one task, or its mean over all tasks."""
        return self._mean([f"mass.{name}" for name in (self.tasks if task is None else [task])])

    def error(self, task: str | None = None, worst: float = 0.0) -> np.ndarray:
        """(L, L, G) errors by KV head in one task, or their mean over all tasks; NaN for i after j.

        Args:
            task: name of the task; None for the mean over all tasks.
            worst: how much the worst steps count, of 1 in all.
        """
        if task is None:
            names = self.tasks
        else:
            names = [task]
        mean, tail = (
            self._mean([f"{kind}.{name}" for name in names]) for kind in ("error", "worst")
        )
        errors: np.ndarray = (1 - worst) * mean + worst * tail
        return errors

    def ability(self, task: str, reach: Literal[8, 16] = 8) -> np.ndarray:
        """(L) filtering ability over the next 8 or 16 layers."""
        return self.arrays[f"ability.{task}.next{reach}"]

    def hit(self, task: str) -> np.ndarray | None:
        """(L) hit rate; None for a task whose prompts do not say where their answer lies."""
        return self.arrays.get(f"hit.{task}")

    def variability(self, task: str) -> np.ndarray:
        """(L, N) attention missed."""
        return self.arrays[f"variability.{task}"]

    def _mean(self, names: list[str]) -> np.ndarray:
        mean: np.ndarray = np.mean([self.arrays[name] for name in names], axis=0)
        return mean


def save_profile(profile: Profile, folder: Path) -> list[Path]:
    """Write similarity.safetensors and a CSV for each array; return the paths."""
    from safetensors.numpy import save

    arrays = {
        name: np.ascontiguousarray(array, dtype=np.float32)
        for name, array in profile.arrays.items()
    }
    paths = [folder / FILE]
    atomic_write(paths[0], save(arrays, metadata={"headwise": json.dumps(profile.about)}))
    for name, array in arrays.items():
        paths.append(folder / f"{file_name(name)}.csv")
        atomic_write(paths[-1], _csv(profile, name, array).encode())
    return paths


def file_name(name: str) -> str:
    """An array's or a task's name as part of a file's name on any system."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _csv(profile: Profile, name: str, array: np.ndarray) -> str:
    """Make a CSV: a line for each layer (or task), empty where not measured."""
    kind = name.partition(".")[0]
    places = product(range(profile.num_layers), range(array.shape[-1]))
    by_head = [f"layer {layer} head {head}" for layer, head in places]
    columns = {
        "mass": [f"layer {at}" for at in range(profile.num_layers)],
        **dict.fromkeys(("error", "worst"), by_head),
        "variability": [f"step {at}" for at in range(array.shape[-1])],
        "agreement": profile.tasks,
    }.get(kind, [name])
    labels = profile.tasks if kind == "agreement" else range(profile.num_layers)
    rows = zip(labels, array.reshape(len(array), -1).astype(float).tolist(), strict=True)
    if kind == "agreement":
        first = "task"
    else:
        first = "layer"
    header = [first, *columns]
    return csv_text(header, ([label, *row] for label, row in rows))


def load_profile(path: str | Path) -> Profile:
    """Read a profile: the folder it was written to, or its safetensors file.

    Raises:
        HeadwiseError: there is none, or the file is damaged or of another sort.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if os.path.isdir(file):
        file = file / FILE
    shown = shorten(str(file), 200)
    if not os.path.isfile(file):
        raise HeadwiseError(
            f"there is no similarity profile {shown}: headwise similarity writes one"
        )
    try:
        with safe_open(file, framework="numpy") as stored:
            about = json.loads((stored.metadata() or {}).get("headwise", "null"))
            arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise HeadwiseError(f"{shown} is not a similarity profile: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise HeadwiseError(
            f"{shown} is not a similarity profile that this release reads: write it again with "
            f"headwise similarity"
        )
    profile = Profile(arrays=arrays, about=about)
    _check(profile, shown)
    return profile


def _check(profile: Profile, shown: str) -> None:
    n = profile.num_layers
    tasks = profile.tasks
    shapes: dict[str, tuple[int, ...]] = {"agreement": (len(tasks), len(tasks))}
    for task in tasks:
        shapes[f"mass.{task}"] = (n, n)
        shapes |= {
            f"{kind}.{task}": (n, n, int(profile.about["kv_heads"])) for kind in ("error", "worst")
        }
        shapes |= {f"ability.{task}.next{reach}": (n,) for reach in (8, 16)}
        shapes[f"variability.{task}"] = (n, int(profile.about["steps"]))
    for name, shape in shapes.items():
        array = profile.arrays.get(name)
        if array is None or array.shape != shape:
            if array is None:
                fault = "is missing"
            else:
                fault = f"has the shape {array.shape}"
            raise HeadwiseError(
                f"{shown}: {name} {fault}, it must have the shape {shape}: measure again"
            )
