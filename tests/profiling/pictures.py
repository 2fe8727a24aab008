"""What pictures are drawn from, and the texts that leave one."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiling.similarities.mass import ability
from profiling.similarities.similarity_profile import FORMAT, Profile


def random_profile(layers: int, *, sliding: bool = False) -> Profile:
    """A profile of two tasks; every sixth layer slides."""
    tasks = ("multi_hop:a.txt", "passkey")
    random = np.random.default_rng(0)
    left_out = np.arange(layers) % 6 == 5 if sliding else np.zeros(layers, dtype=bool)
    arrays: dict[str, np.ndarray] = {"agreement": np.ones((2, 2))}
    for task in tasks:
        mass = random.random((layers, layers))
        mass[left_out] = mass[:, left_out] = np.nan
        arrays[f"mass.{task}"] = mass
        by_head = np.tile(mass[:, :, None], (1, 1, 2))
        arrays |= {f"{kind}.{task}": by_head for kind in ("error", "worst")}
        arrays |= {f"ability.{task}.next{reach}": ability(mass, reach) for reach in (8, 16)}
        arrays[f"hit.{task}"] = np.where(left_out, np.nan, random.random(layers))
        missed = random.random((layers, 20))
        arrays[f"variability.{task}"] = np.where(left_out[:, None], np.nan, missed)
    about = {
        "format": FORMAT,
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


def texts_outside(figure: Any) -> list[str]:
    """Titles, labels and legends that leave the picture; tick labels are not checked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = list(figure.texts)
    legends = list(figure.legends)
    for axes in figure.axes:
        texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        legends += [axes.get_legend()] if axes.get_legend() else []
    texts += [text for legend in legends for text in legend.get_texts()]
    outside = []
    for text in texts:
        box = text.get_window_extent(renderer)
        x0, y0, x1, y1 = figure.bbox.extents
        if text.get_text() and not (
            x0 - 1 < box.x0 and box.x1 < x1 + 1 and y0 - 1 < box.y0 and box.y1 < y1 + 1
        ):
            outside.append(text.get_text())
    return outside
