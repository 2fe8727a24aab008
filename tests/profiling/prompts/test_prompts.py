"""Prompts have the length asked for, hold their answers, and are the same everywhere."""

from __future__ import annotations

import copy
import itertools
import json
import re

import pytest

from artifacts import HeadwiseError
from profiling.prompts.prompt import Evidence, Prompt, digest, parse_task
from profiling.prompts.text_files import read_text
from profiling.prompts.tokens import Encoder
from tests.profiling.prompts.files import LONG, count_overlaps, file_task
from tests.profiling.tokenizers import MAKERS, byte_level
from tests.typed import fewer_sentences, make_prompts


@pytest.mark.parametrize("tokenizer", MAKERS, indirect=True)
def test_encoder_ids_equal_the_tokenizers(tokenizer):
    texts = [" a river", "", "<s> naïve\n\n  x", "The pass key is 1234567. " * 40]
    plain = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    # The compiled tokenizer keeps the options of the last call.
    tokenizer(texts, truncation=True, max_length=5)
    assert Encoder(tokenizer).each(texts) == plain
    # One that does more than the compiled one is asked itself.
    own = type("Own", (type(tokenizer),), {"__call__": lambda *_, **__: {"input_ids": [[7]]}})
    changed = copy.copy(tokenizer)
    changed.__class__ = own
    assert Encoder(changed).each(["a"]) == [(7,)]


def test_text_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(HeadwiseError, match=r"latin\.txt is not UTF-8 text: byte 3 does not"):
        read_text(tmp_path / "latin.txt")
    with pytest.raises(HeadwiseError, match=r"cannot read none\.txt: no such file"):
        read_text(tmp_path / "none.txt")


@pytest.mark.parametrize("task", ["passkey", "niah_single_1", "niah_single_2", "niah_single_3"])
def test_depth_moves_the_needle_alone(task):
    tokenizer = byte_level(bos=True)
    starts = []
    texts = set()
    for depth in (0, 0.25, 0.5, 1):
        (prompt,) = make_prompts(f"{task}@depth={depth}", tokenizer, length=3000, samples=1, seed=4)
        start, end = prompt.evidence[0].span
        starts.append(start)
        texts.add((prompt.answer, len(prompt.input_ids[:start] + prompt.input_ids[end:])))
    room = starts[-1] - starts[0]
    assert len(texts) == 1 and room > 1000
    depths = [(start - starts[0]) / room for start in starts]
    assert depths == pytest.approx([0, 0.25, 0.5, 1], abs=0.03)


@pytest.mark.parametrize("kind", ["text", "passkey", "niah_single_2", "multi_hop"])
def test_make_prompts_of_a_short_text_makes_disjoint_prompts_alone(kind, tmp_path):
    """At most as many as fit, of every seed in the same cells of the text, which tasks share."""
    tokenizer = byte_level()
    task = file_task(kind, tmp_path / "short.txt", 5)
    size = len(tokenizer((tmp_path / "short.txt").read_text())["input_ids"])
    cells = set()
    for seed in (0, 1):
        options = {"length": LONG, "seed": seed}
        prompts = make_prompts(task, tokenizer, samples=12, **options)
        count = size // LONG
        assert len(prompts) == count > 2
        assert prompts[:2] == make_prompts(task, tokenizer, samples=2, **options)
        for one, other in itertools.combinations(prompts, 2):
            assert count_overlaps([one], [other]) == 0
        cells.add(tuple(sorted(prompt.cell for prompt in prompts)))
    rest = size % LONG // 2
    assert cells == {tuple((rest + at * LONG, rest + (at + 1) * LONG) for at in range(count))}
    name = f"{kind}:short.txt"
    assert fewer_sentences([task], prompts, length=LONG, samples=count) == []
    assert fewer_sentences([task], prompts, length=LONG, samples=12) == [
        f"{count} of 12 prompts of {name} at {LONG} tokens: there is no more text that does not "
        "overlap"
    ]
    with pytest.raises(HeadwiseError, match=f"short.txt is too short.* has {size} tokens"):
        make_prompts(task, tokenizer, length=size + LONG, samples=1, seed=0)


def test_jsonl_prompts_keep_their_end_and_answer(tmp_path):
    tokenizer = byte_level(bos=True)
    file = tmp_path / "asked.jsonl"
    texts = [f"{i} {'word ' * 200}the end {i}" for i in range(20)]
    records = [{"prompt": text, "answer": text.split()[-1]} for text in texts]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")
    for prompt in make_prompts(f"jsonl:{file}", tokenizer, length=100, samples=20, seed=0):
        assert tokenizer.decode(prompt.input_ids).endswith(f"word the end {prompt.answer}")


def test_parse_task_names_a_file_without_its_folder(story):
    assert parse_task(f"text:{story}").name == "text:story.txt"
    assert parse_task(f"text:{story}").file == story
    assert parse_task("passkey").name == "passkey"
    assert parse_task(f"passkey@depth=.50:{story}").name == "passkey@depth=0.5:story.txt"


