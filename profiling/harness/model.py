"""The model `headwise` of lm-evaluation-harness: transformers' own, with an artifact applied."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from artifacts import HeadwiseError
from artifacts.store.hashing import canonical_json
from profiling.environment import versions
from profiling.models.identity import identity_of
from profiling.models.loading import local_folder
from profiling.models.packages import PACKAGES
from runtime import Handle, load

# What `config` is where the model's own attention is wanted.
DENSE = "dense"
# Key of the harness's cache of answers for what they depend on; others are hashes of requests.
_OWNER = "headwise"
# Arguments of HFLM that no answer depends on.
_SPEED = {"batch_size", "max_batch_size", "device", "parallelize", "offload_folder"}


@register_model("headwise")
class HeadwiseLM(HFLM):
    """The harness's model for transformers, served by an artifact; it takes all that `hf` takes.

    Log-likelihoods are one prefill each, by the artifact's patterns. Generation also has the
    artifact's caches.
    """

    _model: Any

    def __init__(
        self,
        pretrained: Any,
        config: str | None = None,
        check_weights: bool = True,
        point: str | None = None,
        dtype: Any = "auto",
        **kwargs: Any,
    ) -> None:
        """Load the model and apply the artifact.

        Args:
            pretrained: what `hf` takes, or smollm2 or gemma3 from their packages.
            config: the artifact, or `dense` for the model's own attention.
            check_weights: see runtime.LoadedArtifact.apply.
            point: of the artifact's front, see runtime.load.
            dtype: see HFLM.
            **kwargs: see HFLM.

        Raises:
            HeadwiseError: no config; an artifact that cannot be read or is for another model.
        """
        if not config:
            raise HeadwiseError(
                "--model headwise needs config=ARTIFACT in --model_args, or config=dense"
            )
        headwise = None
        if config != DENSE:
            headwise = load(config, point=point)
        if isinstance(pretrained, str) and pretrained in PACKAGES:
            pretrained = local_folder(pretrained, dtype=str(dtype))
        super().__init__(pretrained=pretrained, dtype=dtype, **kwargs)
        self._handle: Handle | None = None
        self._sparse_from: int | None = None
        self._content = DENSE
        # All that answers depend on besides the model and the request.
        self._options: dict[str, Any] = {"point": point} | {
            name: value
            for name, value in kwargs.items()
            if name not in _SPEED and isinstance(value, str | int | float)
        }
        if headwise is not None:
            self._handle = headwise.apply(self.model, check_weights=check_weights)
            self._sparse_from = headwise.artifact.prefill.dense_below
            self._content = str(headwise.artifact.content_sha256)

    def _create_model(self, pretrained: Any, *, peft: str | None = None, **kwargs: Any) -> None:
        """Load the model as HFLM does, without shrinking its vocabulary for an adapter.

        HFLM cuts the embeddings to the tokenizer's words; with padded ones the model would then be
        another one than the artifact's.
        """
        if peft is not None and kwargs.get("delta") is not None:
            raise HeadwiseError(f"peft={peft} and delta={kwargs['delta']} exclude each other")
        super()._create_model(pretrained, **kwargs)
        if peft is None:
            return
        from peft import PeftModel

        words = len(self.tokenizer)
        if words > self._model.get_input_embeddings().num_embeddings:
            self._model.resize_token_embeddings(words)
        self._model = PeftModel.from_pretrained(
            self._model, peft, revision=kwargs.get("revision", "main")
        )

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take the harness's cache of answers (--use_cache), which knows the requests alone.

        Raises:
            HeadwiseError: it has answers of another model or artifact, or the model cannot be
                told from others.
        """
        if cache_hook.dbdict is not None:
            self._check_answers(cache_hook.dbdict)
        super().set_cache_hook(cache_hook)

    def _check_answers(self, answers: Any) -> None:
        identity = identity_of(self.model, DENSE)
        if identity.unknown is not None:
            raise HeadwiseError(
                f"--use_cache cannot tell this model from others: {identity.unknown}; leave it out"
            )
        depends = [identity.key, self._content, self._options, versions(), version("lm_eval")]
        own = hashlib.sha256(canonical_json(depends)).hexdigest()
        if len(answers) == 0:
            answers[_OWNER] = own
            answers.commit()
        elif answers.get(_OWNER) != own:
            raise HeadwiseError(
                f"--use_cache {answers.filename} has the answers of another model, artifact or "
                "options: give each a file of its own"
            )

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score requests as HFLM does, one by one where patterns serve the prompt.

        HFLM pads a batch on the right and gives no mask. Causal attention does not mind, but
        patterns are chosen by a prompt's last queries, which would be those of the padding.
        """
        apart = [
            self._sparse_from is not None and len(c) + len(a) > self._sparse_from
            for _, c, a in requests
        ]
        if not any(apart):
            return list(super()._loglikelihood_tokens(requests, disable_tqdm, override_bs))
        scores: dict[int, tuple[float, bool]] = {}
        batch_size: Any = vars(self)["batch_size_per_gpu"]
        for long in (False, True):
            numbers = [number for number, own in enumerate(apart) if own is long]
            if not numbers:
                continue
            group = [requests[number] for number in numbers]
            if long:
                self.batch_size_per_gpu = 1
            else:
                self.batch_size_per_gpu = batch_size
            try:
                size = override_bs
                if long:
                    size = 1
                done = super()._loglikelihood_tokens(group, disable_tqdm, size)
            finally:
                self.batch_size_per_gpu = batch_size
            scores.update(zip(numbers, done, strict=True))
        return [scores[number] for number in range(len(requests))]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any
    ) -> torch.Tensor:
        """Generate as HFLM does, with the artifact's cache; batches are left-padded and masked."""
        if self._handle is not None:
            options.setdefault("past_key_values", self._handle.new_cache())
        generated: torch.Tensor = super()._model_generate(context, max_length, stop, **options)
        return generated

    def get_model_info(self) -> dict[str, Any]:
        """Report HFLM's info with the artifact's hash and the attention calls served so far."""
        info: dict[str, Any] = super().get_model_info()
        if self._handle is not None:
            info |= {
                "headwise_content_sha256": self._content,
                "headwise_calls": self._handle.stats(),
            }
        return info
