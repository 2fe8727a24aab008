"""What a process of tests.processes has imported when it starts: packages that take seconds, and
nothing of a test."""

import torch.distributed.run
import transformers.models.llama.modeling_llama  # noqa: F401

import search.model.search
import search.paper  # noqa: F401

torch.set_num_threads(1)
