"""headwise decode: milliseconds a token, cache bytes and losses of caches, beside dense attention.

An evaluation (headwise evaluate) of caches: those of the artifact's sections, and any with
--methods. Decode is timed on a cache of random keys and values (of random tokens where it drops
some), whatever context the model was trained for; losses are of prompts.

headwise decode cfg.yaml --model smollm2 --length 8192 --text novel.txt
headwise decode --model smollm2 --methods dense+snapkv:budget=0.2 dense+streaming:window=1020
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from artifacts import Artifact, HeadwiseError, load_pair
from artifacts.cli.arguments import (
    STDOUT,
    ArtifactFile,
    Device,
    Dtype,
    Fresh,
    Json,
    Length,
    ModelName,
    Seed,
    deliver,
)
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import ADVANCED, SHARE, Arg, CommandConfig
from profiling.evaluation.cache_table import CACHES, OMNIKV, OWN
from profiling.evaluation.config import Evaluation
from profiling.evaluation.method_table import check_fields, check_name, method_names
from profiling.prompts.options import LISTED, Tasks, Text
from profiling.prompts.prompt import Task
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL

if TYPE_CHECKING:
    from profiling.evaluation.report import Report


class Config(CommandConfig):
    """One comparison; 0 leaves a measurement out."""

    model: ModelName
    artifact: Annotated[
        ArtifactFile | None, Arg("artifact with a decode or kv_cache section; none: --methods")
    ] = None
    methods: Annotated[
        tuple[str, ...] | None,
        Arg(
            "dense+CACHE or headwise+CACHE, repeatable; CACHE is one of "
            f"{' '.join(CACHES)}, with fields such as snapkv:budget=0.2,window=64 or "
            "omnikv:offload=never (default: the artifact's sections)"
        ),
    ] = None
    length: Annotated[Length, Arg("tokens of a prompt, and in the cache"), Field(ge=1)] = 4096
    context: Annotated[
        int | None,
        Arg("tokens in the cache when decode is timed (default: --length)"),
        Field(ge=1),
    ] = None
    steps: Annotated[int, Arg("tokens of a timed round", group=ADVANCED), Field(ge=1)] = 16
    repeats: Annotated[
        int, Arg("timed rounds, interleaved, 0 for none", group=ADVANCED), Field(ge=0)
    ] = 5
    tasks: Annotated[Tasks, Arg(f"what is asked (default passkey); {LISTED}; repeatable")] = (
        Task("passkey"),
    )
    text: Annotated[Text | None, Arg("long text: adds the perplexity of its windows")] = None
    samples: Annotated[int, Arg("prompts, or contexts, of each task, 0 for none"), Field(ge=0)] = 12
    share: Annotated[
        float, Arg("fraction of tokens that caches without fields keep", group=ADVANCED), SHARE
    ] = Evaluation.share
    seed: Seed = Evaluation.seed
    dtype: Dtype = "auto"
    device: Device = "auto"
    as_json: Json = None
    fresh: Fresh = False
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.artifact is None and not self.methods:
            raise HeadwiseError("name an artifact with a decode section, or caches with --methods")
        for name in self.methods or ():
            if self.artifact is None:
                check_name(name, method_names(None))
            check_fields(name)
        if not (self.repeats or self.samples):
            raise HeadwiseError("--repeats 0 --samples 0 leaves nothing to measure")
        return self


def run(config: Config) -> int:
    """Compare, and print the table."""
    with while_importing():
        from profiling.evaluation.report import markdown
    report = compared(config)
    deliver(markdown(report), report.as_json(), config.as_json)
    return 0


def compared(config: Config) -> Report:
    """Compare the caches with dense attention; an interrupted comparison resumes.

    With --json FILE the resume file is beside it until the end.

    Raises:
        HeadwiseError: the artifact has neither section, or is for another model; an unknown method.
    """
    from profiling.caches.policies import with_section
    from profiling.evaluation.measure import check_lengths, check_seeds, evaluate, tasks_of
    from profiling.evaluation.methods import Methods
    from profiling.evaluation.record import record_of
    from profiling.evaluation.report import Report
    from profiling.evaluation.speed import at_random, decode_times
    from profiling.evaluation.times import DENSE, Times, time_rows
    from profiling.ledger import Ledger
    from profiling.models.device import settled
    from profiling.models.identity import identity_of
    from profiling.models.loading import load_model
    from runtime.fingerprint import check

    artifact = None
    arrays = None
    names = config.methods or ()
    if config.artifact is not None:
        artifact, arrays = load_pair(config.artifact)
        names = names or _sections(config.artifact, artifact)
    for name in names:
        check_name(name, method_names(artifact))
    quality = Evaluation(
        tasks=tasks_of(config.tasks, config.text) if config.samples else (),
        lengths=(config.length,),
        methods=tuple(dict.fromkeys((MODEL, *(name for name in names if name != KERNEL)))),
        samples=config.samples,
        share=config.share,
        seed=config.seed,
    )
    if config.artifact is not None and artifact is not None:
        check_seeds(config.artifact, artifact, quality)
    config = settled(config)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    if artifact is None:
        artifact = with_section(loaded, None).artifact
    if config.samples:
        check_lengths(config.artifact or Path(config.model), artifact, [config.length])
    check(artifact.model, loaded.model)
    with ExitStack() as stack:
        if config.as_json in (None, STDOUT):
            out = Path(stack.enter_context(TemporaryDirectory())) / "decode"
        else:
            out = config.as_json
        model = identity_of(loaded.model, loaded.name)
        ledger = stack.enter_context(Ledger(out, "decode", model, fresh=config.fresh))
        methods = Methods(loaded, artifact, arrays, share=config.share, ledger=ledger)
        rows = []
        context = config.context or config.length
        if config.repeats:
            made = [methods.make(name, context) for name in dict.fromkeys((*DENSE, *names))]
            times = decode_times(
                loaded,
                made,
                fill=partial(at_random, loaded, context, config.seed),
                length=context,
                steps=config.steps,
                repeats=config.repeats,
            )
            rows = time_rows(times, context)
        measured = evaluate(quality, loaded, methods, ledger)
        record = record_of(
            methods,
            quality,
            measured,
            Times(decode=rows),
            artifact=artifact,
            loaded=loaded,
            command=config.command,
        )
        ledger.remove()
    return Report.of(record)


def _sections(file: Path, artifact: Artifact) -> tuple[str, ...]:
    """The method of an artifact as it is served.

    Raises:
        HeadwiseError: it has no section that decode depends on.
    """
    prefill = HEADWISE if any(artifact.prefill.layers) else MODEL
    if artifact.kv_cache is not None:
        return (f"{prefill}+{OWN}",)
    if artifact.decode is not None:
        return (f"{prefill}+{OMNIKV}",)
    raise HeadwiseError(
        f"{file} has no decode or kv_cache section: headwise filters and headwise kv write one"
    )
