"""The model `headwise` inside lm-evaluation-harness: answers, likelihoods, batches, mistakes."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

import artifacts
from artifacts import HeadwiseError
from headwise.__main__ import main
from profiling.evaluation.methods import Methods
from profiling.models.loading import load_model, load_tokenizer
from profiling.prompts.tokens import Encoder
from profiling.quality.answers import new_tokens
from profiling.quality.trials import trials
from runtime.fingerprint import fingerprint
from tests.runtime.conftest import search_info
from tests.search.conftest import save_tiny

pytest.importorskip(
    "lm_eval", reason="lm_eval is not installed here: `.ci/lm-eval` runs these tests"
)

from profiling.harness.model import HeadwiseLM
from tests.typed import make_prompts

LENGTHS, SAMPLES, SEED = (600, 700), 3, 1000
TASK = "niah_multikey_1"
NAMES = [f"headwise_{TASK}_{length}" for length in LENGTHS]
PATTERNS: dict[str, Any] = {
    "vs": artifacts.VerticalSlash(vertical=70, slash=70),
    "vs_8": artifacts.VerticalSlash(vertical=10, slash=130, last_q=8),
    "a": artifacts.AShape(sink=64, window=64),
    "bs": artifacts.BlockSparse(blocks=2),
}
ROWS = (("vs", "a", "bs", "vs_8", "bs", "vs"), ("bs", "vs", "a", "a", "vs_8", "vs"), None)
CHOICES = ("a b", "c", "dd ee", "fgh")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, artifacts for it, and tasks."""
    folder = tmp_path_factory.mktemp("harness")
    model = save_tiny(folder / "tiny", max_position_embeddings=2048)
    tokenizer = load_tokenizer(str(model))
    # The harness starts texts that have no context with one of these.
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<end>"})
    tokenizer.save_pretrained(model)
    retained = artifacts.KVCache(
        policies={"half": artifacts.SnapKV(budget=0.5)}, layers=("half",) * 3
    )
    for name, more in (("cfg", {}), ("kept", {"kv_cache": retained})):
        artifact = artifacts.Artifact(
            model=fingerprint(load_model(str(model), dtype="float32").model, name="tiny"),
            search=search_info(ROWS, PATTERNS),
            patterns=PATTERNS,
            prefill=artifacts.Prefill(dense_below=500, dense_tail=0, layers=ROWS),
            **more,
        )
        artifacts.save(artifact, folder / f"{name}.yaml")
    for name, length in zip(NAMES, LENGTHS, strict=True):
        prompts = make_prompts(TASK, tokenizer, length=length, samples=SAMPLES, seed=SEED)
        # The harness's model adds the tokenizer's prefix.
        start = len(Encoder(tokenizer).prefix)
        prompt_rows = [
            {"text": tokenizer.decode(prompt.input_ids[start:]), "answer": prompt.answer}
            for prompt in prompts
        ]
        limit = max(new_tokens(tokenizer, prompt) for prompt in prompts)
        fields = {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": limit},
            "metric_list": [{"metric": "exact_match"}],
        }
        write_task(folder, name, prompt_rows, fields)
    # Four choices of other lengths each after contexts of other lengths, some below 500.
    sentence = "It was a long way to the sea, and nobody saw it. "
    texts = [f"{sentence * n}Then {n}" for n in (3, 9, 13, 14, 15)]
    rows = [{"text": text, "choices": CHOICES, "gold": n % 4} for n, text in enumerate(texts)]
    fields = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    }
    write_task(folder, "choose", rows, fields)
    return folder


def write_task(folder, name, rows, fields):
    """Write a task of the harness with its documents; JSON is YAML."""
    documents = folder / f"{name}.jsonl"
    documents.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        **fields,
    }
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(task))


@pytest.fixture
def harness(folder, tmp_path):
    """harness(config, *task names, batch=) -> results, and responses by task."""

    def run(config, *names, batch=1):
        out = tmp_path / f"out-{config.rpartition('/')[2]}-{batch}"
        words = (
            f"--model headwise --model_args pretrained={folder}/tiny,config={config} "
            f"--tasks {','.join(names)} --include_path {folder}/tasks --batch_size {batch} "
            f"--device cpu --output_path {out} --log_samples"
        )
        assert main(["lm-eval", *words.split()]) == 0
        (results,) = out.rglob("results_*.json")
        responses = {}
        for name in names:
            (samples,) = out.rglob(f"samples_{name}_[0-9]*.jsonl")
            lines = map(json.loads, samples.read_text().splitlines())
            ordered = sorted(lines, key=lambda line: line["doc_id"])
            responses[name] = [line["resps"] for line in ordered]
        return json.loads(results.read_text()), responses

    return run


