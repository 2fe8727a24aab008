"""headwise doctor: hardware, kernels and models of this machine, and the gain to expect on it.

Looks at the processor, the compiled kernels, GPUs, packages, models at hand and the cache folder,
and measures for a few seconds how fast dense attention and a matrix product are. On each device it
compares the kernel with the fp32 reference. The exit status is 3 where something is wrong, such as
kernels that cannot be compiled: then attention is served by the slow reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from artifacts.cli import arguments
from artifacts.cli.command import FOUND, ArgumentParser, run_command
from artifacts.cli.interrupt import while_importing
from profiling.speed.config import DOCTOR_LENGTH


def lines_of(name: str, report: Mapping[str, Any]) -> list[str]:
    """The lines of a part for people; the report has this part and those before it."""
    part = report[name]
    if name == "processor":
        if part["memory"]:
            memory = f", {part['memory'] / 2**30:.0f} GiB"
        else:
            memory = ""
        instructions = " ".join(part["instructions"]) or "no instructions that the kernels know"
        return [
            f"processor  {part['name']}, {part['cores']} cores, {part['threads']} threads{memory}",
            f"           {instructions}",
        ]
    if name == "compiler":
        return [f"compiler   {part['reason'] or ' '.join(part['command'])}"]
    if name == "kernels":
        by = ", ".join(f"{dtype} by {engines[0]}" for dtype, engines in part["engines"].items())
        if not by:
            return [f"kernels    the slow reference: {part['reason']}"]
        lines = [f"kernels    {part['cpu']}: {by}"]
        if part["why_no_tiles"]:
            lines.append(f"           not by AMX: {part['why_no_tiles']}")
        return lines
    if name == "check":
        agrees = "the kernel agrees with the fp32 reference"
        return [f"check      {device}: {fault or agrees}" for device, fault in part.items()]
    if name == "gpus":
        lines = [
            f"GPU        {gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB: no search has been timed "
            f"on one"
            for gpu in part
        ]
        return lines or ["GPU        none that torch can use"]
    if name == "versions":
        versions = ", ".join(f"{package} {version or '-'}" for package, version in part.items())
        return [f"packages   {versions}"]
    if name == "models":
        models = [model for model, there in part.items() if there]
        names = ", ".join(models) or "none at hand: any hub id, folder or GGUF file will do"
        return [f"models     {names}"]
    if name == "cache":
        return [f"cache      {part['folder']}: {part['state']}"]
    if name == "wrong":
        return [f"WRONG      {line}" for line in part] or ["all is well"]
    if name == "dense":
        return [
            *_busy_lines(report["processor"]),
            f"dense      {1e3 * part['kernel_s']:.0f} ms by Headwise's kernel, "
            f"{1e3 * part['sdpa_s']:.0f} ms by "
            f"torch's sdpa at {DOCTOR_LENGTH:,} tokens, in {part['dtype']}",
            f"sparse     {1e3 * part['sparse_s']:.0f} ms by patterns of density "
            f"{part['sparse_density']:.2f}",
        ]
    if name == "expected":
        return _expected_lines(part, report["processor"]["memory"])
    return _gain_lines(part)


def _busy_lines(processor: Mapping[str, Any]) -> list[str]:
    if processor["load"] <= processor["cores"]:
        return []
    return [
        f"busy       a load of {processor['load']:.1f} on {processor['cores']} cores: the times "
        "below are longer than on a quiet machine"
    ]


def _expected_lines(expected: Mapping[str, Any], memory: int | None) -> list[str]:
    lines = [
        "",
        f"what to expect at {DOCTOR_LENGTH:,} tokens on this machine, within a factor of two:",
    ]
    lines.append(f"{'model':<18}{'weights':>14}{'dense prefill':>15}{'default search':>16}")
    for name, each in expected.items():
        size = f"{each['weights'] / 2**30:.1f} GiB"
        prefill = _time(each["prefill_s"])
        search = _time(each["search_s"])
        if memory and each["weights"] > memory:
            prefill = search = "too large"
        lines.append(f"{name:<18}{size:>14}{prefill:>15}{search:>16}")
    lines.append(
        "Reckoned from two short measurements and the searches that were timed (135M and 1B). A "
        "search needs more\n"
        "memory than the weights, 1.8 times as much at 1B. torchrun shares it over processes and "
        "machines."
    )
    return lines


def _gain_lines(gains: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["", "seconds to the first token on this machine, expected:"]
    lines.append(f"{'model':<18}{'tokens':>8}{'dense':>12}{'an artifact':>13}{'gain':>8}   density")
    for gain in gains:
        times = (_time(gain["dense_s"]), _time(gain["sparse_s"]))
        over = f"{gain['dense_s'] / gain['sparse_s']:.1f}x"
        lines.append(
            f"{gain['model']:<18}{gain['length']:>8,}{times[0]:>12}{times[1]:>13}{over:>8}   "
            f"{gain['density']:.2f}"
        )
    lines.append(
        "Reckoned from the dense and sparse attention and the matrix product timed above, and the "
        "densities of\n"
        "SmolLM2's searches (docs/results.md): at 4,096 and 8,192 tokens the median of three, at "
        "32,768 what an\n"
        "artifact for 8,192 comes to there. Another model may need more."
    )
    return lines


def _time(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def parser() -> ArgumentParser:
    """The command line of headwise doctor."""
    p = ArgumentParser(prog="headwise doctor", description=__doc__)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 0 where all is well, 3 where something is wrong."""
    options = parser().parse_args(argv)
    report: dict[str, Any] = {}
    with while_importing():
        from profiling.speed.machine import parts
    for name, part in parts():
        report[name] = part
        if options.json != arguments.STDOUT:
            print("\n".join(lines_of(name, report)), flush=True)
    arguments.deliver_json(report, options.json)
    if report["wrong"]:
        return FOUND
    return 0


if __name__ == "__main__":
    run_command(main)
