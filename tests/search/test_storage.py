"""Storages by URL, their mistakes in one line, and a journal that kills cannot spoil."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import search.storage
from artifacts import HeadwiseError
from search.storage import open_storage, without_passwords
from search.study import open_study
from search.study_journal import StudyJournal
from tests.search.work_runs import ROOT, SECONDS, Runs

OUT = Path("cfg.yaml")


def test_the_journal_lies_beside_the_artifact(tmp_path: Path) -> None:
    open_storage(None, tmp_path / "cfg.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["cfg.study.journal"]


@pytest.mark.parametrize("name", ["a.journal", "a.log", "a.jsonl"])
def test_paths_and_urls_of_journals_are_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    study = open_study(open_storage(name, OUT), "heads", {})
    for url in (f"journal://{name}", f"journal://{tmp_path}/{name}", str(tmp_path / name)):
        assert [s.study_name for s in open_storage(url, OUT).get_all_studies()] == [study.study_name]


def test_a_journal_stays_where_it_is_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("a.journal", OUT)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    open_study(storage, "heads", {})
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    "url, said",
    [
        ("study", "cannot use the storage 'study'; known: a file that ends in .journal"),
        ("", "cannot use the storage ''; known"),
        ("redis://host", "unknown kind of database 'redis'; known"),
        ("oracle://a:secret@host/x", "unknown kind of database 'oracle'"),
        ("postgres://a:secret@host/x", "unknown kind of database 'postgres'"),
        ("postgresql://a:secret@host:port/x", "postgresql://a:***@host:port/x: this is no URL"),
        ("postgresql+nothing://a:secret@host/x", "SQLAlchemy knows no driver of that name"),
        ("sqlite://", "in memory and ends with the process; give a file"),
        ("sqlite:////nowhere/at/all.db", "unable to open database file"),
        ("grpc://host", "it must be grpc://HOST:PORT"),
        ("grpc://host:port", "it must be grpc://HOST:PORT"),
        ("/nowhere/at/all.journal", "cannot use the journal '/nowhere/at/all.journal': no such file or directory"),
    ],
)
def test_mistakes_are_one_line_without_the_password(url: str, said: str) -> None:
    with pytest.raises(HeadwiseError) as raised:
        open_storage(url, OUT)
    assert said in str(raised.value)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "url, package",
    [
        ("postgresql://a:secret@host/x", "psycopg[binary]"),
        ("postgresql+psycopg2://a:secret@host/x", "psycopg2-binary"),
        ("mysql://a:secret@host/x", "pymysql"),
        ("mysql+mysqldb://a:secret@host/x", "mysqlclient"),
        ("grpc://host:13000", "grpcio protobuf"),
    ],
)
def test_a_missing_driver_is_named(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.storage, "_installed", lambda module: False)
    for module in ("psycopg", "psycopg2", "pymysql", "MySQLdb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HeadwiseError, match="pip install") as raised:
        open_storage(url, OUT)
    assert package in str(raised.value)
    assert "secret" not in str(raised.value)


def test_passwords_leave_command_lines() -> None:
    line = "--storage postgresql://a:p@ss/w:rd@host/x --out a:b@c --other mysql+pymysql://:pw@host/x --model hub/name"
    assert without_passwords(line) == (
        "--storage postgresql://a:***@host/x --out a:b@c --other mysql+pymysql://:***@host/x --model hub/name"
    )
    assert without_passwords("grpc://host:1 sqlite:///a.db") == "grpc://host:1 sqlite:///a.db"


@pytest.mark.parametrize("content", ["no json\n", '{"a": 1}\n', "[1]\n", '{"op_code": 99}\n', "\x00\n"])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.journal"
    path.write_text(content)
    with pytest.raises(HeadwiseError, match=r"is no journal of a search|is damaged"):
        open_storage(str(path), OUT)
    assert path.read_text() == content


def test_a_line_that_a_kill_cut_off_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    storage = open_storage(str(path), OUT)
    study = open_study(storage, "heads", {"seed": 1})
    whole = path.read_bytes()
    # As long as a result, so that its beginning is in no last block.
    path.write_bytes(whole + json.dumps({"op_code": 2, "text": "x" * 200_000}).encode()[:-1])
    other = open_storage(str(path), OUT)
    assert [s.study_name for s in other.get_all_studies()] == [study.study_name]
    open_study(other, "units", {})
    study.set_user_attr("went", "on")
    assert len(storage.get_all_studies()) == len(open_storage(str(path), OUT).get_all_studies()) == 2
    assert path.read_bytes().startswith(whole) and b"xxx" not in path.read_bytes()
    path.write_bytes(b'{"half')
    assert not open_storage(str(path), OUT).get_all_studies()


def test_what_is_finished_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    study = open_study(open_storage(None, tmp_path / "cfg.yaml"), "heads", {})
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    assert not synced
    study.tell(trial, 1.0)
    assert synced == [(tmp_path / "cfg.study.journal").stat().st_size]


def test_a_journal_that_was_removed_says_so(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path / "cfg.yaml")
    study = open_study(storage, "heads", {})
    (tmp_path / "cfg.study.journal").unlink()
    with pytest.raises(HeadwiseError, match="is gone"):
        study.set_user_attr("a", 1)
    with pytest.raises(HeadwiseError, match="is gone"):
        storage.get_all_studies()


def test_a_journal_serves_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    open_study(open_storage(None, tmp_path / "cfg.yaml"), "heads", {})
    assert [path.name for path in tmp_path.iterdir()] == ["cfg.study.journal"]
    assert len(open_storage(None, tmp_path / "cfg.yaml").get_all_studies()) == 1


@pytest.mark.slow
def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    StudyJournal(path).append_logs([])
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time\n"
            "file = open(sys.argv[1], 'r+b'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True)\n"
            "time.sleep(600)",
            str(path),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from search.study_journal import StudyJournal\n"
            "StudyJournal(Path(sys.argv[1])).append_logs([{'op_code': 1}])",
            str(path),
        ],
        cwd=ROOT,
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(4)
        assert path.read_bytes() == b""
        holder.kill()
        assert writer.wait(60) == 0
        assert path.read_bytes() == b'{"op_code":1}\n'
    finally:
        for process in (holder, writer):
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_processes_that_start_together_on_a_new_sqlite_file_all_get_there(tmp_path: Path) -> None:
    runs = Runs(tmp_path, f"sqlite:///{tmp_path}/study.db")
    try:
        for process in [runs.start("--together", "3") for _ in range(3)]:
            runs.finish(process)
        assert set(runs.begun().values()) == {1}
        assert len(runs.begun()) == 18
    finally:
        runs.close()


@pytest.fixture
def postgresql() -> Iterator[str]:
    """The URL of an empty database: HEADWISE_TEST_POSTGRESQL, or that of a server which is started here."""
    if not any(search.storage._installed(name) for name in ("psycopg", "psycopg2")):
        pytest.skip("no driver for PostgreSQL: pip install psycopg2-binary")
    if url := os.environ.get("HEADWISE_TEST_POSTGRESQL"):
        yield url
        return
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    folder = str(installed[-1]) if installed else None
    initdb, server, ready = (shutil.which(name, path=folder) for name in ("initdb", "postgres", "pg_isready"))
    if initdb is None or server is None or ready is None:
        pytest.skip("no PostgreSQL on this machine, and HEADWISE_TEST_POSTGRESQL names none")
    # The server refuses to run as root.
    prefix = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="pg") as data:
        if prefix:
            shutil.chown(data, "postgres")
        settled = [f"{data}/db", "-k", data, "-c", "listen_addresses=", "-c", "fsync=off"]
        made = [*prefix, initdb, "--no-sync", "-D", f"{data}/db", "-A", "trust", "-U", "headwise"]
        subprocess.run(made, check=True, capture_output=True, cwd=data)
        process = subprocess.Popen([*prefix, server, "-D", *settled], stderr=subprocess.DEVNULL, cwd=data)
        try:
            deadline = time.monotonic() + SECONDS
            while subprocess.run([ready, "-q", "-h", data]).returncode:
                assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
            yield f"postgresql://headwise@/postgres?host={data}"
        finally:
            # Fast shutdown: it waits for nobody.
            os.kill(int(Path(f"{data}/db/postmaster.pid").read_text().split()[0]), signal.SIGINT)
            process.wait(SECONDS)


@pytest.mark.slow
def test_processes_share_a_postgresql_database_and_one_is_killed(tmp_path: Path, postgresql: str) -> None:
    runs = Runs(tmp_path, postgresql)
    try:
        killed = runs.start("--hang", "unit 3", "--together", "2")
        other = runs.start("--together", "2", "--seconds", "0.1")
        holder = runs.wait_for("begin unit", "unit 3")
        runs.wait_for("end unit", "unit 2")
        runs.kill(killed)
        runs.finish(other)
        expected = 2 if holder == killed.pid else 1
        assert runs.begun()["unit 3"] == expected
        assert len(runs.begun()) == 18
        assert sum(runs.begun().values()) <= 19
    finally:
        runs.close()


@pytest.mark.slow
@pytest.mark.parametrize("behind", ["proxied.journal", "sqlite:///{folder}/proxied.db"])
def test_processes_share_what_lies_behind_a_proxy(tmp_path: Path, behind: str) -> None:
    pytest.importorskip("grpc", reason="the proxy needs grpcio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "import sys, optuna; from pathlib import Path; from search.storage import open_storage\n"
        "storage = open_storage(sys.argv[1], Path())\n"
        "optuna.storages.run_grpc_proxy_server(storage, host='127.0.0.1', port=int(sys.argv[2]))"
    )
    where = behind.format(folder=tmp_path) if "{" in behind else str(tmp_path / behind)
    server = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, where, str(port)], cwd=ROOT)
    runs = Runs(tmp_path, f"grpc://127.0.0.1:{port}")
    try:
        _wait_for_port(port)
        for process in [runs.start("--together", "2", "--seconds", "0.1") for _ in range(2)]:
            runs.finish(process)
        assert len(runs.begun()) == 18 and set(runs.begun().values()) == {1}
    finally:
        runs.close()
        server.kill()
        server.wait()


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("no proxy")
