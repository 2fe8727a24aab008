"""GraphWalks (OpenAI 2025): a directed graph as a list of edges, and the nodes that an operation on it gives.

A prompt is prefix + padding + worked example + edges + operation. Nodes are named by the first 10 hexadecimal digits of
the md5 of their number. The answer names at least one node and at most 12; their order does not count.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from profiling.prompts.filling import laid_out, whole_items
from profiling.prompts.kind import Kind, Parameter, Prompt, Wanted

Edge = tuple[str, str]
_EDGE = "{} -> {}\n"
_ASKED = {
    "bfs": "Operation: breadth-first search from node {node} with depth {depth}: the nodes whose shortest way from it "
    "has exactly that many edges.",
    "parents": "Operation: the parents of node {node}: the nodes with an edge to it, itself left out.",
}
_HEAD = (
    "Below is an operation on a small directed graph with its answer, then a larger graph and an operation on it.\n\n"
)
_GRAPH = "The graph has these edges:\n"
_EXAMPLE = (("k1", "k2"), ("k1", "k3"), ("k2", "k4"), ("k3", "k4"), ("k4", "k1"), ("k4", "k5"))
_EXAMPLE_NODE = {"bfs": "k1", "parents": "k4"}
_ANSWER = "\nFinal Answer:"
_MOST = 12
# Digits of a node's name, each of which may be a token, and what may come with them.
_NAME = 12
_SAMPLE, _TRIES = 32, 256
# Answers for other nodes, to choose from.
_WRONG = 3


def graphwalks(wanted: Wanted, *, depth: int = 2, degree: float = 2.0) -> list[Prompt]:
    """Random graphs of as many edges as fit, `degree` for each node on average."""
    encode, operation = wanted.encode, wanted.name.partition("_")[2]

    def question(node: str, at: int) -> str:
        return "\n" + _ASKED[operation].format(node=node, depth=at) + _ANSWER

    shown = "".join(_EDGE.format(*edge) for edge in _EXAMPLE)
    start = _EXAMPLE_NODE[operation]
    answered = _listed(answer_nodes(_EXAMPLE, operation, start, 1))
    head = encode(f"{_HEAD}{_GRAPH}{shown}{question(start, 1)} {answered}\n\n{_GRAPH}")

    def one(rng: random.Random) -> Prompt:
        asked = len(encode(question("", depth))) + _NAME
        room = wanted.room(head, least=asked) - asked
        sizes = encode.each([_EDGE.format(_name(at), _name(at + 1)) for at in range(_SAMPLE)])
        nodes = max(4, int(room * _SAMPLE / sum(map(len, sizes)) / degree))
        edges: list[Edge] = []
        lines = whole_items(encode, _lines(edges, nodes, rng), room)
        edges = edges[: len(lines)]
        by_start, steps = _by(edges, operation), depth if operation == "bfs" else 1
        answers: dict[str, list[str]] = {}
        for _ in range(_TRIES):
            node = _name(rng.randrange(nodes))
            if 1 <= len(found := _reached(by_start, node, steps)) <= _MOST:
                answers.setdefault(node, found)
            if len(answers) > _WRONG:
                break
        if answers:
            node, found = next(iter(answers.items()))
            ids = laid_out(wanted, head, *lines, encode(question(node, depth)))
            choices = tuple(dict.fromkeys(map(_listed, answers.values())))
            return Prompt(ids, _listed(found), metric="nodes", references=tuple(found), choices=choices)
        why = f"of {len(edges)} edges none leads to an answer; try {2 * wanted.length}"
        raise wanted.too_small(why)

    return wanted.prompts(one)


def answer_nodes(edges: tuple[Edge, ...] | list[Edge], operation: str, node: str, depth: int) -> list[str]:
    """The nodes that an operation gives, in the order in which they are met."""
    return _reached(_by(edges, operation), node, depth if operation == "bfs" else 1)


def _by(edges: tuple[Edge, ...] | list[Edge], operation: str) -> dict[str, list[str]]:
    """Where each node leads: forwards along edges, or backwards for parents."""
    found: dict[str, list[str]] = {}
    for start, end in edges:
        start, end = (start, end) if operation == "bfs" else (end, start)
        found.setdefault(start, []).append(end)
    return found


def _reached(by_start: dict[str, list[str]], node: str, depth: int) -> list[str]:
    seen, level = {node}, [node]
    for _ in range(depth):
        level = list(dict.fromkeys(end for start in level for end in by_start.get(start, ()) if end not in seen))
        seen.update(level)
    return level


def _lines(edges: list[Edge], nodes: int, rng: random.Random) -> Iterator[str]:
    """Edges without end, none twice as long as there are others; what is given is put into `edges`."""
    taken: set[tuple[int, int]] = set()
    while len(taken) < nodes * (nodes - 1):
        pair = rng.randrange(nodes), rng.randrange(nodes)
        if pair[0] != pair[1] and pair not in taken:
            taken.add(pair)
            edges.append((_name(pair[0]), _name(pair[1])))
            yield _EDGE.format(*edges[-1])


def _name(number: int) -> str:
    return hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()[:10]


def _listed(nodes: list[str]) -> str:
    return f"[{', '.join(nodes)}]"


def _kind(operation: str, asks: str, *parameters: Parameter) -> Kind:
    return Kind(
        name=f"graphwalks_{operation}",
        make=graphwalks,
        parameters=(*parameters, Parameter("degree", float, "edges that leave a node on average (2)", 0.5, 16)),
        asks=asks,
        scored="F1 of the set of nodes; both empty is 1",
        source="GraphWalks, OpenAI 2025",
    )


_FAR = Parameter("depth", int, "how many edges (2)", 1, 16)
KINDS = (
    _kind("bfs", "the nodes of a graph that are so many edges from one", _FAR),
    _kind("parents", "the nodes of a graph with an edge to one"),
)
