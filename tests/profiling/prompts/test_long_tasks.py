"""Tasks of papers on long contexts: each prompt is solved anew from its text, and metrics against hand-worked cases."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from profiling.prompts import babi, countdown, minds
from profiling.prompts.graphs import answer_nodes
from profiling.prompts.metrics import METRICS, score
from profiling.prompts.prompt import Prompt, make_prompts
from tests.profiling.tokenizers import byte_level


def made(task: str, samples: int = 3, length: int = 4000, seed: int = 0) -> list[tuple[Prompt, str]]:
    """Prompts with their texts."""
    tokenizer = byte_level()
    prompts = make_prompts(task, tokenizer, length=length, samples=samples, seed=seed)
    return [(prompt, tokenizer.decode(prompt.input_ids)) for prompt in prompts]


@pytest.mark.parametrize("operation", ["bfs", "parents"])
def test_graphs_hold_the_answer(operation: str) -> None:
    for prompt, text in made(f"graphwalks_{operation}", 6):
        graph, _, asked = text.rpartition("The graph has these edges:")[2].partition("\nOperation")
        edges = re.findall(r"(\w{10}) -> (\w{10})\n", graph)
        node = re.search(r"node (\w{10})", asked)
        assert node and len(edges) > 50 and len(set(edges)) == len(edges) and all(a != b for a, b in edges)
        if operation == "parents":
            right = {a for a, b in edges if b == node[1]}
        else:
            # By the definition: in two steps, and not in fewer.
            one = {b for a, b in edges if a == node[1]}
            right = {b for a, b in edges if a in one} - one - {node[1]}
        assert set(prompt.references) == right and 1 <= len(right) <= 12


def test_walks_of_a_graph_drawn_by_hand() -> None:
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "a"), ("d", "e"), ("e", "e2")]
    assert answer_nodes(edges, "bfs", "a", 1) == ["b", "c"]
    assert answer_nodes(edges, "bfs", "a", 2) == ["d"]
    assert answer_nodes(edges, "bfs", "a", 3) == ["e"], "the start is not met again"
    assert answer_nodes(edges, "bfs", "e2", 1) == []
    assert answer_nodes(edges, "parents", "d", 9) == ["b", "c"]


def test_puzzles_are_solved_where_the_trace_ends() -> None:
    rng = random.Random(0)
    for _ in range(40):
        puzzle = countdown.made(rng, 20)
        assert 5 <= len(puzzle.lines) <= 20 and 10 <= puzzle.target <= 50 and len(puzzle.equations) == 3
        prompt = Prompt((1,), puzzle.answer, metric="countdown")
        assert score(prompt, puzzle.answer) == 1
        ends = [int(line.rpartition("= ")[2][:-1]) for line in puzzle.lines if line.startswith("    |- Try")]
        assert ends[-1] == puzzle.target and puzzle.target not in ends[:-1]
    # 5 and 3 first: the larger goes first, 5 / 3 is no whole number, and the result stands in front.
    lines = [line for line, _, _ in countdown._search((3, 5, 2, 2), 0, ())]
    assert lines[:4] == [
        "Pick two numbers 5 and 3, left [2, 2].",
        "|- Try 5 + 3 = 8.",
        "  Pick two numbers 8 and 2, left [2].",
        "  |- Try 8 + 2 = 10.",
    ]
    assert "|- Try 5 * 3 = 15." in lines and not any("5 / 3" in line for line in lines)


def test_routes_are_the_only_way() -> None:
    for prompt, text in made("longproc_path@steps=9"):
        listed, _, asked = text.partition("</Route>")[2].partition("The route from")
        ways = {a: (b, by) for a, by, b in re.findall(r"(\w+): (\w+) to (\w+)\.", listed)}
        ends = re.match(r" (\w+) to (\w+):", asked)
        assert ends and len(ways) == listed.count(" to ") > 40
        at, steps = ends[1], []
        while at != ends[2]:
            to, by = ways[at]
            steps.append(f"From {at}, take a {by} to {to}.")
            at = to
        assert prompt.answer == "\n".join([*steps, "</Route>"]) and len(steps) == 9


def test_minds_hold_what_was_last_seen() -> None:
    rng = random.Random(0)
    seen = unseen = 0
    for _ in range(60):
        story = minds.make_story(rng, 12)
        rooms = dict(
            pair
            for a, b, room in re.findall(r"The ([\w ]+) and the ([\w ]+) are in the (\w+)\.", story.start)
            for pair in ((a, room), (b, room))
        )
        asked = re.fullmatch(r"Track (\w+) and the (\w+)\.", story.asked)
        assert asked
        who, what = asked.groups()
        where = re.search(rf"The {what} is in the ([\w ]+) in the", story.start)
        place = re.search(rf"{who} is in the (\w+)\.", story.start)
        assert where and place
        at, inside = place[1], where[1]
        believed = f"the {inside}" if rooms[inside] == at else "None"
        for number, step in enumerate(story.steps, start=1):
            if step.startswith(who):
                moved = re.search(r"(?:enters| to) the (\w+)", step)
                at = "outside" if "leaves" in step else moved[1] if moved else at
            if f"the {what} " in step:
                put = re.search(r"into the ([\w ]+)\.", step)
                assert put
                inside = put[1]
            sees = rooms[inside] == at
            believed = f"the {inside}" if sees else believed
            seen, unseen = seen + sees, unseen + (not sees)
            place_of = "outside" if at == "outside" else f"in the {at}"
            assert story.tracked[number - 1] == (
                f"- Step {number}: {who} is {place_of}; the {what} is in the {inside}; "
                f"{who} sees it: {'yes' if sees else 'no'}; {who} believes: {believed}."
            )
    assert min(seen, unseen) > 100


@pytest.mark.parametrize("form", ["retrieval@asked=6", "multihop", "filtering"])
def test_stories_can_be_looked_up(form: str) -> None:
    for prompt, text in made(f"story_{form}"):
        told = text.partition("<context>")[2].partition("</context>")[0]
        parts = re.split(r"Chapter \d+:\n", told)[1:]
        bought = [(re.findall(r"bought the ([\w ]+)\.", part) or [None])[0] for part in parts]
        question = text.rpartition("</context>")[2]
        assert text.count(question.partition("\n<answer>")[0].strip()) == 2, "asked before and after"
        if "retrieval" in form:
            for line, right in zip(re.findall(r"\d+\. (.*\?)", question), prompt.references, strict=True):
                part = parts[int(re.findall(r"Chapter (\d+)", line)[0]) - 1]
                form_of = {"place": "came to the {} for", "meet": "met {}.", "buy": "bought the {}."}
                assert next(f for word, f in form_of.items() if word in line).format(right) in part
        elif form == "multihop":
            item = re.findall(r"bought the ([\w ]+)\?", question)[0]
            assert bought[bought.index(item) - 1] == prompt.answer.partition("\n")[0]  # type: ignore[union-attr]
            assert len(set(prompt.choices)) == len(prompt.choices) > 2 and prompt.answer in prompt.choices
        else:
            assert [str(at) for at, item in enumerate(bought, start=1) if item is None] == list(prompt.references)
            assert set(re.findall(r"sold the ([\w ]+)\.", told)) <= set(bought)
        some = [item for item in bought if item]
        assert len(set(some)) == len(some)


@pytest.mark.parametrize("needles", [2, 4])
def test_the_same_is_asked_for_several_times(needles: int) -> None:
    for prompt, text in made(f"mrcr@needles={needles}"):
        asked = re.search(r"User: Put (\w{10}) before the (\w+) (\w+) about a (\w+) that", text)
        assert asked
        mark, nth, form, topic = asked.groups()
        answers = re.findall(rf"User: Write a {form} about a {topic}\.\nAssistant: (.*)\n", text)
        place = ["first", "second", "third", "fourth"].index(nth)
        assert len(set(answers)) == needles and prompt.answer == mark + answers[place]
        assert set(prompt.choices) == {mark + answer for answer in answers}


def replay(facts: list[str]) -> dict[str, list[str]]:
    """The places where each person and thing has been, by reading facts one after another."""
    at: dict[str, str] = {}
    holds: dict[str, str] = {}
    ways: dict[str, list[str]] = {}
    for fact in facts:
        who = fact.partition(" ")[0]
        if took := re.search(r"took the (\w+)", fact):
            assert took[1] not in holds and ways.get(took[1], [at[who]])[-1] == at[who]
            holds[took[1]] = who
        elif dropped := re.search(r"dropped the (\w+)", fact):
            assert holds.pop(dropped[1]) == who
        else:
            at[who] = fact.rpartition(" ")[2].rstrip(".")
        for name in [who, *(thing for thing, by in holds.items() if by == who)]:
            way = ways.setdefault(name, [])
            if not way or way[-1] != at[who]:
                way.append(at[who])
    return ways


@pytest.mark.parametrize("number", [1, 2, 3])
def test_facts_lead_to_the_answer(number: int) -> None:
    for prompt, text in made(f"babilong_qa{number}", 6):
        told, _, question = text.rpartition("\n\nQuestion: ")
        hidden = told[told.rindex("Answer: ") :]
        ways = replay(re.findall(rf"(?:{'|'.join(babi._PEOPLE)}) (?:\w+ the \w+ there|\w+ to the \w+)\.", hidden))
        asked = re.search(r"(?:Where is (?:the )?|Where was the )(\w+)(?: before the (\w+))?\?", question)
        assert asked
        way = ways[asked[1]]
        right = way[-1]
        if number == 3:
            before, now = list(pairwise(way))[-1]
            assert now == asked[2]
            right = before
        assert prompt.answer == right and right in prompt.choices


def test_chains_are_written_down_link_by_link() -> None:
    for prompt, text in made("arithmetic_chain@steps=7"):
        hidden, _, question = text.partition("\nText:\n")[2].rpartition("\n\nThe values of")
        values = {name: int(value) for name, value in re.findall(r"\n(\S+) is (\d+)\.", hidden)}
        links = re.findall(r"\n(\S+) is (\S+) (plus|minus) (\d)\.", hidden)
        while len(values) < 8:
            for name, before, sign, by in links:
                if before in values:
                    values[name] = values[before] + (int(by) if sign == "plus" else -int(by))
        asked = question.partition(", in turn")[0].strip().split(", ")
        assert [str(values[name]) for name in asked] == list(prompt.references) and len(asked) == 8
    for prompt, text in made("state_tracking@steps=7"):
        hidden = text.partition("\nText:\n")[2]
        under = re.findall(r"ball is under cup (\d)", hidden)
        found = under[:1]
        for a, b in re.findall(r"Cups (\d) and (\d) change", hidden):
            found.append({a: b, b: a}.get(found[-1], found[-1]))
        assert found == list(prompt.references) and len(found) == 8


SOLUTION = "Pick two\n<Solution>\n4 + 2 = 6\n6 * 3 = 18\n18 - 5 = 13\n</Solution>"
ROUTE = "From A, take a bus to B.\nFrom B, take a train to C.\n</Route>"
TOM = "- Step 1: Ann is in the hall; Ann sees it: no.\n- Step 2: Ann is outside; Ann sees it: no."


@pytest.mark.parametrize(
    ("metric", "references", "text", "expected"),
    [
        # 2 of 3 given are right and 2 of 4 are found: 2 * 2 / (3 + 4).
        ("nodes", ["a", "b", "c", "d"], "[a, b, x]", 4 / 7),
        ("nodes", ["a", "b"], "[b, a]\nand more [c]", 1),
        ("nodes", ["a"], "Thinking of [x].\nFinal Answer: [x]\nNo.\nFinal Answer: [a]", 1),
        ("nodes", ["a"], "[]", 0),
        ("nodes", ["a"], "a", 0),
        ("chapters", ["3", "7", "9"], "3, 7 and 8</answer> 9", 2 / 4),
        ("chapters", ["3"], "<answer>3</answer>", 1),
        ("numbered", ["red hat", "Nafop"], "1. The red hat.\n2. nafop\n</answer>", 1),
        ("numbered", ["red hat", "Nafop"], "2. Nafop\n1. a blue hat", 1 / 2),
        ("item", ["red hat"], "<explanation>...</explanation><answer>The Red Hat</answer>", 1),
        ("item", ["red hat"], "red hat and shoes", 0),
        ("marked", ["0123456789abcd"], "abcd", 0),
        ("marked", ["0123456789abcd"], "0123456789abcd", 1),
        # "abxd" has "ab" and "d" of "abcd": 2 * 3 / 8.
        ("marked", ["0123456789abcd"], "0123456789 abxd", 6 / 8),
        ("marked", ["0123456789abcd"], "0123456789abcd\nUser: Write", 1),
        ("countdown", [SOLUTION], SOLUTION, 1),
        ("countdown", [SOLUTION], "<Solution>\n5 * 3 = 15\n4 - 2 = 2\n15 - 2 = 13\n</Solution>", 1),
        # 2 is used twice, 7 is no number of the puzzle, 4 + 2 is not 7, and 12 is not the target.
        ("countdown", [SOLUTION], "<Solution>\n5 * 2 = 10\n4 - 2 = 2\n10 + 3 = 13\n</Solution>", 0),
        ("countdown", [SOLUTION], "<Solution>\n7 + 2 = 9\n9 - 5 = 4\n4 + 4 = 8\n</Solution>", 0),
        ("countdown", [SOLUTION], "<Solution>\n4 + 2 = 7\n7 * 3 = 21\n21 - 8 = 13\n</Solution>", 0),
        ("countdown", [SOLUTION], "<Solution>\n4 + 2 = 6\n6 * 3 = 18\n18 - 6 = 12\n</Solution>", 0),
        ("countdown", [SOLUTION], "<Solution>\n4 + 2 = 6\n</Solution>", 0),
        ("countdown", [SOLUTION], "13", 0),
        ("countdown_partial", ["a\nb\nc\nd\n<Solution>\nx"], "a\nb\nx\nd\n<Solution>", 2 / 4),
        ("route", [ROUTE], ROUTE + "\nmore", 1),
        ("route", [ROUTE], "From A, take a bus to B.\n</Route>", 0),
        ("route_partial", [ROUTE], "From A, take a bus to B.\nFrom B, take a bus to C.", 1 / 2),
        ("route_partial", [ROUTE], "", 0),
        ("tom", [TOM], TOM.replace("the ", "").upper().replace(";", ","), 1),
        ("tom", [TOM], TOM + "\n\nThe red box and the blue bag are in the hall.", 1),
        ("tom", [TOM], TOM + "\n\nThe red box.\nStep 1: Ben leaves.\n- Step 1: Ben is outside; Ben sees it: no.", 1),
        ("tom", [TOM], TOM.replace("\n", "\n\n"), 1),
        ("tom", [TOM], TOM + "\n- Step 3: Ann is outside; Ann sees it: no.", 0),
        ("tom", [TOM], TOM.partition("\n")[0], 0),
        ("tom", [TOM], "", 0),
        ("tom_partial", [TOM], TOM.replace("outside", "inside"), 1 / 2),
        ("tom_partial", [TOM], TOM.partition("\n")[0] + "\n\nThe red box.\n- Step 1: Ann is outside.", 1 / 2),
    ],
)
def test_metrics_by_hand(metric: str, references: list[str], text: str, expected: float) -> None:
    asked = Prompt((1,), references[0], metric=metric, references=tuple(references))
    assert score(asked, text) == pytest.approx(expected)


def test_nothing_asked_and_nothing_answered_is_right() -> None:
    for metric, empty in (("nodes", "[]"), ("chapters", "none"), ("numbered", "")):
        assert METRICS[metric](empty, (), ()) == 1
    assert METRICS["nodes"]("[a]", (), ()) == 0 and METRICS["chapters"]("4", (), ()) == 0


def test_partial_scores_are_asked_for() -> None:
    for task in ("countdown", "path", "tom"):
        whole, partial = (
            make_prompts(f"longproc_{task}@{told}", byte_level(), length=6000, samples=1, seed=0)[0]
            for told in ("partial=0", "partial=1")
        )
        assert whole.input_ids == partial.input_ids and partial.metric == f"{whole.metric}_partial"
        first = str(whole.answer).partition("\n")[0]
        assert score(whole, first) == 0 < score(partial, first) < 1
