"""Modules broken by hand, a line each: the tests named beside the line must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("artifacts", "headwise", "kernels", "profiling", "runtime", "search", "tests")
# Of each package: module, its text, the broken text, and the tests that must notice.
MUTATIONS = {
    "artifacts": [
        (
            "store/hashing.py",
            '"created_at")',
            ")",
            "artifacts/test_hashing.py artifacts/test_store.py",
        ),
        (
            "store/hashing.py",
            "if 0 < point <= 21:",
            "if 0 < point < 21:",
            "artifacts/test_hashing.py",
        ),
        (
            "store/hashing.py",
            "if -6 < point <= 0:",
            "if -5 < point <= 0:",
            "artifacts/test_hashing.py",
        ),
        ("store/hashing.py", '"utf-16-be"', '"utf-8"', "artifacts/test_hashing.py"),
        (
            "store/pair.py",
            "if old is not None and old != new:",
            "if old is not None:",
            "artifacts/test_store.py",
        ),
        ("store/pair.py", "    _clear_unfinished(path)\n", "", "artifacts/test_writers.py"),
        ("store/pair.py", "re.escape(path.stem)", "path.stem", "artifacts/test_writers.py"),
        (
            "store/pair.py",
            ".{target.stem}.lock",
            ".{target.name}.lock",
            "artifacts/test_writers.py",
        ),
        ("store/read.py", "        _check_content(fields)\n", "", "artifacts/test_fuzz.py"),
        ("schema/front.py", "b.cost <= a.cost", "b.cost < a.cost", "artifacts/test_refusals.py"),
        (
            "schema/validation.py",
            "plain = all(",
            "plain = True or all(",
            "artifacts/test_refusals.py",
        ),
        ("cli/options.py", "not within[0](value)", "False", "artifacts/test_arguments.py"),
        (
            "store/sidecar.py",
            "if read != entry.nbytes or not self._unchanged():",
            "if read != entry.nbytes:",
            "artifacts/test_store.py",
        ),
        (
            "store/strict_yaml.py",
            "if key.value in result:",
            "if False:",
            "artifacts/test_strict_yaml.py",
        ),
        (
            "store/strict_yaml.py",
            "            depth -= 1\n",
            "            depth -= 0\n",
            "artifacts/test_strict_yaml.py",
        ),
        (
            "store/strict_yaml.py",
            "abs(int(text)) <= 2**53",
            "abs(int(text)) <= 2**54",
            "artifacts/test_strict_yaml.py",
        ),
        (
            "schema/growth.py",
            "ratio = -(-length // TILE)",
            "ratio = (length // TILE)",
            "test_kinds.py",
        ),
        ("schema/growth.py", "max(1, min(round(", "max(0, min(round(", "test_kinds.py"),
        (
            "analysis/density.py",
            "return (whole + computed) / causal",
            "return computed / causal",
            "test_density.py",
        ),
        (
            "analysis/density.py",
            "bisect_left(own, behind)",
            "bisect_left(own, behind + 1)",
            "test_density.py",
        ),
        (
            "analysis/merging.py",
            "        model = _one_model(model, part, prefill)\n",
            "",
            "artifacts/test_merging.py",
        ),
        (
            "analysis/merging.py",
            'if section_of(name) == "prefill"',
            "if True",
            "artifacts/test_merging.py",
        ),
        (
            "interop/write_heads.py",
            "exact += not changes",
            "exact += 1",
            "conformance/test_formats.py",
        ),
        (
            "interop/read_heads.py",
            "exact += head in listed and",
            "exact +=",
            "conformance/test_formats.py",
        ),
        (
            "interop/modelopt.py",
            "exact = len(dense) * model.num_heads",
            "exact = len(dense)",
            "conformance/test_formats.py",
        ),
        (
            "commands/convert.py",
            "lost = config.strict and report.lossy",
            "lost = False",
            "conformance/test_formats.py",
        ),
        ("cli/command.py", "code = error.status", "code = 1", "conformance/test_commands.py"),
        (
            "interop/duo_attention.py",
            "math.ceil(sparsity * (len(values) - 1))",
            "round(sparsity * len(values))",
            "artifacts/test_kv_heads.py",
        ),
        (
            "interop/duo_attention.py",
            '["recent_size"] + 1)',
            '["recent_size"])',
            "artifacts/test_kv_heads.py",
        ),
    ],
    "runtime": [
        (
            "attention/function.py",
            "alone.mask = causal_mask(alone.query, alone.key)",
            "pass",
            "runtime/test_architectures.py",
        ),
        (
            "attention/function.py",
            '"softcap": call.softcap, "sinks": call.sinks}\n    out: Tensor = launch',
            '"softcap": None, "sinks": call.sinks}\n    out: Tensor = launch',
            "runtime/test_architectures.py",
        ),
        (
            "attention/function.py",
            "index = plan.build(q, k, scale=call.scale, ragged=ragged)",
            "index = plan.build(q, k, ragged=ragged)",
            "runtime/test_architectures.py",
        ),
        (
            "attention/function.py",
            "if heads != layer.planned_heads:",
            "if False:",
            "runtime/test_fallbacks.py",
        ),
        (
            "attention/layout.py",
            "if not alike or parts[0].q_len != self.q_len:",
            "if False:",
            "runtime/test_architectures.py",
        ),
        (
            "attention/layout.py",
            "part.k_len >= dense_below and",
            "part.k_len > 0 and",
            "runtime/test_architectures.py",
        ),
        (
            "attention/mask.py",
            "    return _same(mask_function, sliding_window_causal_mask_function(window))",
            "    return True",
            "runtime/test_masks.py",
        ),
        (
            "attention/mask.py",
            "        return mask_function is causal_mask_function",
            "        return True",
            "runtime/test_masks.py",
        ),
        ("vllm/step.py", "    slots = slots.clamp_min(0)\n", "", "runtime/vllm/test_steps.py"),
        (
            "vllm/forward.py",
            "query.to(output.dtype) * layer._q_scale_float",
            "query.to(output.dtype)",
            "runtime/vllm/test_steps.py",
        ),
        (
            "vllm/forward.py",
            "if whole and step.own is not None:",
            "if step.own is not None:",
            "runtime/vllm/test_steps.py",
        ),
        (
            "vllm/batch.py",
            "return 0 < self.prompt < self.k_len",
            "return 0 < self.prompt <= self.k_len",
            "runtime/vllm/test_snapkv.py",
        ),
        (
            "vllm/batch.py",
            "each.q_len >= MIN_QUERIES or each.request not in drafts",
            "True",
            "runtime/vllm/test_steps.py",
        ),
        (
            "vllm/keep.py",
            "seen = first <= positions[:, None] - window",
            "seen = first < positions[:, None] - window",
            "runtime/vllm/test_steps.py",
        ),
        (
            "vllm/keep.py",
            "            del self._begun[next(iter(self._begun))]",
            "            pass",
            "runtime/vllm/test_snapkv.py",
        ),
        (
            "vllm/filters.py",
            "groups_of(single, table, common.seq_lens, captured=captured)",
            "groups_of(single, table, captured=captured)",
            "runtime/vllm/test_graphs.py",
        ),
        (
            "vllm/check.py",
            "        if section.prefill_ratio is not None:",
            "        if False:",
            "runtime/vllm/test_check.py",
        ),
        (
            "attention/function.py",
            "    elif mask.shape[-1] != k_len:",
            "    elif False:",
            "runtime/test_dense.py",
        ),
        (
            "attention/function.py",
            "    if k_len < _MIN_KEYS_FLOAT32 and",
            "    if False and",
            "runtime/test_dense.py",
        ),
        (
            "attention/evicting.py",
            "enough_queries(q.shape[2], k_len, dense_tail)",
            "q.shape[2] >= 64",
            "runtime/caches/test_layer.py",
        ),
        (
            "omnikv/bank.py",
            "            self._held.masked_fill_(self._held >= length, _EMPTY)",
            "            pass",
            "runtime/test_decode.py",
        ),
        (
            "omnikv/bank.py",
            "        self.lane.arrived()\n        staged",
            "        staged",
            "runtime/test_decode.py",
        ),
        (
            "omnikv/bank.py",
            "    missing.scatter_(1, torch.where(stays, at, chosen.shape[1]), False)\n",
            "",
            "runtime/test_offload.py",
        ),
        ("omnikv/chunks.py", "max(min(most, past - first), 0)", "most", "runtime/test_decode.py"),
        (
            "omnikv/select.py",
            "_DECAY ** torch.arange(rows.shape[1] - 1, -1, -1",
            "_DECAY ** torch.arange(0, rows.shape[1], 1",
            "runtime/test_decode.py",
        ),
        ("attention/state.py", "if self.dropout:", "if False:", "runtime/test_fallbacks.py"),
        (
            "caches/window.py",
            "token - (self.sinks + self.window - 1)",
            "token - (self.sinks + self.window)",
            "conformance/test_cache_policies.py",
        ),
        (
            "caches/window.py",
            "(begin - self.sinks) % self.window",
            "begin % self.window",
            "conformance/test_cache_policies.py",
        ),
        (
            "caches/h2o.py",
            "latest = self.seen - tokens",
            "latest = self.seen + 1 - tokens",
            "conformance/test_cache_policies.py",
        ),
        (
            "caches/h2o.py",
            "scores += result.scores",
            "scores[:] = result.scores",
            "conformance/test_cache_policies.py",
        ),
        (
            "caches/h2o.py",
            "self.seen if self.record.normalised else None",
            "None",
            "conformance/test_cache_policies.py",
        ),
        (
            "caches/h2o.py",
            'if self.record.eviction == "greedy"',
            "if False",
            "conformance/test_cache_policies.py",
        ),
        ("caches/h2o.py", "self.settled = self.seen", "pass", "conformance/test_cache_policies.py"),
        (
            "caches/snapkv.py",
            "earlier, earlier + window",
            "earlier - 1, earlier + window - 1",
            "conformance/test_cache_policies.py",
        ),
        (
            "caches/policy.py",
            "        self.kept -= self.seen - length\n",
            "",
            "conformance/test_cache_policies.py",
        ),
        (
            "caches/policy.py",
            "tensor.index_select(0, rows.to(tensor.device))",
            "tensor",
            "conformance/test_cache_policies.py",
        ),
    ],
    "search": [
        (
            "model/hulls.py",
            "        elif not price:",
            "        else:",
            "search/model/test_hulls.py",
        ),
        (
            "model/hulls.py",
            "    return bool(losses[amid] > on_it + rounding)",
            "    return bool(losses[amid] > on_it)",
            "search/model/test_hulls.py",
        ),
        (
            "model/hulls.py",
            "if step <= left + _ROUNDING * total:",
            "if step <= left * 1.2:",
            "search/model/test_hulls.py",
        ),
        (
            "model/hulls.py",
            "price = -steepness",
            "price = -steepness * 1.01",
            "search/model/test_hulls.py",
        ),
        (
            "model/limits.py",
            "faults = [(times, text) for times, text in self._measured(tasks) if not times <= 1]",
            "faults = [(times, text) for times, text in self._measured(tasks) if times > 1]",
            "search/model/test_gate_limits.py",
        ),
        (
            "model/limits.py",
            "task.lost - task.won > 1",
            "task.lost - task.won > 2",
            "search/model/test_gate_limits.py",
        ),
        (
            "model/acceptance.py",
            "if number == ROUNDS or",
            "if number == 1 or",
            "search/model/test_acceptance.py",
        ),
        (
            "model/acceptance.py",
            "if counts[sequence.task] <= _CONTEXTS:",
            "if counts[sequence.task] <= 2:",
            "search/model/test_acceptance.py",
        ),
        (
            "model/acceptance.py",
            "low = min(spent * _STEP",
            "low = min(spent * 2",
            "search/model/test_acceptance.py",
        ),
        (
            "model/refine.py",
            "done.measure(balanced)",
            "done.measure(first.allocation)",
            "search/model/test_refine.py",
        ),
        (
            "model/refine.py",
            "                storage = None\n",
            "                pass\n",
            "search/model/test_refine.py",
        ),
        (
            "model/task_losses.py",
            "if len(asked) < CONTEXTS:",
            "if len(asked) < 3:",
            "search/model/test_gate_limits.py",
        ),
    ],
    "kernels": [
        (
            "index.py",
            "    return -(-length // TILE)",
            "    return length // TILE",
            "kernels/test_index.py",
        ),
        (
            "index.py",
            "        return min(n, num_tiles(self.window - 1))",
            "        return min(n, num_tiles(self.window))",
            "kernels/test_index.py kernels/test_patterns.py",
        ),
        (
            "index.py",
            "return [max(k_len - n, 0) // TILE if n else num_tiles(k_len) for n in dense_tail]",
            "return [max(k_len - n, 0) // TILE + 1 if n else num_tiles(k_len) for n in dense_tail]",
            "kernels/test_index.py",
        ),
        (
            "index.py",
            "return mask & (distance >= 0) & (distance < (self.window or self.k_len))",
            "return mask & (distance > 0) & (distance < (self.window or self.k_len))",
            "kernels/test_index.py",
        ),
        (
            "index.py",
            "return (tile < at) & (tile >= at - self.reach)",
            "return (tile < at) & (tile >= at)",
            "kernels/test_index.py",
        ),
        (
            "patterns/fixed.py",
            "counted([reach(p.window, k_len) + 1 for p in patterns]",
            "counted([reach(p.window, k_len) for p in patterns]",
            "kernels/test_fixed_patterns.py",
        ),
        (
            "patterns/fixed.py",
            "reach(p.window, k_len) // p.dilation + 1",
            "reach(p.window, k_len) // p.dilation",
            "kernels/test_fixed_patterns.py",
        ),
        (
            "patterns/fixed.py",
            "return tuple(p.last for p in patterns)",
            "return ()",
            "kernels/test_fixed_patterns.py",
        ),
        ("checks.py", "if _overlaps(out):", "if False:", "kernels/test_refusals.py"),
        ("ragged.py", "if q_start < end:", "if q_start < 0:", "kernels/test_refusals.py"),
        (
            "decode/reference.py",
            "seen &= rows > at - window",
            "seen &= rows >= at - window",
            "conformance/test_kernel_backends.py",
        ),
        (
            "attention/reference.py",
            "outside = (distance < 0) | (distance >= (index.window or k_len))",
            "outside = (distance < 0) | (distance > (index.window or k_len))",
            "conformance/test_kernel_backends.py",
        ),
        (
            "attention/triton_kernel.py",
            "floor = position - window",
            "floor = position - window - 1",
            "conformance/test_kernel_backends.py",
        ),
        (
            "decode/triton_kernel.py",
            "live & (key[None, :] > position[:, None] - window)",
            "live & (key[None, :] >= position[:, None] - window)",
            "conformance/test_kernel_backends.py",
        ),
        (
            "gradient/reference.py",
            "ds *= 1 - (logits",
            "ds *= 1 + (logits",
            "conformance/test_gradient_backends.py",
        ),
        (
            "patterns/choose.py",
            "kept &= wanted | whole | (best < forced)",
            "kept &= wanted | whole",
            "kernels/test_patterns.py",
        ),
        (
            "patterns/paged.py",
            "table=k.table[s : s + 1]",
            "table=k.table[:1]",
            "kernels/test_paged_builds.py",
        ),
    ],
    "profiling": [
        ("models/given.py", "module.training = True", "pass", "test_python.py"),
        (
            "inside/residual.py",
            "any(_width(part) == change.shape[-1] for part in child.modules())",
            "_width(child) == change.shape[-1]",
            "test_python.py",
        ),
        (
            "evaluation/intervals.py",
            "spread / (4 * count)",
            "spread / (2 * count)",
            "profiling/evaluation/test_intervals.py",
        ),
        (
            "evaluation/intervals.py",
            "float(numbers.std(ddof=1)) / math.sqrt(count)",
            "float(numbers.std(ddof=0)) / math.sqrt(count)",
            "profiling/evaluation/test_intervals.py",
        ),
        (
            "evaluation/intervals.py",
            "(far + 1) / (total + 1)",
            "far / total",
            "profiling/evaluation/test_intervals.py",
        ),
        (
            "evaluation/intervals.py",
            "(len(p_values) - rank) * p_values[at]",
            "len(p_values) * p_values[at]",
            "profiling/evaluation/test_intervals.py",
        ),
        (
            "evaluation/intervals.py",
            "cross = max(cross - count / 2, 0.0)",
            "pass",
            "profiling/evaluation/test_intervals.py",
        ),
        (
            "evaluation/intervals.py",
            "return 2 + math.floor(",
            "return 1 + math.floor(",
            "profiling/evaluation/test_intervals.py",
        ),
        (
            "prompts/metrics.py",
            "len(given & right) / len(given | right)",
            "len(given & right) / len(right)",
            "profiling/prompts/test_metrics.py",
        ),
        (
            "prompts/metrics.py",
            "        given.setdefault(number, _plain(value))",
            "        given[number] = _plain(value)",
            "profiling/prompts/test_metrics.py",
        ),
        (
            "similarities/mass.py",
            "(chosen >= span[0]) & (chosen < span[1])",
            "(chosen >= span[0]) & (chosen <= span[1])",
            "profiling/test_similarity.py",
        ),
        (
            "similarities/mass.py",
            "mass[layer, layer + 1 : layer + 1 + reach]",
            "mass[layer, layer : layer + reach]",
            "profiling/test_similarity.py",
        ),
        (
            "inside/gradients.py",
            "odds * answers[rows + 1]",
            "odds * answers[rows]",
            "profiling/inside/test_gradients.py",
        ),
        (
            "inside/head_fidelity.py",
            "skipped[0] / (2 * index.causal_tiles)",
            "skipped[0] / index.causal_tiles",
            "profiling/inside/test_head_fidelity.py",
        ),
        (
            "ledger.py",
            "if hashlib.sha256(data[32:]).digest() != data[:32]:",
            "if False:",
            "profiling/test_ledger.py",
        ),
        (
            "ledger.py",
            "self._settings, self._versions]",
            "self._settings]",
            "profiling/test_ledger.py",
        ),
        (
            "memory_use/plan.py",
            "min(length, shape.window)",
            "length",
            "profiling/test_memory.py",
        ),
        (
            "pictures/layer_pictures.py",
            "profile.ability(task, 16)",
            "profile.ability(task, 8)",
            "profiling/test_heatmaps.py",
        ),
        (
            "prompts/haystacks.py",
            "position - bounds[at - 1] <= bounds[at] - position",
            "position - bounds[at - 1] > bounds[at] - position",
            "profiling/prompts/test_ruler.py",
        ),
        (
            "prompts/held_out.py",
            "        if taken.overlaps(prompt):",
            "        if False:",
            "profiling/prompts/test_held_out.py",
        ),
        (
            "prompts/held_out.py",
            "if made.overlapping or not made.apart:",
            "if made.overlapping:",
            "profiling/prompts/test_held_out.py",
        ),
        (
            "prompts/held_out.py",
            "            known.add(*by_seed[-1].prompts)",
            "            pass",
            "profiling/prompts/test_held_out.py",
        ),
        (
            "quality/trials.py",
            "fit.mean < min(wrong)",
            "fit.mean <= max(wrong)",
            "profiling/quality/test_trials.py",
        ),
        (
            "ranks.py",
            "(1 + makes[rank])",
            "1",
            "profiling/test_ranks.py",
        ),
        (
            "similarities/accumulator.py",
            "past = largest[: self._old]",
            "past = probabilities.mean(0)[: self._old]",
            "profiling/test_similarity.py",
        ),
        (
            "speed/baselines.py",
            "if ratio < 1 and not alike:",
            "if ratio < 1:",
            "profiling/speed/test_seconds.py",
        ),
        (
            "streams/report.py",
            "window = token[past] // whole",
            "window = token[past]",
            "profiling/test_stream.py",
        ),
        (
            "streams/tokens.py",
            "name, number = facts[-1 - BACK]",
            "name, number = facts[-BACK]",
            "profiling/test_stream.py",
        ),
    ],
}
CASES = [(f"{package}/{row[0]}", *row[1:]) for package, rows in MUTATIONS.items() for row in rows]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("file", "text", "broken", "tests"),
    CASES,
    ids=[f"{number} {file}" for number, (file, *_) in enumerate(CASES)],
)
def test_a_broken_module_is_noticed(
    tmp_path: Path, file: str, text: str, broken: str, tests: str
) -> None:
    for package in PACKAGES:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module = tmp_path / file
    whole = module.read_text()
    assert text in whole, f"{file} no longer has {text!r}: break another line"
    module.write_text(whole.replace(text, broken, 1))
    named = [str(tmp_path / "tests" / name) for name in tests.split()]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, *named],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    # 1: tests ran, and some failed.
    assert ran.returncode == 1, ran.stdout[-3000:] + ran.stderr[-1000:]
