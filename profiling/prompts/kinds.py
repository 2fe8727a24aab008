"""Every kind of task: what it asks, what it takes, how its answers are scored and where it comes from, as one table.

docs/tasks.md says the same at more length; `python -m profiling.tasks` prints this.
"""

from __future__ import annotations

from profiling.prompts.kind import Family, Kind, Parameter

_DEPTH = Parameter("depth", float, "where it lies: 0 is the start, 1 the end; without it at random", 0, 1)
_TASK = Parameter("task", str, "which of the suite's tasks it is, where the file does not say")
_BEGINS = "the answer begins with the right one"

_FIRST = Parameter("question_first", int, "1 asks before the text, and only points back at its end (0)", 0, 1)
_QUESTIONS = Parameter("questions", int, "how many questions share a context (8)", 1, 1000)
_SCBENCH = "a shared context and later turns: SCBench, Li et al. 2024"
_TURN = "the answer begins with the right one; the question comes in a later turn"
_INSIDE = "the share of the answers inside the prompt of which every token is the likeliest"
_RULER = "RULER, Hsieh et al. 2024"
_SHARE = "the share of the answers that are named"


def _needles(variant: str, asks: str) -> Kind:
    """One of RULER's eight, whose haystack is the user's text where it is a text at all."""
    return Kind(
        name=variant,
        maker="profiling.prompts.needles:needles",
        takes_file="no" if variant in ("niah_single_1", "niah_multikey_2", "niah_multikey_3") else "may",
        parameters=(_DEPTH,) if "single" in variant else (),
        fixed={"variant": variant},
        asks=asks,
        scored=_SHARE,
        source=_RULER,
    )


def _later(form: str, asks: str, *parameters: Parameter, family: Family = "retrieval") -> Kind:
    """A task whose questions come in a later turn."""
    return Kind(
        name=form,
        maker="profiling.prompts.turns:turns",
        parameters=(_QUESTIONS, *parameters),
        fixed={"form": form},
        asks=asks,
        scored=_TURN,
        source=_SCBENCH,
        family=family,
    )


def _recalled(form: str, asks: str, family: Family, source: str) -> Kind:
    """A task whose answers stand in the prompt itself."""
    return Kind(
        name=form,
        maker="profiling.prompts.recalls:recalls",
        fixed={"form": form},
        asks=asks,
        scored=_INSIDE,
        source=source,
        family=family,
    )


_PARTIAL = Parameter("partial", int, "1 scores the share of the answer before its first mistake (0)", 0, 1)
_LONGPROC = "LongProc, Ye et al. 2025"
_STORY = "Sparse Frontier, Nawrot et al. 2025"
_LINKS = Parameter("steps", int, "how many links follow the first (16)", 1, 10_000)
_IN_TURN = "the share of the values in turn before the first wrong one"


def _graphwalks(operation: str, asks: str, *parameters: Parameter) -> Kind:
    return Kind(
        name=f"graphwalks_{operation}",
        maker="profiling.prompts.graphs:graphwalks",
        parameters=(*parameters, Parameter("degree", float, "edges that leave a node on average (2)", 0.5, 16)),
        fixed={"operation": operation},
        asks=asks,
        scored="F1 of the set of nodes; both empty is 1",
        source="GraphWalks, OpenAI 2025",
        family="chain",
    )


def _procedure(task: str, maker: str, asks: str, scored: str, parameter: Parameter, family: Family = "chain") -> Kind:
    """One of LongProc's, whose answer is long."""
    return Kind(
        name=f"longproc_{task}",
        maker=f"profiling.prompts.{maker}",
        parameters=(parameter, _PARTIAL),
        asks=asks,
        scored=scored,
        source=_LONGPROC,
        family=family,
    )


def _story(form: str, asks: str, scored: str, family: Family, *parameters: Parameter) -> Kind:
    return Kind(
        name=f"story_{form}",
        maker="profiling.prompts.stories:stories",
        parameters=parameters,
        fixed={"form": form},
        asks=asks,
        scored=scored,
        source=_STORY,
        family=family,
    )


def _babilong(number: int, asks: str, family: Family) -> Kind:
    return Kind(
        name=f"babilong_qa{number}",
        maker="profiling.prompts.babi:babilong",
        takes_file="may",
        fixed={"number": number},
        asks=asks,
        scored=_BEGINS,
        source="BABILong, Kuratov et al. 2024",
        family=family,
    )


def _linked(form: str, asks: str, source: str) -> Kind:
    """A task whose answer has all links of a chain."""
    return Kind(
        name=form,
        maker="profiling.prompts.long_answers:long_answers",
        takes_file="may",
        parameters=(_LINKS,),
        fixed={"form": form},
        asks=asks,
        scored=_IN_TURN,
        source=source,
        family="chain",
    )


