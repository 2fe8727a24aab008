"""python -m profiling.peers: caches under Headwise's policies beside kvpress's presses, on the same prompts and model.

kvpress runs in an environment of its own, with the transformers that it needs (make kvpress; --python), by its own
pipeline: it prefills a context under a press, feeds each question after it, and answers greedily. So do Headwise's
caches. The last token of a prompt that is no later turn is fed after the rest. Both keep the same share of the context.

python -m profiling.peers --model smollm2 --task line_turns@questions=16 --length 1024 --out peers.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.errors import shorten
from artifacts.files import atomic_write
from profiling.environment import environment
from profiling.evaluation.method_table import CACHES, RANDOM
from profiling.evaluation.record import as_json
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model, local_folder
from profiling.models.packages import PACKAGES
from profiling.pictures.page_parts import size
from profiling.progress import bar
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task, per_context
from profiling.quality.answers import new_tokens
from profiling.quality.contexts import by_context
from profiling.quality.intervals import holm, mean_interval, paired_difference, sign_flip
from profiling.quality.method import Method, of_policy
from profiling.quality.trials import VERSION, trials
from profiling.speed.baselines import KERNEL
from runtime.fingerprint import fingerprint
from runtime.memory import memory_report

WORKER = Path(__file__).parent / "evaluation" / "kvpress_worker.py"
# Of kvpress: no press, and those that are compared, by its class.
_NONE = "kvpress: none"
_PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "KVzipPress", "StreamingLLMPress", "RandomPress")


@dataclass(frozen=True, kw_only=True)
class Peers:
    """One run of the command. share: of a context's keys and values that is kept. samples: contexts of each task."""

    model: str
    tasks: tuple[str, ...]
    out: Path
    length: int = 1024
    share: float = 0.25
    samples: int = 12
    seed: int = 4000
    python: Path = Path(".venv-kvpress/bin/python")
    presses: tuple[str, ...] = _PRESSES
    dtype: str = "bfloat16"
    fresh: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise HeadwiseError(f"--share must be between 0 and 1, got {self.share}")
        if self.samples < 2:
            raise HeadwiseError(f"--samples must be at least 2, got {self.samples}")
        if not self.python.exists():
            raise HeadwiseError(f"--python {shorten(str(self.python))} is not there: make kvpress, or name another")


@dataclass(frozen=True)
class _Context:
    """Prompts that share a context: one unit."""

    task: str
    prompts: tuple[Prompt, ...]


def run(config: Peers) -> dict[str, Any]:
    """Measure what the ledger lacks, and write the figures as JSON.

    Returns:
        What the file holds.

    Raises:
        HeadwiseError: anything that the user has to put right, and an error of kvpress.
    """
    for task in config.tasks:
        parse_task(task)
    loaded = load_model(config.model, dtype=config.dtype)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    token = 2 * model.num_kv_heads * model.head_dim * loaded.model.dtype.itemsize
    settings = {"peers": VERSION, "weights": model.weights_sha256, "dtype": config.dtype, "share": config.share}
    contexts = [each for task in config.tasks for each in _contexts(config, loaded, task)]
    found: dict[str, list[dict[str, Any]]] = {}
    with Ledger(config.out, "peers", settings=settings, fresh=config.fresh) as ledger:
        for method in _methods(config, loaded):
            found[method.name] = _of_ours(loaded, method, contexts, ledger, token)
        found |= _of_kvpress(config, loaded, contexts, ledger)
    record = {
        "command": config.command,
        "model": loaded.name,
        "settings": {**settings, **asdict(config), "out": config.out.name, "python": config.python.name},
        "environment": {**environment(), **_versions(config.python)},
        "rows": _rows(config, contexts, found),
    }
    atomic_write(config.out, as_json(record))
    return record