@pytest.mark.parametrize("method", ["dense", "headwise"])
def test_harness_answers_equal_those_of_evaluate(harness, folder, method):
    path = folder / "cfg.yaml"
    results, answers = harness("dense" if method == "dense" else str(path), *NAMES)
    loaded = load_model(str(folder / "tiny"), dtype="float32")
    methods = Methods(loaded, *artifacts.load_pair(path))
    texts = {"dense": {}, "headwise": {}}
    for name, length in product(texts, LENGTHS):
        prompts = make_prompts(TASK, loaded.tokenizer, length=length, samples=SAMPLES, seed=SEED)
        own = methods.make(name, length)
        with own.asked(loaded.model):
            answered = list(trials(loaded.model, loaded.tokenizer, prompts, own))
        ordered = sorted(answered, key=lambda each: each.number)
        texts[name][length] = [each.record["text"] for each in ordered]
    # The artifact makes a difference, or agreement would say nothing.
    assert texts["dense"] != texts["headwise"]
    for name, length in zip(NAMES, LENGTHS, strict=True):
        assert [text.strip() for ((text,),) in answers[name]] == texts[method][length]
    if method == "headwise":
        assert results["config"]["headwise_calls"]["sparse"] == 2 * len(LENGTHS) * SAMPLES
        hashed = artifacts.load(path).content_sha256
        assert results["config"]["headwise_content_sha256"] == hashed


@pytest.mark.parametrize("config", ["cfg", "kept"])
def test_harness_padding_does_not_change_answers(harness, folder, config):
    alone, together = (
        harness(str(folder / f"{config}.yaml"), "choose", *NAMES, batch=n)[1] for n in (1, 4)
    )
    # Prompts of unlike lengths in one batch. Sums come in another order there: far on a tie may go
    # the other way.
    for name in NAMES:
        assert _starts(together[name]) == _starts(alone[name])
    pairs = zip(_numbers(alone["choose"]), _numbers(together["choose"]), strict=True)
    assert all(a == pytest.approx(b, abs=1e-3) for a, b in pairs)


def test_harness_log_likelihoods_use_the_patterns(harness, folder):
    dense, sparse = (
        _numbers(harness(name, "choose")[1]["choose"])
        for name in ("dense", str(folder / "cfg.yaml"))
    )
    far = [abs(a - b) > 0.01 for a, b in zip(dense, sparse, strict=True)]
    # The first two contexts are shorter than dense_below.
    assert not any(far[:8]) and all(far[8:])


@pytest.fixture
def answered(folder, tmp_path):
    """answered(config, **options): a log-likelihood with a cache of answers, and its passes."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CachingLM

    def run(config, pretrained="tiny", **options):
        lm = HeadwiseLM(
            str(folder / pretrained), config=config, device="cpu", **{"dtype": "float32"} | options
        )
        passes = []
        real = lm._loglikelihood_tokens
        lm._loglikelihood_tokens = lambda *a, **k: passes.append(1) or real(*a, **k)
        request = Instance("loglikelihood", {}, ("It was a long way to the sea. " * 30, "x"), 0)
        cached = CachingLM(lm, str(tmp_path / "answers.db"))
        return cached.loglikelihood([request])[0][0], len(passes)

    return run


@pytest.mark.parametrize("config", ["dense", "cfg.yaml", "kept.yaml"])
def test_harness_reuses_answers_of_the_same_model_and_artifact(config, answered, folder):
    config = config if config == "dense" else str(folder / config)
    first, passes = answered(config)
    assert passes == 1 and answered(config, batch_size=2) == (first, 0)


def test_harness_refuses_answers_of_another_artifact_model_or_option(answered, folder):
    answered("dense")
    save_tiny(folder / "other" / "tiny", max_position_embeddings=2048, intermediate_size=32)
    load_tokenizer(str(folder / "tiny")).save_pretrained(folder / "other" / "tiny")
    for config, options in (
        (str(folder / "cfg.yaml"), {}),
        ("dense", {"dtype": "bfloat16"}),
        ("dense", {"pretrained": "other/tiny"}),
        ("dense", {"max_length": 1000}),
    ):
        with pytest.raises(HeadwiseError, match=r"--use_cache .*answers\.db has the answers of"):
            answered(config, **options)


def test_harness_refuses_a_cache_of_the_model_hf(answered, folder, tmp_path):
    from sqlitedict import SqliteDict

    with SqliteDict(str(tmp_path / "answers.db"), autocommit=True) as answers:
        answers["0" * 64] = (-1.0, True)
    with pytest.raises(HeadwiseError, match="give each a file of its own"):
        answered("dense")


def test_harness_without_an_artifact_is_refused(harness, tmp_path):
    with pytest.raises(HeadwiseError, match="config=ARTIFACT"):
        harness("", "choose")
    with pytest.raises(HeadwiseError, match="no such file"):
        harness(str(tmp_path / "none.yaml"), "choose")


def _starts(responses: list[Any]) -> list[str]:
    return [text[:64] for ((text,),) in responses]


def _numbers(responses: list[Any]) -> list[float]:
    return [float(answer[0][0]) for choices in responses for answer in choices]
