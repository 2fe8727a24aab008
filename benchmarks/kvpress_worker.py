"""Run kvpress's presses in an environment without Headwise: python -P kvpress_worker.py.

It reads a job as JSON from its standard input and writes one line of JSON for each press and
context:

    {"model": folder, "dtype": "bfloat16", "threads": 1, "presses": {"snapkv": ["SnapKVPress",
    {...}], "none": null},
     "contexts": [{"ids": [...], "turns": [[...], ...], "new_tokens": 12}]}
    {"press": "snapkv", "context": 0, "answers": [...], "bytes": ...}
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer the job's contexts under each press, by kvpress's own pipeline."""
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as folder:
        # KVzip makes its question by the chat template of the model's folder: these prompts are no
        # chats.
        for file in Path(job["model"]).iterdir():
            if file.name != "chat_template.jinja":
                Path(folder, file.name).symlink_to(file)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, job["dtype"])
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        pipeline = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
        for name, spec in job["presses"].items():
            for number, context in enumerate(job["contexts"]):
                press: Any = None if spec is None else getattr(kvpress, spec[0])(**spec[1])
                cache = DynamicCache(config=model.config)
                inputs = {
                    "context_ids": torch.tensor([context["ids"]], dtype=torch.long, device="cpu"),
                    "questions_ids": [
                        torch.tensor([turn], dtype=torch.long, device="cpu")
                        for turn in context["turns"]
                    ],
                }
                with torch.no_grad():
                    answers = pipeline._forward(
                        inputs, max_new_tokens=context["new_tokens"], press=press, cache=cache
                    )
                # The pipeline has removed the answers: only kept tokens of the context are left.
                held = sum(
                    part.numel() * part.element_size()
                    for x in cache.layers
                    for part in (x.keys, x.values)
                )
                line = {"press": name, "context": number, "answers": answers, "bytes": held}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
