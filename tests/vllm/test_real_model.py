"""SmolLM2 in vLLM against SmolLM2 in transformers with the same artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

import artifacts
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from tests.runtime.conftest import search_info
from tests.typed import make_prompts
from tests.vllm.conftest import PATTERNS
from tests.vllm.engines import Transformers, engine

TOKENS = 8
WHOLE = {"max_model_len": 1400, "skip_tokenizer_init": False}
CHUNKS = WHOLE | {"max_num_batched_tokens": 512, "max_num_seqs": 8}


@pytest.mark.model
def test_smollm2_tokens_match_transformers(tmp_path: Path) -> None:
    loaded = load_model("smollm2", dtype="float32")
    names = ("vs", "a", "bs")
    rows = tuple(
        tuple(names[(layer + head) % 3] for head in range(9)) if layer > 1 else None
        for layer in range(30)
    )
    artifact = artifacts.Artifact(
        model=fingerprint(loaded.model, name=loaded.name),
        search=search_info(rows, PATTERNS),
        patterns={name: PATTERNS[name] for name in names},
        prefill=artifacts.Prefill(dense_below=512, layers=rows),
    )
    path = str(tmp_path / "cfg.yaml")
    artifacts.save(artifact, path)
    prompts = []
    for seed, (task, length) in enumerate([("passkey", 900), ("kv_retrieval", 1301)]):
        (prompt,) = make_prompts(task, loaded.tokenizer, length=length, samples=1, seed=seed)
        prompts.append(list(prompt.input_ids))
    prompts.append(prompts[0][:90])
    folder = str(loaded.model.config._name_or_path)
    transformers = Transformers(folder, loaded.model)
    for settings in (WHOLE, CHUNKS):
        with engine(folder, path, **settings) as served:
            done = [served.generate([ids], TOKENS)[0] for ids in prompts]
            done += served.generate(prompts, TOKENS)
            cuts = [served.cut(each)[1] for each in done]
        for each, chunks in zip(done, cuts, strict=True):
            ids = each.prompt_token_ids
            wanted = transformers.tokens(ids, chunks, artifact=path, tokens=TOKENS)
            assert list(each.outputs[0].token_ids) == wanted
    # If the artifact changed nothing, agreement would prove nothing.
    dense = [transformers.tokens(ids, tokens=TOKENS) for ids in prompts]
    sparse = [transformers.tokens(ids, artifact=path, tokens=TOKENS) for ids in prompts]
    assert dense != sparse
