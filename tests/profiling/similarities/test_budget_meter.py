"""What choices of some size cost is what their layers' outputs come to when they are computed again, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from artifacts import HeadwiseError, OmniKV
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import make_prompts
from profiling.similarities.budget_meter import Point, measure_budgets
from profiling.similarities.layer_similarity import SimilarityConfig
from search.decode.coverage import coverage_of, least_coverage
from tests.search.conftest import save_tiny

LENGTH, STEPS = 400, 3
SECTION = OmniKV(filter_layers=(0,), head_map=(None, ((1,), (0, 1)), ((0,), (1,))))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(str(save_tiny(tmp_path_factory.mktemp("budgets") / "tiny")), dtype="float32")


def test_budgets_and_coverages_are_what_full_weights_give(loaded: LoadedModel) -> None:
    config = SimilarityConfig(model="tiny", tasks=("passkey",), length=LENGTH, steps=STEPS, top_k=1, greedy=True)
    prompt = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=1, seed=0)[0]
    sizes = {"budgets": (20, 60), "coverages": (0.3, 0.6), "most": 100}
    points = measure_budgets(config, loaded, SECTION, [prompt], **sizes)
    ids, found = torch.tensor([prompt.input_ids]), np.zeros((4, 2))
    ends = loaded.model.generation_config.eos_token_id
    loaded.model.set_attn_implementation("eager")
    for _ in range(STEPS):
        with torch.no_grad():
            output = loaded.model(ids, output_attentions=True, output_hidden_states=True, use_cache=True)
        rows = [weights[0, :, -1].double() for weights in output.attentions]
        groups = output.past_key_values.layers[0].values.shape[1]
        n = ids.shape[1]
        for layer in (1, 2):
            values = output.past_key_values.layers[layer].values[0].double()
            own, chooser = (rows[at].unflatten(0, (groups, -1)) for at in (layer, 0))
            project = loaded.model.model.layers[layer].self_attn.o_proj.weight.detach().double()
            stream = output.hidden_states[layer][0, -1].double()
            for point in range(4):
                changes = []
                for g, heads in enumerate(SECTION.head_map[layer]):
                    mine = chooser[list(heads)].flatten(0, 1)
                    scores = mine.amax(0) if point < 2 else mine.sum(0)
                    order = [n - 1, *(at for at in scores.argsort(descending=True).tolist() if at != n - 1)]
                    keys = order[: sizes["budgets"][point]] if point < 2 else []
                    while (
                        point > 1
                        and len(keys) < 100
                        and scores[keys].sum() < sizes["coverages"][point - 2] * scores.sum()
                    ):
                        keys.append(order[len(keys)])
                    sparse = own[g][:, keys]
                    changes.append((sparse / sparse.sum(1, keepdim=True)) @ values[g, keys] - own[g] @ values[g])
                    found[point, 0] += len(keys) / groups / 2 / STEPS
                written = project @ torch.stack(changes).flatten()
                found[point, 1] += float(written @ written / (stream @ stream)) / STEPS
        logits = output.logits[0, -1].clone()
        logits[ends] = -torch.inf
        ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    loaded.model.set_attn_implementation("sdpa")
    np.testing.assert_allclose([[p.tokens, p.error] for p in points], found, rtol=1e-3)
    assert found[2, 0] != found[3, 0] > 1 and (np.diff(found[:2, 1]) < 0).all()


def test_a_section_without_sparse_layers_has_nothing_to_measure(loaded: LoadedModel) -> None:
    config = SimilarityConfig(model="tiny", tasks=("passkey",), length=LENGTH, steps=1, top_k=1)
    prompts = make_prompts("passkey", loaded.tokenizer, length=LENGTH, samples=1, seed=0)
    with pytest.raises(HeadwiseError, match="no layer is sparse"):
        measure_budgets(config, loaded, OmniKV(filter_layers=(2,)), prompts, budgets=(20,), most=100)


def test_the_least_coverage_is_the_first_from_which_on_none_has_more() -> None:
    errors = {0.5: 0.4, 0.7: 0.1, 0.8: 0.2, 0.9: 0.1, 0.95: 0.05}
    points = [Point(budget=None, coverage=at, tokens=1.0, error=e, worst=e) for at, e in errors.items()]
    assert least_coverage(points, 0.1).coverage == 0.9 and least_coverage(points, 0.5).coverage == 0.5
    with pytest.raises(HeadwiseError, match="cannot be met"):
        least_coverage(points, 0.01)


def test_the_coverage_of_so_many_tokens_lies_between_those_measured() -> None:
    reads = {0.5: 100.0, 0.7: 200.0, 0.9: 600.0}
    points = [Point(budget=None, coverage=at, tokens=n, error=0.0, worst=0.0) for at, n in reads.items()]
    assert coverage_of(points, 100) == 0.5 and coverage_of(points, 300) == pytest.approx(0.75)
    with pytest.raises(HeadwiseError, match=r"--target-tokens 601 cannot be met: coverages from 0.5 to 0.9 read 100"):
        coverage_of(points, 601)
