"""Conformance of commands: every verb of headwise goes through every test here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import artifacts
from artifacts import ArtifactError, Finding, HeadwiseError
from artifacts.cli.command import FOUND, run_command
from artifacts.cli.options import Arg, argument, flags, option_fields
from artifacts.store.write import sign
from headwise.__main__ import GROUPS, VERBS, main, parser_of
from headwise.command_page import page
from tests.artifacts.conftest import make_key
from tests.search.conftest import by_head, tiny_model
from tests.tiny_text_model import save_tiny

__all__ = ["by_head", "tiny_model"]

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--model model --dtype float32 --samples 1"
WIDE = "--max-kl 99 --max-perplexity 99 --max-nll 99 --max-lost 1"
# A small run of each verb in a folder with a model, its artifact cfg.yaml, a key and a text.
RUNS = {
    "doctor": "--model model --dtype float32",
    "search": f"{SMALL} --out new.yaml --length 512 --budget 0.8 --cost flops --no-picture "
    f"--task prose {WIDE}",
    "gate": f"cfg.yaml {SMALL} --task prose {WIDE}",
    "evaluate": f"cfg.yaml {SMALL} --out report --length 512 --task passkey --no-speed "
    "--methods dense headwise",
    "show": "cfg.yaml",
    "check": "cfg.yaml --model model",
    "filters": f"cfg.yaml {SMALL} --out new.yaml --length 256 --steps 2 --task passkey --filters 1 "
    "--sparse 0.3",
    "kv": f"cfg.yaml {SMALL} --out new.yaml --length 256 --task passkey --forced 4 "
    "--target-share 0.5",
    "decode": "--model model --dtype float32 --methods dense+snapkv:budget=90,window=8 "
    "dense+streaming:window=28 --length 256 --samples 1 --steps 1 --repeats 1",
    "similarity": f"{SMALL} --out profile --length 256 --steps 2 --task passkey",
    "heatmaps": "--model model --dtype float32 --out pictures --length 256 --picture attention "
    "--head 1.2",
    "plot": "cfg.yaml --out picture",
    "stream": "--model model --dtype float32 --out stream --text text.txt --tokens 64 "
    "--policy streaming:sinks=4,window=28 --recompute 32",
    "tasks": "--model model --task passkey --length 256",
    "bench": "--length 128 --head-dims 64 --heads 2/1 --repeats 1",
    "validate": "cfg.yaml",
    "diff": "cfg.yaml cfg.yaml",
    "convert": "cfg.yaml --to minference --out heads.json",
    "schema": "",
    "sign": "cfg.yaml --key me.key",
    "verify": "cfg.yaml --key me.pub",
}
# tests/search/test_heads.py runs the one, which makes a search of several thousand tokens, and
# .ci/lm-eval the other, which is the command line of another program.
ELSEWHERE = {"demo": "--model model --out out", "lm-eval": ""}
TYPED = {**RUNS, **ELSEWHERE}
PARSERS = {verb: parser_of(verb) for verb in VERBS}
CONFIGS = {verb: import_module(module).Config for verb, module in VERBS.items()}
OURS = [verb for verb in VERBS if verb != "lm-eval"]


@pytest.fixture(scope="module")
def files(tiny_model, by_head, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "model").symlink_to(tiny_model)
    artifact, arrays = artifacts.load_pair(by_head)
    artifacts.save(artifact, folder / "cfg.yaml", arrays)
    make_key(folder / "me.key", folder / "me.pub")
    sign(folder / "cfg.yaml", folder / "me.key")
    (folder / "text.txt").write_text("The clerk counted seven boats. " * 20)
    return folder


@pytest.fixture
def headwise(files, tmp_path, monkeypatch, capsys):
    """headwise(words) in a copy of the files -> exit status, stdout and stderr."""
    shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_command(main, [part for word in words for part in word.split()])
        return int(ended.value.code or 0), *capsys.readouterr()

    yield run


@pytest.fixture
def refused(headwise):
    """refused(says, *words) -> stderr, its last line an error that has `says`; no file is new."""

    def run(says, *words):
        before = set(os.listdir())
        code, out, err = headwise(*words)
        assert (code, out) == (2, "")
        line = err.splitlines()[-1]
        assert line.startswith("error: ") and line.isprintable() and says in line
        assert "Traceback" not in err and err.count("error: ") == 1
        assert set(os.listdir()) == before
        return err

    return run


def test_every_verb_has_a_case():
    assert set(TYPED) == set(VERBS)
    assert len(VERBS) == sum(map(len, GROUPS.values()))


@pytest.mark.parametrize("verb", RUNS)
def test_command_runs_and_prints_valid_json(verb, headwise):
    has_json = "--json" in PARSERS[verb]._option_string_actions
    code, out, err = headwise(verb, RUNS[verb], "--json" if has_json else "")
    assert code in (0, FOUND), err
    assert "Traceback" not in err and out
    if has_json:
        assert isinstance(json.loads(out), dict)
    if "--device" in PARSERS[verb]._option_string_actions:
        assert err.startswith("device: cpu ("), "the first line is the device"


@pytest.mark.parametrize("verb", OURS)
def test_unknown_option_error_names_it_and_help(verb, refused):
    output = refused("--no-such-option", verb, TYPED[verb], "--no-such-option")
    assert f"headwise {verb} --help" in output


# A word of a command, its replacement, and text that the error contains.
MISSING = [
    ("cfg.yaml", "none.yaml", "none.yaml"),
    ("model", "no/such-model", "no/such-model"),
    ("text.txt", "none.txt", "none.txt"),
    ("me.key.pub", "none.pub", "none.pub"),
    ("new.yaml", "missing/new.yaml", "missing"),
]


@pytest.mark.parametrize(
    ("verb", "word", "other", "says"),
    [(v, *row) for v, words in TYPED.items() for row in MISSING if row[0] in words.split()],
)
def test_missing_file_error_names_it(verb, word, other, says, refused):
    refused(says, verb, *(other if part == word else part for part in TYPED[verb].split()))


# The size of the model decides about these: options after a small run of a verb, and the argument
# or value that the error names.
OF_THE_MODEL = [
    ("search --length 4000", "--beyond-positions"),
    ("gate --length 4000", "--beyond-positions"),
    ("filters --dense-first 3", "--dense-first 3"),
    ("evaluate --length 5000", "5000"),
    ("heatmaps --head 0.6", "0.6"),
    ("similarity --length 1024", "1024 positions"),
]
# Wrong in every command that has the option.
EVERYWHERE = {
    "--device gpu7": "'gpu7'",
    "--task riddle": "'riddle'",
    "--task text:none.txt": "none.txt",
}
# Wrong whatever the model.
WRONG = [
    ("search --budget 2", "--budget"),
    ("search --length 100", "--length"),
    ("search --backend abacus", "abacus"),
    ("search --storage study", "'study'"),
    ("filters --storage study", "'study'"),
    ("kv --storage study", "'study'"),
    *(
        (f"{verb} --task text:a/text.txt --task text:text.txt", "two tasks text:text.txt")
        for verb in ("search", "gate", "evaluate", "kv", "filters", "decode", "similarity")
    ),
    ("search --preset paper --cost flops", "--cost"),
    ("search --budget a_shape:64,64", "--preset paper"),
    ("search --preset paper --budget 0.001 --no-picture", "0.001"),
    ("gate --length 100", "--length 100"),
    ("gate --max-lost 2", "--max-lost"),
    ("filters --budget 1.5", "--budget"),
    ("filters --profile nowhere", "nowhere"),
    ("kv --forced 256", "--forced"),
    ("kv --target-bytes 64MiB", "--target-bytes"),
    ("search --max-memory much", "--max-memory"),
    ("demo --length 0", "--length"),
    ("convert --sinks four", "--sinks"),
    ("schema --json none/out.json", "'none/out.json'"),
    ("sign --key me.pub", "me.pub"),
    ("verify --key me.key", "me.key"),
    ("bench --length 300 0", "length"),
    ("bench --density 3", "--density"),
    ("bench --repeats 0", "--repeats"),
    ("decode --samples -1", "--samples"),
    ("decode --context 0", "--context"),
    ("decode --methods dense+lru", "'dense+lru'"),
    ("evaluate --seeds 0", "--seeds"),
    ("evaluate --share 0", "--share"),
    ("evaluate --depths 2", "--depths"),
    ("evaluate --speed-only --task prose", "--speed-only"),
    ("evaluate --length 256", "256"),
    ("evaluate --methods a_shap", "'a_shap'"),
    ("heatmaps --profile x --picture pie", "'pie'"),
    ("heatmaps --head 3", "--head"),
    ("heatmaps --length 3", "--length"),
    ("plot --head 9.0", "--head"),
    ("plot --head 2", "--head"),
    ("plot --picture candidates", "--head"),
    ("plot --picture patterns --head 2.1", "--head"),
    ("similarity --length 63", "--length"),
    ("similarity --top-k 256", "--top-k 256"),
    ("similarity --task vt --task vt", "'vt'"),
    ("stream --tokens 1", "--tokens"),
    ("stream --chunk 0", "--chunk"),
    ("stream --policy lru", "'lru'"),
    ("stream --policy full --policy full", "--policy full"),
    ("tasks --length 0", "--length"),
    *(
        (f"{verb} {words}", says)
        for words, says in EVERYWHERE.items()
        for verb in OURS
        if words.split()[0] in PARSERS[verb]._option_string_actions
    ),
    *((f"{verb} --samples 0", "--samples") for verb in ("gate", "search", "evaluate", "tasks")),
    ("gate --max-kl nan", "--max-kl"),
    ("gate --out missing/x.yaml", "missing"),
    ("search --storage nothing://x", "nothing://x"),
    ("search --storage sqlite:////none/of/this.db", "sqlite"),
    ("search --dense-tail 512", "--dense-tail"),
    ("search --dense-below 0", "--dense-below"),
    ("search --max-nll nan", "--max-nll"),
    ("search --budget nan", "--budget"),
    ("search --max-memory 0", "--max-memory"),
    ("search --preset paper --length 1", "--length"),
    ("search --preset paper --task riddle", "'riddle'"),
    ("search --preset paper --backend abacus", "abacus"),
    ("search --preset paper --budget a_shape:x --no-picture", "a_shape:x"),
    ("evaluate --text none.txt", "none.txt"),
    ("evaluate --out text.txt", "text.txt"),
    ("evaluate --out text.txt/report", "text.txt"),
    ("evaluate --density 0", "--density"),
    ("evaluate --repeats 0", "--repeats"),
    ("filters --prefill-ratio nan", "--prefill-ratio"),
    ("filters --worst nan", "--worst"),
    ("filters --window 0", "--window"),
    ("kv --context 9", "--context"),
    ("decode --text none.txt", "none.txt"),
    ("decode --methods dense+streaming:window=0", "window"),
    ("decode --methods dense+omnikv", "'dense+omnikv'"),
    ("decode --json=missing/x.json", "missing"),
    ("similarity --top-k 0", "--top-k"),
    ("similarity --top-k 400", "--top-k 400"),
    ("similarity --out text.txt", "text.txt"),
    ("heatmaps --length 32 --picture similarity", "--length"),
    ("heatmaps --out text.txt", "text.txt"),
    ("stream --stride 0", "--stride"),
    ("stream --out text.txt", "text.txt"),
    ("bench --heads 0/1", "--heads"),
    ("bench --heads 5/2", "--heads"),
    ("bench --head-dims 0", "--head-dims"),
    ("demo --out text.txt/x", "text.txt"),
]


def with_run(words: str) -> str:
    """The words of a row of WRONG after those of a small run."""
    verb, _, more = words.partition(" ")
    run = TYPED[verb]
    if "--preset" in words:
        run = "--model model --dtype float32 --out new.yaml --length 512"
    return f"{verb} {run} {more}"


@pytest.mark.parametrize(("words", "says"), OF_THE_MODEL)
def test_value_that_does_not_suit_the_model_is_named(words, says, refused):
    refused(says, with_run(words))


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_wrong_value_is_found_before_the_model_is_loaded(words, says, refused):
    Path("a").mkdir()
    shutil.copy("text.txt", "a")
    line = with_run(words).split()
    refused(says, *("no/such-model" if part == "model" else part for part in line))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serch", "'search'"),
        ("xyzzy", "headwise --help"),
        ("convert cfg.yaml b.yaml --out new.yaml", "b.yaml"),
        ("show", "headwise show --help"),
        ("decode --model model", "artifact"),
        ("heatmaps --out o", "--profile"),
        ("heatmaps --out o --profile x --picture attention", "--head"),
        ("tasks --length 9", "--task"),
    ],
)
def test_unknown_or_incomplete_command_is_rejected(words, says, refused):
    refused(says, words)


@pytest.mark.parametrize("verb", ["search", "decode", "similarity", "stream"])
def test_model_of_sliding_layers_only_is_refused(verb, refused, tmp_path):
    save_tiny(tmp_path / "narrow", family="Mistral", sliding_window=32)
    refused("no layer of narrow", verb, TYPED[verb], "--model narrow")


# Help, and the first wrong option of commands that load a model.
FIRST_WRONG = {words.partition(" ")[0]: with_run(words) for words, _ in reversed(WRONG)}
LOADING = ("search", "bench", "decode", "evaluate", "heatmaps", "similarity", "stream", "tasks")
EARLY = ["--help", "show --help", *(FIRST_WRONG[verb] for verb in LOADING)]


@pytest.mark.usefixtures("headwise")
def test_help_and_option_checks_do_not_import_torch():
    """A misspelled word or an out-of-range value is reported at once."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from artifacts import HeadwiseError
