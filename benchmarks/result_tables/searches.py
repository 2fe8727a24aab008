"""Searches: proven losses, budgets, minutes, and the errors of their gate."""

from __future__ import annotations

from typing import Any

from .table import Results, link, markdown, matching, one, seconds, span, table, times

# Rows of the table of proofs: name, artifact in examples/ where there is one.
_PROVEN = {
    ("smollm2", 8192): ("SmolLM2", "smollm2"),
    ("qwen-0.5b", 4096): ("0.5B", None),
    ("qwen-0.5b", 8192): ("0.5B", "qwen-0.5b"),
    ("qwen-0.5b", 16384): ("0.5B", None),
    ("qwen-1.5b", 4096): ("1.5B", None),
    ("qwen-1.5b", 8192): ("1.5B", "qwen-1.5b"),
    ("gemma3", 4096): ("Gemma-3", None),
}
_QWEN = (
    ("0.5B, bf16", "qwen_0.5b_searches_bf16"),
    ("0.5B, float32", "qwen_0.5b_4096_search"),
    ("1.5B, float32", "qwen_1.5b_4096_search"),
)


@table("proofs")
def proofs_table(results: Results) -> str:
    """Losses that the searches by the limits proved."""
    file = results["searches_by_limits"]
    rows = []
    for row in file.part("row"):
        name, example = _PROVEN[row["model"], row["tokens"]]
        artifact = f" ([artifact](../examples/{example}.yaml))" if example else ""
        verdict = row["verdict"]
        first = row["first_token"]
        answers = one(
            file.part("tasks"), model=row["model"], tokens=row["tokens"], task="all answers"
        )
        rows.append(
            [
                f"{name}, {row['tokens']:,}{artifact}",
                f"{row['minutes']}",
                f"{row['spent']:.3f}",
                f"{seconds(first['dense'])}, {seconds(first['headwise'])}",
                times(first["speedup"]),
                f"{verdict['lost_high']:.1%}",
                f"{verdict['lost']:.1%}",
                _counted(answers, ".1%"),
                f"{verdict['perplexity_high']:+.1%}",
                f"{verdict['perplexity']:+.1%}",
            ]
        )
    header = ["model, tokens", "minutes", "budget", "first token, s: fastest dense, artifact"]
    header += ["speedup", "lost answers: at most", "measured", "counted"]
    return markdown([*header, "perplexity: at most", "measured"], rows)


def _counted(row: dict[str, Any], spec: str) -> str:
    """The plain count of lost less won answers, of dense attention's correct ones."""
    fewer = (row["lost"] - row["won"]) / row["dense_right"]
    return f"{fewer:{spec}} {span(row['fewer_low'], row['fewer_high'], spec)}"


@table("Qwen searches")
def qwen_table(results: Results) -> str:
    """Searches of Qwen2.5-Coder at a budget of 0.25."""
    rows = []
    for name, file in _QWEN:
        for row in results[file].part("row"):
            rows.append(_qwen(results, name, file, row))
    header = ["model, tokens", "density", "spent", "correct answers: dense, artifact", "fewer"]
    header += ["perplexity", "speedup of attention", "first token, s: fastest dense, artifact"]
    return markdown([*header, "speedup", "minutes (doctor)"], rows)


def _qwen(results: Results, name: str, file: str, row: dict[str, Any]) -> list[str]:
    here = {"length": row["length"]}
    answers = one(results[file].part("tasks"), task="all answers", **here)
    prose = one(results[file].part("tasks"), task="prose", **here)
    measured = results[file].part("measurements")
    first = one(measured, name="seconds to the first token", **here)
    attention = next(
        each
        for each in matching(measured, name="attention of one prefill, index build included")
        if each["length"] == row["length"] and each["baseline_name"] != "predicted"
    )
    right = answers["dense_right"] - answers["lost"] + answers["won"]
    speedup = times(first["baseline"] / first["value"])
    if row["speedup_bounds"] is not None:
        speedup += f" {span(*row['speedup_bounds'], '.2f')}"
    # Searches beside other work: half of the time on two cores.
    minutes = row["minutes"] if "minutes" in row else row["cpu_seconds"] / 120
    doctor = row["doctor_minutes"]
    return [
        f"{name}, {link(format(row['length'], ','), file)}",
        f"{row['density']:.3f}",
        f"{row['spent']:.3f}",
        f"{answers['dense_right']}, {right}",
        _counted(answers, ".0%"),
        f"{prose['perplexity_ratio'] - 1:+.1%}",
        times(attention["baseline"] / attention["value"]),
        f"{seconds(first['baseline'])}, {seconds(first['value'])}",
        speedup,
        f"{minutes:.0f}" + (f" ({doctor:.0f})" if doctor is not None else ""),
    ]


