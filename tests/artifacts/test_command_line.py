"""The commands as a user meets them: output, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from artifacts import ArtifactError, Evidence, HeadwiseError, load, save
from artifacts.__main__ import main
from artifacts.cli.command import ArgumentParser, run_command


def run(*args, **kwargs):
    command = [sys.executable, "-m", "artifacts", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def outcome(main, capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(main, [])
    return caught.value.code, *capsys.readouterr()


def raising(error):
    def main(argv):
        raise error

    return main


def test_exit_codes(capsys):
    assert outcome(lambda argv: None, capsys) == (0, "", "")
    assert outcome(lambda argv: 3, capsys) == (3, "", "")
    assert outcome(raising(HeadwiseError("no such model")), capsys) == (
        2,
        "",
        "error: no such model\n",
    )
    assert outcome(raising(ArtifactError("two\nlines\x1b[2J")), capsys) == (
        2,
        "",
        "error: two\\nlines\\x1b[2J\n",
    )
    assert outcome(raising(KeyboardInterrupt()), capsys) == (130, "", "interrupted\n")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(raising(ZeroDivisionError()), [])


def test_a_package_that_serving_does_without(capsys):
    def missing(name):
        def main(argv):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return main

    with pytest.raises(SystemExit) as ended:
        run_command(missing("matplotlib.figure"))
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: matplotlib is not installed: pip install 'headwise[search]'\n"
    )
    with pytest.raises(ModuleNotFoundError):
        run_command(missing("numpy"))


def test_bad_arguments_give_one_line(capsys):
    parser = ArgumentParser(prog="tool")
    parser.add_argument("--length", type=int)
    for argv, said in (
        (["--length", "x\ny"], "invalid int value: 'x\\\\ny'"),
        (["--len", "5"], "--len"),
    ):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(argv)
        err = capsys.readouterr().err
        assert caught.value.code == 2
        assert err.startswith("error: ") and err.count("\n") == 1 and "tool --help" in err
        assert said.replace("\\\\", "\\") in err


def test_validate(saved):
    done = run("validate", saved)
    assert (done.returncode, done.stderr) == (0, "")
    note, ok = done.stdout.splitlines()
    assert note.startswith("note     one-prompt  search.calibration: ")
    assert ok.startswith(f"ok: {saved} (schema 1, content ")
    facts = json.loads(run("validate", saved, "--json").stdout)
    assert facts["valid"] is True and facts["content_sha256"] == load(saved).content_sha256
    assert facts["arrays"]["chosen.recall"] == {"dtype": "float32", "shape": [3, 4]}


def test_no_action_and_no_file():
    for args in ((), ("show",), ("look", "cfg.yaml")):
        done = run(*args)
        assert (
            done.returncode == 2
            and done.stderr.startswith("error: ")
            and done.stderr.count("\n") == 1
        )


def test_help_teaches():
    for args in (("--help",), ("show", "--help"), ("validate", "--help")):
        done = run(*args)
        assert done.returncode == 0 and ("YAML file" in done.stdout or "examples" in done.stdout)


def page(path, capsys, monkeypatch, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["show", str(path)])
    return capsys.readouterr().out


def test_show(saved, capsys, monkeypatch):
    text = page(saved, capsys, monkeypatch)
    assert all(len(line) <= 80 for line in text.splitlines())
    prose = " ".join(text.split())
    for expected in (
        "tiny at 12e45, LlamaForCausalLM: 3 layers of 4 query and 2 KV heads",
        "$ headwise search --model tiny --out cfg.yaml",
        "kv_retrieval, 1 prompt of 4,096 tokens",
        "recall 0.9300, output error 1e-05, density 0.2400 (target 0.2500); means over 8 heads",
    ):
        assert expected in prose
    assert "vertical_slash      4  50.0%  vs_100_1800 x3, vs_30_2048_q32 x1\n" in text
    assert "prefill   2.5 s    3.75 s  dense sdpa   8,192        5\n" in text
    rows = [
        line.split()
        for line in text.splitlines()
        if line.startswith("      ") and line.strip()[:1] in "012"
    ]
    recall = np.linspace(0.5, 1.0, 12).reshape(3, 4).mean(1)
    assert rows == [
        ["0", "VVAB", f"{recall[0]:.4f}"],
        ["1", "....", "-"],
        ["2", "VVAD", f"{recall[2]:.4f}"],
    ]


def test_show_every_kind(tmp_path, every_kind, capsys, monkeypatch):
    artifact, arrays = every_kind
    save(artifact, tmp_path / "cfg.yaml", arrays)
    text = page(tmp_path / "cfg.yaml", capsys, monkeypatch, columns=100)
    rows = [
        line.split()[:2]
        for line in text.splitlines()
        if line[:6].isspace() and line.strip()[:2] in "0 1 2 3 4 "
    ]
    assert rows == [["0", "VVAB"], ["1", "...."], ["2", "DTLS"], ["3", "FVBD"], ["4", "DDKM"]]
    assert "T tri_shape, L dilated, S strided, F static" in text


def test_show_what_can_be_chosen_and_what_it_was_counted_by(
    tmp_path, every_kind, capsys, monkeypatch
):
    artifact, arrays = every_kind
    save(artifact, tmp_path / "cfg.yaml", arrays)
    text = page(tmp_path / "cfg.yaml", capsys, monkeypatch)
    assert all(len(line) <= 80 for line in text[: text.index("winners by kind")].splitlines())
    prose = " ".join(text.split())
    for expected in (
        "budget 0.25 for all heads together, by seconds of a processor, 40 trials, seed 7",
        "kv_retrieval, passkey, 2 prompts each of 2,048, 4,096 tokens",
        "costs a processor, cpu kernels: a_shape, vertical_slash in bfloat16; the search counted "
        "by it",
        "sizes hold at 4,096 tokens and go with powers of the length: vertical_slash vertical "
        "^0.5, slash ^1 ",
        "dense attention takes 2 s kl (nats a token), recall and answers: on held-out prompts",
    ):
        assert expected in prose
    front = text[text.index("front at 4,096 tokens") :].splitlines()[1:4]
    assert [line.split() for line in front] == [
        ["attention", "speedup", "kl", "recall", "density", "lost", "answers"],
        ["0.5", "s", "4.00x", "0.25", "0.9000", "0.2000", "3", "of", "14"],
        ["*", "1", "s", "2.00x", "0.01", "0.9000", "0.2000", "0", "of", "14"],
    ]


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"changed")]
)
def test_show_of_a_damaged_sidecar_is_a_finding(saved, damage, capsys):
    assert main(["show", str(saved)]) == main(["show", str(saved), "--json"]) == 0
    (sidecar,) = saved.parent.glob("*.safetensors")
    damage(sidecar)
    capsys.readouterr()
    assert main(["show", str(saved)]) == 3 and "PROBLEM" in capsys.readouterr().out
    assert main(["show", str(saved), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "tiny"


def test_an_argument_too_many_shows_the_verbs_own_usage(saved, tmp_path):
    done = run("merge", saved, "other.yaml", "--out", tmp_path / "out.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: unrecognized arguments: other.yaml; usage: headwise merge "
    )
    assert done.stderr.endswith("(see headwise merge --help)\n") and done.stderr.count("\n") == 1


def test_show_wraps_many_heads(tmp_path, make, capsys, monkeypatch):
    artifact = make()
    model = artifact.model.model_copy(update={"num_heads": 128, "num_layers": 1})
    rows = (("bs_9",) * 127 + ("dense",),)
    patterns = {name: artifact.patterns[name] for name in ("bs_9", "dense")}
    prefill = artifact.prefill.model_copy(update={"layers": rows})
    save(
        artifact.model_copy(update={"model": model, "patterns": patterns, "prefill": prefill}),
        tmp_path / "a.yaml",
    )
    text = page(tmp_path / "a.yaml", capsys, monkeypatch)
    assert f"{'B' * 32}\n         {'B' * 32}\n         {'B' * 32}\n         {'B' * 31}D\n" in text


def test_show_moves_no_cursor(tmp_path, make, capsys, monkeypatch):
    artifact = make()
    model = artifact.model.model_copy(update={"name": "evil\x1b[2J"})
    save(artifact.model_copy(update={"model": model, "evidence": Evidence()}), tmp_path / "a.yaml")
    text = page(tmp_path / "a.yaml", capsys, monkeypatch)
    assert "\x1b" not in text and "evil\\x1b[2J" in text
    assert "evidence: none measured yet" in text


def test_show_json_is_the_artifact(saved, capsys):
    main(["show", str(saved), "--json"])
    assert type(load(saved)).model_validate_json(capsys.readouterr().out) == load(saved)


def test_a_closed_pipe_is_quiet(saved):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "artifacts", "show", str(saved)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("stdout", ["full", "closed"])
@pytest.mark.parametrize("words", [["schema"], ["--help"], ["validate", "FILE", "--json"]])
def test_output_that_cannot_be_written_is_one_line(saved, monkeypatch, capfd, stdout, words):
    # run_command takes the stream apart, which nobody else can close then.
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w") if stdout == "full" else None)  # noqa: SIM115
    with pytest.raises(SystemExit) as ended:
        run_command(main, [str(saved) if word == "FILE" else word for word in words])
    why = {"full": "no space left on device", "closed": "it is closed"}[stdout]
    assert (
        ended.value.code == 2
        and capfd.readouterr().err == f"error: cannot write the output: {why}\n"
    )


def test_nothing_is_said_when_the_interpreter_flushes_what_could_not_be_written():
    """The stream's buffer is written again at exit, after all handlers."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "artifacts", "schema"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: cannot write the output: no space left on device\n",
    )


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        ("artifacts --help", "yaml"),
        ("runtime.vllm.check --help", "torch"),
        ("profiling.doctor", "torch"),
        ("search.heads --model no/such --out cfg.yaml", "torch"),
    ],
)
def test_ctrl_c_during_the_imports_is_one_line(tmp_path, command, imported):
    (tmp_path / f"{imported}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_terminal_without_the_letters(tmp_path, make):
    artifact = make()
    model = artifact.model.model_copy(update={"name": "modèle"})
    save(artifact.model_copy(update={"model": model}), tmp_path / "a.yaml")
    done = run("show", tmp_path / "a.yaml", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "mod\\xe8le" in done.stdout


def test_exit_statuses_of_verbs(saved, tmp_path, make):
    """Status 0, 2 (bad input: one line on stderr, no file) and 3 (findings or differences)."""
    save(make(evidence=Evidence()), tmp_path / "other.yaml")
    heads = tmp_path / "heads.json"
    heads.write_text('[{"0": ["stream_llm", 64, 512, 0.5]}]')
    out = tmp_path / "out.yaml"
    shape = ("--heads", 1, "--kv-heads", 1, "--head-dim", 64, "--max-positions", 8192)
    for status, args in (
        (3, ("validate", tmp_path / "other.yaml")),
        (0, ("diff", saved, saved)),
        (3, ("diff", saved, tmp_path / "other.yaml")),
        (0, ("convert", heads, *shape, "--out", out)),
        (0, ("schema",)),
        (2, ("validate", heads)),
        (2, ("diff", saved, tmp_path / "none.yaml")),
        (2, ("convert", heads, "--out", tmp_path / "x.yaml")),
        (2, ("convert", heads, "--sinks", "four", "--out", tmp_path / "x.yaml")),
        (2, ("merge", saved, "--decode", heads, "--out", tmp_path / "x.yaml")),
    ):
        done = run(*args)
        assert done.returncode == status, done.stderr
        assert bool(done.stdout) == (status != 2) and done.stderr.count("\n") == (status == 2)
    assert not (tmp_path / "x.yaml").exists()
    assert load(out).prefill.imported.file == "heads.json"
    text = run("show", out).stdout
    assert "recall\n      0  A             0.5000\n" in text
    assert (
        "imported     heads.json, minference, " in text
        and "not compared with any weights" in " ".join(text.split())
    )
