"""The kv_cache section: rows for layers and KV heads, and what it refuses."""

import pytest

import artifacts
from artifacts import H2O, Full, KVCache, SnapKV, Streaming
from artifacts.schema.validation import to_artifact

POLICIES = {"full": Full(), "stream": Streaming()}


def test_a_row_is_one_policy_for_all_kv_heads_or_one_for_each(make):
    section = KVCache(policies=POLICIES, layers=("stream", None, ("full", "stream")))
    assert make(kv_cache=section).kv_cache == section
    assert section.heads(0, 2) == ("stream", "stream")
    assert section.heads(1, 2) is None
    assert section.heads(2, 2) == ("full", "stream")


@pytest.mark.parametrize(
    ("policies", "layers", "said"),
    [
        (POLICIES, ("full", "stream"), "layers has 2 rows, the model has 3 layers"),
        (
            POLICIES,
            ("full", "stream", ("full",) * 3),
            r"layers\[2\] has 3 names, the model has 2 KV heads",
        ),
        (
            POLICIES,
            ("full", "stream", "strean"),
            r"layers\[2\]: no policy is called 'strean'; known: full, stream",
        ),
        (POLICIES, ("full", "full", "full"), "policies.stream is used by no layer"),
        ({"h": H2O(heavy=0, recent=0.0)}, ("h",) * 3, "policies.h keeps nothing"),
        ({"s": SnapKV(pool=4)}, ("s",) * 3, "policies.s.pool must be odd, got 4"),
        (
            {"s": SnapKV(budget=64)},
            ("s",) * 3,
            "policies.s.budget must be above its window of 64 tokens, got 64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(policies, layers, said, make):
    with pytest.raises(ValueError, match=said):
        make(kv_cache=KVCache(policies=policies, layers=layers))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {},
            r"kv_cache\.policies\.h2o\.kind: missing, must be one of full, streaming, h2o, snapkv$",
        ),
        (
            {"kind": "dense"},
            r"kv_cache\.policies\.h2o\.kind: must be one of 'full', .*, got 'dense'",
        ),
        (
            {"kind": "h2o", "heavy": -1},
            r"kv_cache\.policies\.h2o\.heavy: must be a whole number .*, got -1",
        ),
    ],
)
def test_a_line_names_the_policies_field(policy, message, make):
    fields = make(kv_cache=KVCache(policies={"h2o": H2O()}, layers=("h2o",) * 3)).model_dump(
        mode="json"
    )
    fields["kv_cache"]["policies"]["h2o"] = policy
    with pytest.raises(artifacts.ArtifactError, match=message):
        to_artifact(fields)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueError, match="share of them between 0 and 1"):
        H2O(heavy=share)


def test_omnikv_chooses_only_from_what_is_all_kept(make):
    decode = artifacts.Decode(omnikv=artifacts.OmniKV(filter_layers=(1,)))
    make(decode=decode, kv_cache=KVCache(policies=POLICIES, layers=("stream", "full", "full")))
    with pytest.raises(
        ValueError, match=r"kv_cache.layers\[2\] drops tokens that decode.omnikv chooses from"
    ):
        make(decode=decode, kv_cache=KVCache(policies=POLICIES, layers=("full", "full", "stream")))


def test_the_page_says_what_is_kept(every_kind, tmp_path, capsys):
    from artifacts.page.artifact import render

    artifact, arrays = every_kind
    page = render(artifact, file="cfg.yaml", arrays=arrays, sidecar="none")
    assert "h2o: h2o of heavy 0.1, recent 512, normalised True, eviction greedy; 1 KV head" in page
    assert "full: full; 4 KV heads" in page
