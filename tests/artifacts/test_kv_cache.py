"""The kv_cache section: rows for layers and KV heads, and what it refuses."""

from artifacts import Full, KVCache, Streaming

POLICIES = {"full": Full(), "stream": Streaming()}


def test_a_row_is_one_policy_for_all_kv_heads_or_one_for_each(make):
    section = KVCache(policies=POLICIES, layers=("stream", None, ("full", "stream")))
    assert make(kv_cache=section).kv_cache == section
    assert section.heads(0, 2) == ("stream", "stream")
    assert section.heads(1, 2) is None
    assert section.heads(2, 2) == ("full", "stream")


def test_the_page_says_what_is_kept(every_kind, tmp_path, capsys):
    from artifacts.page.artifact import render

    artifact, arrays = every_kind
    page = render(artifact, file="cfg.yaml", arrays=arrays, sidecar="none")
    assert "h2o: h2o of heavy 0.1, recent 512, normalised True, eviction greedy; 1 KV head" in page
    assert "full: full; 4 KV heads" in page