def _contexts(config: Peers, loaded: LoadedModel, task: str) -> Iterator[_Context]:
    samples = config.samples * per_context(task)
    made = make_prompts(task, loaded.tokenizer, length=config.length, samples=samples, seed=config.seed)
    if any(prompt.scored or prompt.answer is None for prompt in made):
        raise HeadwiseError(f"--task {task} asks nothing after its prompts: take one with an answer at the end")
    prompts = [replace(prompt, turn=max(1, prompt.turn)) for prompt in made]
    for numbers in by_context(prompts):
        yield _Context(parse_task(task).name, tuple(prompts[number] for number in numbers))


def _methods(config: Peers, loaded: LoadedModel) -> Iterator[Method]:
    yield of_policy(loaded, KERNEL, None)
    for name, (policy, _) in CACHES.items():
        yield of_policy(loaded, name, policy(config.share, config.length), draws=name == RANDOM)


def _of_ours(
    loaded: LoadedModel, method: Method, contexts: Sequence[_Context], ledger: Ledger, token: int
) -> list[dict[str, Any]]:
    found = []
    with method.apply(loaded.model):
        for each in bar(contexts, desc=method.name):
            unit = ledger.unit(f"ours/{method.name}/{method.identity}/{digest(each.prompts)}")
            answers = ledger.once(unit, partial(_answered, loaded, method, each))["answers"]
            kept = ledger.unit(f"kept/{method.name}/{method.identity}/{len(each.prompts[0].context)}")
            found.append({"answers": answers, "bytes": ledger.once(kept, partial(_bytes, loaded, method, each, token))})
    return found


def _answered(loaded: LoadedModel, method: Method, context: _Context) -> dict[str, Any]:
    records = dict(trials(loaded.model, loaded.tokenizer, context.prompts, method))
    return {"answers": [records[number]["text"] for number in range(len(context.prompts))]}


@torch.no_grad()
def _bytes(loaded: LoadedModel, method: Method, context: _Context, token: int) -> float:
    """Bytes of the tokens, `token` each, that are kept of a context, without room for new ones and without scores."""
    cache = method.cache(loaded.model)
    loaded.model(torch.tensor([context.prompts[0].context]), past_key_values=cache, logits_to_keep=1)
    return sum(layer.mean_kept for layer in memory_report(cache).layers) * token


def _of_kvpress(
    config: Peers, loaded: LoadedModel, contexts: Sequence[_Context], ledger: Ledger
) -> dict[str, list[dict[str, Any]]]:
    """The same of every press: what the ledger lacks is run by one process."""
    presses: dict[str, Any] = {_NONE: None}
    presses |= {f"kvpress: {name}": (name, {"compression_ratio": 1 - config.share}) for name in config.presses}
    units = {
        name: [ledger.unit(f"{name}/{config.share}/{digest(each.prompts)}") for each in contexts] for name in presses
    }
    for name, press in presses.items():
        left = [at for at, unit in enumerate(units[name]) if unit not in ledger]
        for told in _worker(config, loaded, {name: press}, [contexts[at] for at in left]) if left else ():
            answers = [answer.strip() for answer in told["answers"]]
            ledger.put(units[name][left[told["context"]]], {"answers": answers, "bytes": told["bytes"]})
    return {name: [ledger.get(unit) for unit in some] for name, some in units.items()}


def _worker(
    config: Peers, loaded: LoadedModel, presses: Mapping[str, Any], contexts: Sequence[_Context]
) -> Iterator[dict[str, Any]]:
    folder = local_folder(config.model, dtype=config.dtype) if config.model in PACKAGES else config.model
    job = {
        "model": str(Path(folder).resolve()),
        "dtype": config.dtype,
        "threads": torch.get_num_threads(),
        "presses": presses,
        "contexts": [
            {
                "ids": each.prompts[0].context,
                "turns": [prompt.input_ids[len(prompt.context) :] for prompt in each.prompts],
                "new_tokens": max(new_tokens(loaded.tokenizer, prompt) for prompt in each.prompts),
            }
            for each in contexts
        ],
    }
    # -P: this folder has a module called kvpress.
    command = [str(config.python), "-P", str(WORKER)]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
        process.wait()
        said.seek(0)
        last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode:
        raise HeadwiseError(f"kvpress in {shorten(str(config.python))} failed: {shorten(last or 'it said nothing')}")


