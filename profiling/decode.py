"""headwise decode: seconds a token, perplexity, accuracy and cache bytes of artifacts and caches.

headwise decode cfg.yaml --model smollm2 --context 8192 --text novel.txt --trials 20

With --policy caches that drop tokens are compared, with an artifact or without one. With
--dense-prefill texts are prefilled densely for the artifact: what decode alone loses. With --json
FILE an interrupted comparison resumes after the last method whose quality it has.

Speed is measured on a cache of random keys and values (of random tokens where it drops some),
whatever context the model was trained for; quality on prompts.
"""

from __future__ import annotations

from artifacts.cli.arguments import STDOUT, Fresh, Json, deliver
from artifacts.cli.interrupt import while_importing
from profiling.decoding.config import Comparison


class Config(Comparison):
    """Comparison, the file of its record, and whether to discard the resume file."""

    as_json: Json = None
    fresh: Fresh = False


def run(config: Config) -> int:
    """Compare, and print the table."""
    with while_importing():
        from profiling.decoding.run import comparison
        from profiling.decoding.table import table
        from profiling.prompts.held_out import overlap_sentence
        from profiling.prompts.prompt import fewer_sentence
    file = config.as_json
    kept = None if file == STDOUT else file
    with comparison(config, kept, fresh=config.fresh) as (rows, record):
        record = {"command": config.command, **record}
        lines = [
            table(rows, record["all_seconds"]),
            *(overlap_sentence(**each) for each in record["seen_by_search"]),
            *(fewer_sentence(**each) for each in record["fewer_prompts"]),
        ]
        deliver("\n".join(lines), record, file)
    return 0
