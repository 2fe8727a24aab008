"""Dense attention by the faster of sdpa and our kernel: right by either, measured once, and kept."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from artifacts import HeadwiseError
from kernels import dispatch
from runtime import Headwise, apply_dense, dense, measured
from tests.runtime.omnikv import CLOSE

BY_KERNEL = "dense by kernel"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is known yet, and what is found out goes to a folder of the test's own."""
    monkeypatch.setattr(measured, "folder", lambda: tmp_path / "cache" / "dense")
    monkeypatch.setattr(dense, "_known", {})
    yield tmp_path / "cache" / "dense"


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """faster(by) -> what every measurement finds from now on."""

    def faster(by: str, right: bool = True) -> None:
        found = dense.Measured(by=by, right=right, kernel_s=1.0, sdpa_s=2.0)
        monkeypatch.setattr(dense, "_measure", lambda *_: found)

    return faster


def made(q_len: int, k_len: int, dtype: torch.dtype = torch.float32, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(1, heads, q_len, 64, dtype=dtype),
        torch.randn(1, 2, k_len, 64, dtype=dtype),
        torch.randn(1, 2, k_len, 32, dtype=dtype),
    )


@pytest.mark.parametrize("by", ["kernel", "sdpa", "auto"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 200), (1000, 1000), (64, 1100), (300, 1500)])
@pytest.mark.parametrize("window", [None, 100])
def test_either_is_the_reference(window: int | None, q_len: int, k_len: int, by: str) -> None:
    q, k, v = made(q_len, k_len)
    found = dense.dense_attention(q, k, v, scale=0.2, window=window, by=by)
    expected = dense.every_key(q, k, v, scale=0.2, window=window, backend="reference")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_soft_cap_is_the_kernel_s() -> None:
    q, k, v = made(100, 100)
    expected = dense.every_key(q, k, v, softcap=2.0, backend="reference")
    torch.testing.assert_close(dense.dense_attention(q, k, v, softcap=2.0), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="soft-cap"):
        dense.dense_attention(q, k, v, softcap=2.0, by="sdpa")
    with pytest.raises(ValueError, match="got 'fast'"):
        dense.dense_attention(q, k, v, by="fast")


def test_a_measurement_is_kept_for_this_user_alone_and_read_back(folder: Path, monkeypatch: Any) -> None:
    q, k, v = made(1024, 1024)
    by = dense.faster(q, k, v)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = json.loads(file.read_text())
    assert kept["by"] == by
    assert kept["right"] is True
    assert kept["kernel_s"] > 0 < kept["sdpa_s"]
    monkeypatch.setattr(dense, "_known", {})
    monkeypatch.setattr(dense, "_measure", lambda *_: pytest.fail("measured twice"))
    assert dense.faster(q, k, v) == by
    # A batch of other sizes of the same class is no new question.
    assert dense.faster(*made(1500, 1500, heads=4)) == by


@pytest.mark.parametrize(
    "name", ["dense.py", "index.py", "decode/cpu.cpp", "native/build.py", "native/vectors.h", "attention/triton.py"]
)
def test_another_kernel_is_measured_again(name: str, tmp_path: Path) -> None:
    """Whatever of it changed, flags included: what was measured of the former one says nothing."""
    copy = shutil.copytree(Path(dispatch.__file__).parent, tmp_path / "kernels", ignore=shutil.ignore_patterns("__py*"))
    former = measured.sources_of(copy)
    assert measured.sources_of(Path(dispatch.__file__).parent) == former
    with (copy / name).open("a") as file:
        file.write(" ")
    measured.sources_of.cache_clear()
    assert measured.sources_of(copy) != former


def test_another_triton_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    former = measured.file_of(here, "x")
    assert measured.file_of(here, "x") == former
    with monkeypatch.context() as changed:
        changed.setattr(measured, "version", lambda name: "99.0")
        measured.triton.cache_clear()
        assert measured.file_of(here, "x") != former
    measured.triton.cache_clear()
    assert measured.file_of(here, "x") == former


def test_a_file_that_says_nothing_is_measured_again(folder: Path, monkeypatch: Any, faster: Any) -> None:
    faster("kernel")
    assert dense.faster(*made(1024, 1024)) == "kernel"
    (file,) = folder.iterdir()
    for text in ("", "{}", '{"by": "magic", "right": true, "kernel_s": 1, "sdpa_s": 1}', "[1"):
        file.write_text(text)
        monkeypatch.setattr(dense, "_known", {})
        assert dense.faster(*made(1024, 1024)) == "kernel"
        assert json.loads(file.read_text())["by"] == "kernel"


def test_a_folder_that_cannot_be_written_costs_no_more_than_a_measurement(monkeypatch: Any, faster: Any) -> None:
    faster("kernel")
    monkeypatch.setattr(measured, "folder", lambda: Path("/proc/nothing"))
    assert dense.faster(*made(1024, 1024)) == "kernel"