from headwise.__main__ import main
for words in {EARLY}:
    try:
        main(words.split())
    except (SystemExit, HeadwiseError):
        pass
    assert not sys.modules.keys() & {{"torch", "transformers", "optuna"}}, words
"""
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert set(VERBS) <= set(listed)


@pytest.mark.parametrize("flag", ["--length", "--task", "--json", "--device", "--seed", "--dtype"])
def test_option_has_the_same_name_in_every_command(flag):
    options = [p._option_string_actions for p in PARSERS.values()]
    actions = [known[flag] for known in options if flag in known]
    assert len(actions) > 3 and len({action.metavar for action in actions}) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_device_of_a_command_defaults_to_auto(verb):
    device = CONFIGS[verb].model_fields.get("device")
    assert (device is not None) == ("--device" in PARSERS[verb]._option_string_actions)
    assert device is None or device.default == "auto"


def test_command_page_matches_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == page(), (
        "python -m headwise.command_page docs/commands.md"
    )


def test_only_search_divides_work_across_ranks():
    """The evaluation harness divides its work by its own means."""
    shared = {verb for verb, config in CONFIGS.items() if config.shares_work}
    assert shared == {"search", "lm-eval"}


@pytest.mark.parametrize("verb", VERBS)
def test_each_option_has_a_help_text_and_a_unique_flag(verb):
    fields = option_fields(CONFIGS[verb])
    assert fields and all((argument(field) or Arg()).help for field in fields.values())
    names = [flag for name, field in fields.items() for flag in flags(name, field)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "words",
    [
        *(f"{verb} {TYPED[verb]}" for verb in OURS if verb != "search"),
        "search --model model --out new.yaml --preset paper --budget 0.5",
    ],
)
def test_command_without_shared_work_refuses_several_ranks(words, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(f"headwise {words.split()[0]}", words)
    refused("is for one process, got 2 of a launch: start it without torchrun", words)


def raising(error: BaseException) -> Any:
    def command(argv: Any) -> Any:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (HeadwiseError("no such model"), 2, "error: no such model\n"),
        (ArtifactError("two\nlines\x1b[2J"), 2, "error: two\\nlines\\x1b[2J\n"),
        (Finding("nothing passes"), 3, "error: nothing passes\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            ModuleNotFoundError("", name="matplotlib.figure"),
            2,
            "error: matplotlib is not installed: pip install 'headwise[search]'\n",
        ),
    ],
)
def test_error_maps_to_exit_status(error, status, says, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(raising(error), [])
    assert (ended.value.code, *capsys.readouterr()) == (status, "", says)


@pytest.mark.parametrize(
    "bug", [ZeroDivisionError(), ModuleNotFoundError("", name="numpy")], ids=repr
)
def test_bug_is_raised_unchanged(bug):
    with pytest.raises(type(bug)):
        run_command(raising(bug), [])


def test_error_with_verbose_prints_traceback(headwise):
    plain = headwise("show none.yaml")
    verbose = headwise("show none.yaml -v")
    assert plain[2].count("\n") == 1
    assert "Traceback" in verbose[2] and verbose[2].endswith(plain[2])


def test_closed_or_full_output_exits_cleanly():
    """The stream's buffer is written again at exit, after all handlers."""
    command = [sys.executable, "-m", "headwise", "schema"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    says = "error: cannot write the output: no space left on device\n"
    assert (done.returncode, done.stderr) == (2, says)


def test_ascii_terminal_prints_escapes(headwise):
    model = artifacts.load("cfg.yaml").model.model_copy(update={"name": "modèle"})
    artifacts.update(
        "cfg.yaml", lambda now, arrays: (now.model_copy(update={"model": model}), arrays)
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "headwise", "show", "cfg.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "mod\\xe8le" in done.stdout


def test_ctrl_c_during_import_prints_one_line(tmp_path):
    """Also for the console script, which imports a command before it runs it."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"
    )
    script = tmp_path / "headwise"
    script.write_text("from headwise.__main__ import start\nstart()\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = f"search --model m --out {tmp_path}/cfg.yaml".split()
    for command in (
        [sys.executable, str(script), *words],
        [sys.executable, "-m", "headwise", "doctor"],
    ):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            # A job in the background ignores it, and hands that on.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_package_import_leaves_ctrl_c_handler_unchanged(tmp_path):
    """Also in a process whose script is called headwise."""
    script = tmp_path / "headwise"
    script.write_text(
        "import importlib, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "for package in ('artifacts', 'headwise', 'kernels', 'profiling', 'runtime', 'search'):\n"
        "    importlib.import_module(package)\n"
        "    assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler\n"
    )
    subprocess.run(
        [sys.executable, str(script)],
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        check=True,
    )