_KINDS = (
    Kind(
        name="kv_retrieval",
        maker="profiling.prompts.retrieval:kv_retrieval",
        parameters=(_FIRST,),
        asks="the value of one UUID in a JSON object of UUIDs",
        scored=_BEGINS,
        source="Liu et al. 2023, section 3",
    ),
    Kind(
        name="passkey",
        maker="profiling.prompts.retrieval:passkey",
        takes_file="may",
        parameters=(_DEPTH,),
        asks="a seven-digit number hidden in a text",
        scored=_BEGINS,
        source="Mohtashami & Jaggi 2023",
    ),
    Kind(
        name="number",
        maker="profiling.prompts.retrieval:number",
        takes_file="may",
        parameters=(_DEPTH,),
        asks="ten digits, many of them alike, hidden in a text",
        scored=_BEGINS,
        source="Retrieve.Number of InfiniteBench, Zhang et al. 2024",
    ),
    Kind(
        name="needle",
        maker="profiling.prompts.retrieval:needle",
        takes_file="may",
        parameters=(_DEPTH, _FIRST),
        asks="one sentence about an invented person, hidden in a text",
        scored=_BEGINS,
        source="needle in a haystack, Kamradt 2023",
    ),
    Kind(
        name="line_retrieval",
        maker="profiling.prompts.lines:line_retrieval",
        parameters=(_FIRST,),
        asks="the number of one word in a list of words with numbers",
        scored=_BEGINS,
        source="LongEval, Li et al. 2023",
    ),
    Kind(
        name="two_stage_retrieval",
        family="chain",
        maker="profiling.prompts.lines:two_stage_retrieval",
        asks="the box of an owner, then the value of that box",
        scored="both are named in turn",
        source="OmniKV, appendix A",
    ),
    Kind(
        name="multi_hop",
        family="chain",
        maker="profiling.prompts.hops:multi_hop",
        takes_file="may",
        asks="somebody's relation's relation, step by step",
        scored="both are named in turn",
        source="OmniKV, section 3",
    ),
    _later("line_turns", "the number of one word in a list of words with numbers"),
    _later("kv_turns", "the number of one word in a JSON object of words with numbers"),
    _later(
        "chain_turns",
        "the number of a word that has that of another, in a list in any order",
        Parameter("hops", int, "how many words take a number from another (1)", 1, 100),
        family="chain",
    ),
    _recalled("line_asked", "numbers of words by questions between the lines", "retrieval", "LongEval, Li et al. 2023"),
    _recalled("chain", "numbers that words take from words far before them", "chain", "variable tracking, RULER"),
    Kind(
        name="facts",
        maker="profiling.prompts.recalls:recalls",
        parameters=(_QUESTIONS,),
        fixed={"form": "facts", "questions": 8},
        asks="what `line_asked` and `chain` ask in one prompt, and more in later turns",
        scored=f"{_INSIDE}; after the first question of a context, whether {_BEGINS}",
        source="LongEval, Li et al. 2023; RULER, Hsieh et al. 2024",
    ),
    _recalled(
        "label_map", "the random label of a word that had it far before", "in-context", "many-shot, Agarwal et al. 2024"
    ),
    _recalled(
        "repeats", "passages of random words that came far before", "copying", "induction heads, Olsson et al. 2022"
    ),
    _recalled(
        "dictionary", "entries of a dictionary that came far before", "copying", "induction heads, Olsson et al. 2022"
    ),
    _needles("niah_single_1", "the number of a word, in a haystack of one line over and over"),
    _needles("niah_single_2", "the number of a word, in a text"),
    _needles("niah_single_3", "the UUID of a word, in a text"),
    _needles("niah_multikey_1", "the number of one of four words, in a text"),
    _needles("niah_multikey_2", "the number of one word, in nothing but numbers of words"),
    _needles("niah_multikey_3", "the UUID of one UUID, in nothing but such"),
    _needles("niah_multivalue", "all four numbers of a word, in a text"),
    _needles("niah_multiquery", "the numbers of four words, in a text"),
    Kind(
        name="vt",
        family="chain",
        maker="profiling.prompts.variables:variable_tracking",
        parameters=(
            Parameter("chains", int, "how many values are handed on (1)", 1, 1000),
            Parameter("hops", int, "how many variables take a value from the one before (4)", 1, 1000),
        ),
        asks="all variables that have a value, by way of one another",
        scored=_SHARE,
        source=_RULER,
    ),
    Kind(
        name="cwe",
        family="aggregation",
        maker="profiling.prompts.frequencies:common_words",
        parameters=(
            Parameter("words", int, "how many words are common (10)", 1, 1000),
            Parameter("common", int, "how often these come up (30; 6 below 4096 tokens)", 2),
            Parameter("uncommon", int, "how often the others do (3; 1 below 4096 tokens)", 1),
        ),
        asks="the ten most common words of a list",
        scored=_SHARE,
        source=_RULER,
    ),
    Kind(
        name="fwe",
        family="aggregation",
        maker="profiling.prompts.frequencies:frequent_words",
        parameters=(Parameter("alpha", float, "how fast counts fall with the rank (2)", 1.01, 4),),
        asks="the three most frequent code words of a text",
        scored=_SHARE,
        source=_RULER,
    ),
    Kind(
        name="qa_1",
        family="other",
        maker="profiling.prompts.documents:questions",
        takes_file="must",
        fixed={"task": "qa_1"},
        asks="a question of your file, out of its document and those of other questions (RULER: SQuAD)",
        scored="any of its answers is named",
        source=_RULER,
    ),
    Kind(
        name="qa_2",
        family="other",
        maker="profiling.prompts.documents:questions",
        takes_file="must",
        fixed={"task": "qa_2"},
        asks="a question that takes several documents, among those of other questions (RULER: HotpotQA)",
        scored="any of its answers is named",
        source=_RULER,
    ),
    _graphwalks(
        "bfs",
        "the nodes of a graph that are so many edges from one",
        Parameter("depth", int, "how many edges (2)", 1, 16),
    ),
    _graphwalks("parents", "the nodes of a graph with an edge to one"),
    _procedure(
        "countdown",
        "countdown:countdown",
        "the search for a target from four numbers, written down, and its solution",
        "the solution's equations are true and reach the target",
        Parameter("lines", int, "lines of the search at most (20)", 4, 10_000),
        "other",
    ),
    _procedure(
        "path",
        "routes:paths",
        "the route between two of many cities, step by step",
        "every step is right",
        Parameter("steps", int, "steps of the route (24)", 1, 10_000),
    ),
    _procedure(
        "tom",
        "minds:tracking",
        "where a person and an object are after each step, and what the person believes",
        "every line is right, but for case, punctuation and small words",
        Parameter("steps", int, "steps of the story (10)", 1, 10_000),
    ),
    _story(
        "retrieval",
        "places, people and items of chapters of a story",
        "the share of the numbered answers that are right",
        "retrieval",
        Parameter("asked", int, "how many answers (16)", 1, 1000),
    ),
    _story("multihop", "the item that was bought just before another", "the item is named", "chain"),
    _story(
        "filtering",
        "the chapters in which nothing is bought",
        "intersection over union; both empty is 1",
        "aggregation",
    ),
    Kind(
        name="mrcr",
        maker="profiling.prompts.repeated_asks:repeated_asks",
        parameters=(Parameter("needles", int, "how often the same is asked for (2)", 1, 8),),
        asks="the answer to the n-th of several identical asks in a chat, once more",
        scored="0 without the random string before it, else the ratio of difflib's SequenceMatcher",
        source="MRCR, Vodrahalli et al. 2024; OpenAI 2025",
        family="copying",
    ),
    _babilong(1, "where somebody is", "retrieval"),
    _babilong(2, "where a thing is that somebody carried", "chain"),
    _babilong(3, "where a thing was before it came to a place", "chain"),
    _linked(
        "arithmetic_chain",
        "values that are sums and differences of one another, all of them",
        "variable tracking, RULER",
    ),
    _linked(
        "state_tracking", "which cup a ball is under after each of many swaps", "state tracking, Kim & Schuster 2023"
    ),
    Kind(
        name="text",
        family="text",
        maker="profiling.prompts.texts:windows",
        takes_file="must",
        asks="nothing: windows of a text, for perplexity",
        scored="perplexity",
        source="your file",
    ),
    Kind(
        name="prose",
        family="text",
        maker="profiling.prompts.texts:prose",
        asks="nothing: windows of Python's own documentation, where no text of the user's is at hand",
        scored="perplexity",
        source="Python's help() and docstrings",
    ),
    Kind(
        name="jsonl",
        family="other",
        maker="profiling.prompts.texts:lines",
        takes_file="must",
        asks="what your prompts ask",
        scored=_BEGINS,
        source="your file",
    ),
    Kind(
        name="infinitebench",
        family="other",
        maker="profiling.prompts.infinitebench:infinitebench",
        takes_file="must",
        parameters=(_TASK,),
        exact=False,
        asks="what the records of one of InfiniteBench's files ask",
        scored="as InfiniteBench scores the task",
        source="InfiniteBench, Zhang et al. 2024",
    ),
    Kind(
        name="longbench",
        family="other",
        maker="profiling.prompts.longbench:longbench",
        takes_file="must",
        parameters=(_TASK,),
        exact=False,
        asks="what the records of one of LongBench's files ask",
        scored="as LongBench scores the dataset",
        source="LongBench, Bai et al. 2024",
    ),
    Kind(
        name="ruler",
        family="other",
        maker="profiling.prompts.ruler_files:ruler",
        takes_file="must",
        parameters=(_TASK,),
        exact=False,
        asks="what the records of one of RULER's own files ask",
        scored="all references named; any for qa",
        source=_RULER,
    ),
)
KINDS = {kind.name: kind for kind in _KINDS}
# What is calibrated and evaluated on by default: docs/results.md has the table that they were chosen by. Questions of a
# later turn share a context: 16 of them cost little more than one.
DEFAULT_TASKS = ("line_turns@questions=16", "line_asked", "chain", "prose")
# What a search is judged on by default: the same kinds of answers in a third of the prefills.
JUDGED_TASKS = ("facts", "prose")
TASKS = ", ".join(KINDS) + " (python -m profiling.tasks explains them)"
