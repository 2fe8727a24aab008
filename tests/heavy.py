"""Imports of every process of tests.processes: packages that take seconds, and no test."""

import torch.distributed.run
import transformers.models.llama.modeling_llama  # noqa: F401

import search.model.search
import search.paper  # noqa: F401

torch.set_num_threads(1)