def _versions(python: Path) -> dict[str, str]:
    code = "from importlib.metadata import version as v; print(v('kvpress'), v('transformers'))"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {"kvpress": told[0], "transformers of kvpress": told[1]}


def _rows(
    config: Peers, contexts: Sequence[_Context], found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """A row for each task and method; differences are to dense attention of the same library, over contexts."""
    rows: list[dict[str, Any]] = []
    for task in dict.fromkeys(each.task for each in contexts):
        here = [at for at, each in enumerate(contexts) if each.task == task]
        scores = {name: [_score(contexts[at], some[at]["answers"]) for at in here] for name, some in found.items()}
        for name, own in scores.items():
            dense = _NONE if name.startswith("kvpress") else KERNEL
            full = statistics.mean(found[dense][at]["bytes"] for at in here)
            held = statistics.mean(found[name][at]["bytes"] for at in here)
            interval = mean_interval(own)
            row: dict[str, Any] = {"task": task, "method": name, "contexts": len(own)}
            row |= {"answers": sum(len(contexts[at].prompts) for at in here), "bytes": held, "of_full": held / full}
            row |= {"score": interval.value, "low": interval.low, "high": interval.high}
            if name != dense:
                gap = paired_difference(own, scores[dense])
                row |= {"difference": gap.value, "difference_low": gap.low, "difference_high": gap.high}
                row["p"] = sign_flip([a - b for a, b in zip(own, scores[dense], strict=True)])
            rows.append(row)
    looks = [row for row in rows if "p" in row]
    for row, corrected in zip(looks, holm([row["p"] for row in looks]), strict=True):
        row["corrected"] = corrected
    return rows


def _score(context: _Context, answers: Sequence[str]) -> float:
    return statistics.mean(score(prompt, text) for prompt, text in zip(context.prompts, answers, strict=True))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text; - where a method is worse than dense attention beyond chance."""
    lines = [f"{'':<28}{'method':<34}{'score':>6}  {'less dense (95%)':>26}  {'cache':>10}  of full"]
    for row in rows:
        gap = ""
        if "difference" in row:
            mark = "-" if row["corrected"] < 0.05 and row["difference"] < 0 else " "
            gap = f"{row['difference']:+.3f} ({row['difference_low']:+.3f} to {row['difference_high']:+.3f}){mark}"
        lines.append(
            f"{row['task']:<28}{row['method']:<34}{row['score']:>6.3f}  {gap:>26}  {size(round(row['bytes'])):>10}  "
            f"{row['of_full']:.2f}"
        )
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.peers."""
    p = ArgumentParser(prog="python -m profiling.peers", description=__doc__)
    arguments.add_model(p)
    arguments.add_task(p, "what is asked, one or more")
    arguments.add_length(p, f"prompt length (default {Peers.length})", default=Peers.length)
    arguments.add_out(p, "JSON file; its ledger is kept beside it")
    p.add_argument("--share", type=float, default=Peers.share, help="of a context that is kept (default 0.25)")
    p.add_argument("--samples", type=int, default=Peers.samples, help="contexts of each task (default 12)")
    p.add_argument("--python", type=Path, default=Peers.python, help=f"of kvpress's environment ({Peers.python})")
    p.add_argument("--presses", nargs="+", default=list(_PRESSES), help=f"kvpress's (default: {' '.join(_PRESSES)})")
    arguments.add_seed(p, Peers.seed)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    arguments.add_dtype(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    given = vars(parser().parse_args(argv))
    tasks, presses = tuple(given.pop("tasks") or ()), tuple(given.pop("presses"))
    if not tasks:
        raise HeadwiseError("say what to ask: --task TASK, one or more")
    record = run(Peers(**given, tasks=tasks, presses=presses, command=arguments.as_typed("profiling.peers", argv)))
    print(f"{table(record['rows'])}\n\nwrote {given['out']}")
    return 0


if __name__ == "__main__":
    run_command(main)
