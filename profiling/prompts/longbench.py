"""LongBench's files (Bai et al. 2024): JSON lines with input, context, answers, all_classes and dataset.

LongBench-E has the same fields. The words around a record's own are ours, so that scores compare methods on one model
and not with published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from artifacts import HeadwiseError
from profiling.prompts.kind import Kind, Prompt, Wanted
from profiling.prompts.suites import TASK, Asked, Record, name_in, prompts_of

_QA = (
    "Read the text below, there is a question about it at the end.\n\n{context}\n\n"
    "Answer from the text above in a few words, without an explanation.\n\nQuestion: {input}\nAnswer:"
)
_QASPER = (
    "Read the article below, there is a question about it at the end.\n\n{context}\n\n"
    "Answer from the article above in a few words, without an explanation. Answer yes or no where that is asked, and "
    "unanswerable where the article does not say.\n\nQuestion: {input}\nAnswer:"
)
_QA_ZH = "阅读下面的内容, 最后有一个问题.\n\n{context}\n\n根据上面的内容简短地回答, 不要解释.\n\n问题: {input}\n回答:"
_SUMMARY = "Read the text below.\n\n{context}\n\nSummarise the text above on one page.\n\nSummary:"
_QUERY = "Read the transcript below.\n\n{context}\n\nAnswer from it in a few sentences.\n\nQuery: {input}\nAnswer:"
_SUMMARY_ZH = "阅读下面的会议记录.\n\n{context}\n\n总结上面的会议.\n\n总结:"
_EXAMPLES = "Go on as in the examples.\n\n{context}\n{input}"
_EXAMPLES_APART = "Go on as in the examples.\n\n{context}\n\n{input}"
_COUNT = (
    "Some of the paragraphs below come up more than once.\n\n{context}\n\n"
    "How many different paragraphs are there above? Answer with the number alone.\n\nNumber of different paragraphs: "
)
_WHICH = (
    "Read the numbered paragraphs below.\n\n{context}\n\nThis is a summary of one of them:\n\n{input}\n\n"
    "Which one is it? Answer with its number, such as Paragraph 1.\n\nIt is: "
)
_WHICH_ZH = (
    "阅读下面有编号的段落.\n\n{context}\n\n下面是其中一段的摘要:\n\n{input}\n\n"
    "是哪一段? 只回答编号, 例如 段落1.\n\n是: "
)
_CODE = "Write the next line of this code.\n{context}{input}Next line:\n"


@dataclass(frozen=True)
class _Dataset:
    form: str
    metric: str
    new_tokens: int


# The metrics and lengths of answers are LongBench's own.
DATASETS = {
    "narrativeqa": _Dataset(_QA, "f1", 128),
    "qasper": _Dataset(_QASPER, "f1", 128),
    "multifieldqa_en": _Dataset(_QA, "f1", 64),
    "multifieldqa_zh": _Dataset(_QA_ZH, "f1_zh", 64),
    "hotpotqa": _Dataset(_QA, "f1", 32),
    "2wikimqa": _Dataset(_QA, "f1", 32),
    "musique": _Dataset(_QA, "f1", 32),
    "dureader": _Dataset(_QA_ZH, "rouge_l_zh", 128),
    "gov_report": _Dataset(_SUMMARY, "rouge_l", 512),
    "qmsum": _Dataset(_QUERY, "rouge_l", 512),
    "multi_news": _Dataset(_SUMMARY, "rouge_l", 512),
    "vcsum": _Dataset(_SUMMARY_ZH, "rouge_l_zh", 512),
    "trec": _Dataset(_EXAMPLES, "first_line+classes", 64),
    "triviaqa": _Dataset(_EXAMPLES_APART, "first_line+f1", 32),
    "samsum": _Dataset(_EXAMPLES_APART, "first_line+rouge_l", 128),
    "lsht": _Dataset(_EXAMPLES, "first_line+classes", 64),
    "passage_count": _Dataset(_COUNT, "numbers", 32),
    "passage_retrieval_en": _Dataset(_WHICH, "numbers", 32),
    "passage_retrieval_zh": _Dataset(_WHICH_ZH, "numbers", 32),
    "lcc": _Dataset(_CODE, "code_line", 64),
    "repobench-p": _Dataset(_CODE, "code_line", 64),
}


def longbench(wanted: Wanted, *, task: str | None = None) -> list[Prompt]:
    """Prompts of one of LongBench's files; the record says which dataset it is of, or else the file's name."""

    def ask(record: Record) -> Asked:
        given = task or (record.text("dataset") if "dataset" in record else wanted.file.stem)
        name = name_in(wanted.name, DATASETS, given.removesuffix("_e"), record.place)
        dataset = DATASETS[name]
        classes = record.texts("all_classes") if "all_classes" in record else ()
        if dataset.metric.endswith("classes") and not classes:
            raise HeadwiseError(f"{record.place}: {name} needs all_classes, the classes to choose from")
        # A context may hold braces, so it goes in last and as it is.
        text = dataset.form.replace("{input}", record.text("input"), 1).replace("{context}", record.text("context"), 1)
        return Asked(text, record.texts("answers"), dataset.metric, dataset.new_tokens, classes)

    return prompts_of(wanted, ask)


KINDS = (
    Kind(
        name="longbench",
        make=longbench,
        takes_file="must",
        parameters=(TASK,),
        asks="what the records of one of LongBench's files ask",
        scored="as LongBench scores the dataset",
        source="LongBench, Bai et al. 2024",
    ),
)
