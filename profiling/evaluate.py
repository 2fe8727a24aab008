"""headwise evaluate: accuracy and speed of artifacts vs dense attention and other methods.

The first artifact is the row `headwise`, each further one a row by the name of its file. Every
prompt under every method has a resume file in the report's folder. Rerun a killed command to
resume, or add methods, tasks, lengths and samples later; finished prompts are not repeated.

headwise evaluate cfg.yaml --model smollm2 --length 4096 8192 --text book.txt --out report/
headwise evaluate cfg.yaml other.yaml --model smollm2 --quick --out report/
headwise evaluate cfg.yaml --model smollm2 --length 8192 --speed-only --out report/
"""

from __future__ import annotations

from artifacts.cli.interrupt import while_importing
from profiling.evaluation.config import Config as Config


def run(config: Config) -> int:
    """Evaluate, and print the report as Markdown."""
    with while_importing():
        from profiling.evaluation.measure import OUTPUT
        from profiling.evaluation.report import PAGE, markdown
        from profiling.evaluation.run import run as evaluate
    report = evaluate(config)
    print(markdown(report))
    print(f"\nwrote {config.out / PAGE} and {config.out / OUTPUT}")
    return 0