@table("default searches")
def default_table(results: Results) -> str:
    """Six default searches of SmolLM2, a row each."""
    file = results["smollm2_search"]
    rows = []
    for run in sorted(file.part("runs"), key=lambda run: (-run["length"], run["seed"])):
        took = run["attention_seconds"]
        sdpa, kernel, own, predicted = (
            took[name]
            for name in (
                "dense attention by sdpa",
                "dense attention by Headwise's kernel",
                "headwise",
                "predicted",
            )
        )
        of_run = matching(file.part("runs: tasks"), length=run["length"], seed=run["seed"])
        asked = one(of_run, task="facts/asked")
        prose = one(of_run, task="prose")
        right = asked["dense_right"] - asked["lost"] + asked["won"]
        minutes, rest = divmod(run["wall_seconds"], 60)
        rows.append(
            [
                f"{run['length']:,}, {run['seed']}",
                f"{minutes}:{rest:02}",
                f"{run['density']:.2f}",
                f"{sdpa:.2f}",
                f"{kernel:.2f}",
                f"{own:.2f}",
                f"{times(min(sdpa, kernel) / own)} ({predicted / own - 1:.0%})",
                f"{max(each['kl'] for each in of_run):.3f}",
                f"{prose['perplexity_ratio'] - 1:+.2%}",
                f"{asked['dense_right'] / asked['prompts']:.3f}",
                f"{right / asked['prompts']:.3f}",
            ]
        )
    header = ["tokens, seed", "minutes", "density", "attention of a prefill, s: sdpa"]
    header += ["Headwise's dense kernel", "artifact", "speedup (error of the prediction)"]
    header += ["KL of the worst task", "perplexity of `prose`", "`facts/asked`: dense"]
    return markdown([*header, "artifact"], rows)


@table("search by the limits")
def limits_table(results: Results) -> str:
    """A search by the limits, and the one before it."""
    rows = []
    for row in results["smollm2_8192_search_limits"].part("row"):
        first = row["first_token"]
        value, low, high = row["counted_percent"]
        verdict = row.get("verdict")
        bounds = ["", ""]
        if verdict is not None:
            bounds = [f"{verdict['lost_high']:.1%}", f"{verdict['perplexity_high']:.1%}"]
        rows.append(
            [
                row["search"],
                f"{row['minutes']:.1f}",
                f"{row['spent']:.3f}",
                f"{seconds(first['dense'])}, {seconds(first['headwise'])}",
                f"{times(first['dense'] / first['headwise'])} "
                + span(first["speedup_low"], first["speedup_high"], ".2f"),
                f"{value:g}% ({low:g}% to {high:g}%)",
                *bounds,
            ]
        )
    header = ["search", "minutes", "budget", "first token, s: fastest dense, artifact", "speedup"]
    header += ["correct answers, counted", "fewer answers: at most", "more perplexity: at most"]
    return markdown(header, rows)


@table("search times")
def times_table(results: Results) -> str:
    """A dense prefill and a search with a budget of 0.25, by model size."""
    rows = []
    for row in results["search_times"].rows:
        estimated = ", estimated" if row["estimated"] else ""
        rows.append(
            [
                str(row["model"]),
                f"{row['processor']}, {row['dtype']}",
                f"{row['weights_gib']:g} GiB",
                f"{row['tokens']:,}",
                f"{row['prefill_seconds']:g} s{estimated}",
                f"{row['search_minutes']:g} minutes{estimated}",
            ]
        )
    header = ["model", "processor, dtype", "weights", "tokens", "a dense prefill"]
    return markdown([*header, "a search, budget 0.25"], rows)


@table("gate errors")
def gate_table(results: Results) -> str:
    """Frequencies at which a simulated search proves a loss at its limit, and a small one."""
    file = results["gate_errors"].part("row")
    correlations = sorted({row["correlation"] for row in file})
    rows = []
    for answers in sorted({row["answers_of_4_contexts"] for row in file}):
        of_answers = matching(file, answers_of_4_contexts=answers)
        cells = [f"{answers}"]
        for correlation in correlations:
            row = one(of_answers, correlation=correlation)
            cells.append(f"{row['error']:.1%} {span(row['error_low'], row['error_high'], '.1%')}")
        small = one(of_answers, correlation=0.02)
        cells.append(f"{small['proven_at_0.01']:.0%}, {small['contexts_at_0.01']:.0f} contexts")
        cells.append(f"{small['proven_at_0.02']:.0%}, {small['contexts_at_0.02']:.0f} contexts")
        rows.append(cells)
    header = ["correct answers in four contexts"]
    header += [f"correlation {correlation:g}" for correlation in correlations]
    return markdown([*header, "proven at a loss of 1%", "at 2%"], rows)
