"""One of the processes of test_parallel.py: serves a tiny model that is sharded over all of them.

torchrun --nproc-per-node 2 parallel.py 2 FOLDER ...: for each cfg file in a FOLDER the greedy tokens, by the first
process, and the logits of the prompt's last tokens, by each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from artifacts import HeadwiseError
from runtime import load


def main() -> None:
    # A process that aborts says where.
    faulthandler.enable()
    torch.set_num_threads(1)
    for folder in sys.argv[2:]:
        answer(Path(folder), int(sys.argv[1]))
    # Nobody leaves while another still talks to it, and gloo's threads are not there to see the interpreter go.
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)


def answer(folder: Path, size: int) -> None:
    """Serve what is in a folder over so many processes."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(tp_size=size), dtype=torch.float32
    )
    prompt = torch.tensor(json.loads((folder / "prompt.json").read_text()))
    answers: dict[str, object] = {}
    for config in sorted(folder.glob("*.yaml")):
        try:
            with torch.no_grad(), load(config).apply(model) as handle:
                out = model.generate(
                    prompt,
                    past_key_values=handle.new_cache(),
                    max_new_tokens=12,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
                answers[config.stem] = {"tokens": out[:, prompt.shape[1] :].tolist(), "stats": handle.stats()}
                logits = model(prompt, past_key_values=handle.new_cache(), logits_to_keep=16).logits
                torch.save(logits.cpu(), folder / f"{config.stem}.{dist.get_rank()}.pt")
        except HeadwiseError as error:
            answers[config.stem] = {"error": str(error)}
    if dist.get_rank() == 0:
        (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