def test_a_kernel_that_fails_or_is_wrong_serves_nothing(monkeypatch: Any, folder: Path) -> None:
    real = dense.every_key

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(dense, "every_key", fails)
    assert dense.faster(*made(1024, 1024)) == "sdpa"
    # It may be a passing fault: nothing is kept.
    assert not folder.exists()

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) + (0.0 if kwargs.get("backend") == "reference" else 1.0)

    monkeypatch.setattr(dense, "_known", {})
    monkeypatch.setattr(dense, "every_key", wrong)
    assert dense.faster(*made(1024, 1024)) == "sdpa"
    assert not json.loads(next(folder.iterdir()).read_text())["right"]


def test_short_calls_are_not_measured(monkeypatch: Any) -> None:
    monkeypatch.setattr(dense, "_measure", lambda *_: pytest.fail("measured"))
    assert dense.faster(*made(1023, 1023)) == "sdpa"


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3", "GPTNeoX"])
def test_prefills_go_through_the_faster(family: str, build: Any, artifact_for: Any, ids: Any, faster: Any) -> None:
    model, prompt = build(family), ids(1024)
    rows = [None] * model.config.num_hidden_layers
    expected = model(prompt).logits
    full = sum(kind == "full_attention" for kind in getattr(model.config, "layer_types", ["full_attention"] * 2))
    for by, count in (("kernel", full), ("sdpa", 0)):
        faster(by)
        dense._known.clear()
        for file in measured.folder().glob("*"):
            file.unlink()
        with Headwise(artifact_for(model, rows=rows)).apply(model) as handle:
            torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
            assert handle.stats()["dense"].get(BY_KERNEL, 0) == count


@pytest.mark.parametrize("left", [True, False])
def test_padded_batches_and_chunks(left: bool, build: Any, ids: Any) -> None:
    model, prompt = build(), ids(300, batch=3)
    real = torch.ones_like(prompt)
    real[0, slice(0, 250) if left else slice(50, None)] = 0
    real[2, slice(0, 7) if left else slice(293, None)] = 0
    given = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}

    def run() -> Tensor:
        cache = DynamicCache(config=model.config)
        parts = [
            model(
                prompt[:, a:b],
                attention_mask=real[:, :b],
                position_ids=given["position_ids"][:, a:b],
                past_key_values=cache,
            ).logits
            for a, b in ((0, 170), (170, 230), (230, 300))
        ]
        return torch.cat(parts, dim=1)

    expected, whole = run(), model(prompt, **given).logits
    with apply_dense(model) as applied:
        torch.testing.assert_close(run()[real.bool()], expected[real.bool()], **CLOSE)
        torch.testing.assert_close(model(prompt, **given).logits[real.bool()], whole[real.bool()], **CLOSE)
        assert applied.settings.calls.total()[BY_KERNEL] == 8
    assert torch.equal(run(), expected)


def test_a_whole_model_densely_by_our_kernel_needs_no_artifact(build: Any, ids: Any) -> None:
    model, prompt = build(), ids(100)
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    former = model.config._attn_implementation
    with apply_dense(model) as applied:
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
        assert applied.stats()["dense"][BY_KERNEL] == 2 and set(applied.stats()) == {"dense"}
        with pytest.raises(HeadwiseError, match="applied already"):
            apply_dense(model)
        cache = applied.new_cache()
        assert torch.equal(model.generate(prompt, past_key_values=cache, max_new_tokens=5, do_sample=False), expected)
        assert {type(layer).__name__ for layer in cache.layers} == {"GrowingLayer"}
    assert model.config._attn_implementation == former
    with apply_dense(model, by="model") as applied:
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
        assert BY_KERNEL not in applied.settings.calls.total()
    with pytest.raises(HeadwiseError, match="by must be one of"):
        apply_dense(model, by="magic")


def test_dense_kernels_false_leaves_all_to_the_model(build: Any, artifact_for: Any, ids: Any, faster: Any) -> None:
    faster("kernel")
    model, prompt = build(), ids(1024)
    expected = model(prompt).logits
    with Headwise(artifact_for(model, rows=[None, None])).apply(model, dense_kernels=False) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["dense"] == {"layer left alone": 2}


def test_windows_wait_until_a_device_has_passed_its_check(build: Any, artifact_for: Any, ids: Any, faster: Any) -> None:
    """A GPU whose kernels nobody has run yet, here one that computes nothing, leaves layers that slide to the model."""
    q, k, v = (x.to("meta") for x in made(300, 300))
    assert not dense.right(q, k, v)
    assert dense.right(*made(300, 300))
    dense._known.clear()
    faster("sdpa", right=True)
    assert dense.right(q, k, v)
    for file in measured.folder().glob("*"):
        file.unlink()
    dense._known.clear()
    faster("sdpa", right=False)
    assert not dense.right(q, k, v)


def test_layers_that_slide_are_the_model_s_where_the_check_failed(
    build: Any, artifact_for: Any, ids: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("runtime.attention.own.right", lambda *_: False)
    model, prompt = build("Gemma3"), ids(200)
    expected = model(prompt).logits
    with Headwise(artifact_for(model, rows=[None] * 3)).apply(model) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert handle.stats()["dense"] == {"layer left alone": 3}