def test_make_prompts_of_a_long_text_logs_no_warning(story, caplog):
    tokenizer = byte_level()
    tokenizer.model_max_length = 100
    make_prompts(f"text:{story}", tokenizer, length=1000, samples=1, seed=0)
    assert not caplog.records


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("needles", "'needles'"),
        ("passkey@", "parameter ''"),
        ("passkey@hops=2", "parameter 'hops=2'"),
        ("passkey@depth=0,depth=1", "parameter 'depth=1'"),
        ("passkey@depth=1.5", "from 0 to 1, got '1.5'"),
        ("passkey@depth=nan", "from 0 to 1, got 'nan'"),
        ("two_stage_retrieval@depth=1", "'depth=1'"),
        ("kv_retrieval:x", "'kv_retrieval:x'"),
        ("prose:some.txt", "'prose:some.txt'"),
        ("text", "text:FILE"),
        ("passkey:", "passkey:FILE"),
        ("text:no/such.txt", "'no/such.txt'"),
        ("text:.", "'.'"),
        ("vt@hops=0", "from 1 to 1000, got '0'"),
        ("cwe@common=1", "at least 2, got '1'"),
        ("fwe@alpha=1", "from 1.01 to 4, got '1'"),
    ],
)
def test_parse_task_refuses_other_text(task, says):
    with pytest.raises(HeadwiseError, match=re.escape(says)):
        parse_task(task)


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("text", b" \n ", "bad.file is empty"),
        ("text", b"few words", "bad.file is too short"),
        ("passkey", b"few words", "bad.file is too short"),
        ("multi_hop", b"few words", "length 500 is too small"),
        ("text", b"caf\xe9 au lait", "byte 3"),
        ("jsonl", b"\n\n", "bad.file is empty"),
        ("jsonl", b'{"prompt": "x"}\n{"prompt": \n', "bad.file, line 2: not JSON"),
        ("jsonl", b'{"prompt": "x"}\n\n[1]\n', "bad.file, line 3: not a JSON object"),
        ("jsonl", b'{"question": "x"}', "line 1: give one of prompt, text, input"),
        ("jsonl", b'{"prompt": "x", "text": "y"}', "line 1: give one of prompt, text, input"),
        ("jsonl", b'{"prompt": 3}', "line 1: prompt"),
        ("jsonl", b'{"prompt": "x", "answer": 3}', "line 1: answer"),
        ("jsonl", b'{"prompt": "\\ud83d"}', "line 1: half of a surrogate pair"),
        ("jsonl", b'{"prompt": "\\ud83d\\ude00"}', "no prompt of at least 500"),
        ("jsonl", b"[" * 100_000, "bad.file, line 1: not"),
        ("jsonl", b'{"prompt": "x"}\n{"prompt": "x", "answer": ""}', "line 2: answer must have"),
        ("jsonl", b'{"prompt": "x", "answer": " \\t"}', "line 1: answer must have text"),
        ("jsonl", b'{"prompt": " "}', "line 1: prompt must have text, got ' '"),
        ("jsonl", b'{"prompt": "x", "answers": []}', "line 1: answers is not read, got []"),
        ("jsonl", b'{"prompt": "x", "answers": ["", "y"]}', "line 1: answers is not read"),
        ("jsonl", b'{"prompt": "x", "answer": "y", "answer": ""}', "'answer' appears twice"),
    ],
)
def test_make_prompts_of_a_wrong_file_names_the_fault(tmp_path, kind, content, says):
    file = tmp_path / "bad.file"
    file.write_bytes(content)
    with pytest.raises(HeadwiseError, match=re.escape(says)) as caught:
        make_prompts(f"{kind}:{file}", byte_level(), length=500, samples=1, seed=0)
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"answer": ""}, "an answer must have text"),
        ({"answer": " "}, "an answer must have text"),
        ({"answer": "a", "references": ("a", "")}, "an answer must have text"),
        (
            {"answer": "a", "evidence": (Evidence("\n", (0, 1)), Evidence(" a", (0, 1)))},
            "an answer must have text",
        ),
        ({"turn": 3}, "turn must be"),
        ({"turn": -1}, "turn must be"),
        ({"scored": ((0, 1),)}, "scored ranges"),
        ({"scored": ((1, 4),)}, "scored ranges"),
    ],
)
def test_prompt_with_a_wrong_field_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Prompt((1, 2, 3), **{"answer": None, **fields})


def test_digest_depends_on_ids_and_answers():
    base = digest([Prompt((1, 2), "a")])
    rest = [
        [Prompt((1, 2), None)],
        [Prompt((2, 1), "a")],
        [Prompt((12,), "a")],
        [Prompt((1,), "a"), Prompt((2,), "a")],
    ]
    assert re.fullmatch(r"[0-9a-f]{64}", base)
    assert len({base, *map(digest, rest)}) == 5
