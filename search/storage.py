"""Where a search keeps what it found so far: any storage of Optuna, fit for processes that start and die together."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from search.study_journal import StudyJournal

SUFFIX = ".study.journal"
KNOWN = (
    "a file that ends in .journal, .log or .jsonl, sqlite:///FILE, postgresql://USER@HOST/NAME, "
    "mysql://USER@HOST/NAME, grpc://HOST:PORT"
)
_JOURNALS = (".journal", ".log", ".jsonl")
# SQLAlchemy's name of a driver, the module and the package; the first that is there serves a URL that names none.
_DRIVERS = {
    "postgresql": (("psycopg", "psycopg", "psycopg[binary]"), ("psycopg2", "psycopg2", "psycopg2-binary")),
    "mysql": (("pymysql", "pymysql", "pymysql"), ("mysqldb", "MySQLdb", "mysqlclient")),
}
_PACKAGES = {name: package for drivers in _DRIVERS.values() for name, _, package in drivers}
_GRPC_SECONDS = 10
_SQLITE_SECONDS = 60
_CONNECT_SECONDS = 15
_TABLE_ATTEMPTS = 6


def open_storage(url: str | None, out: Path) -> BaseStorage:
    """The storage that all processes of a search share.

    Args:
        url: what KNOWN lists; None is a journal beside the artifact.
        out: the artifact that is searched for.

    Raises:
        HeadwiseError: one line for all that can be wrong with the URL and what it leads to, without its password.
    """
    # What Optuna says of each trial is in the progress bar.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None:
        return _journal(out.with_suffix(SUFFIX))
    if url.startswith("journal://"):
        return _journal(Path(url.removeprefix("journal://")).expanduser())
    if "://" not in url and url.endswith(_JOURNALS):
        return _journal(Path(url).expanduser())
    if url.startswith("grpc://"):
        return _proxy(url)
    if "://" in url:
        return _database(url)
    raise HeadwiseError(f"cannot use the storage {shorten(url)}; known: {KNOWN}")


def without_passwords(text: str) -> str:
    """The text, such as a command line, with three stars for each password in a URL."""
    return re.sub(r"(://[^\s:/@]*):[^\s]*@", r"\1:***@", text)


def _journal(path: Path) -> BaseStorage:
    shown = shorten(str(path), 400)
    try:
        return optuna.storages.JournalStorage(StudyJournal(path))
    except OSError as error:
        raise HeadwiseError(f"cannot use the journal {shown}: {(error.strerror or str(error)).lower()}") from error
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise HeadwiseError(f"{shown} is no journal of a search; choose another file") from error


def _proxy(url: str) -> BaseStorage:
    host, _, port = url.removeprefix("grpc://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise HeadwiseError(f"cannot use the storage {shorten(url)}: it must be grpc://HOST:PORT")
    missing = [package for package in ("grpc", "google.protobuf") if not _installed(package)]
    if missing:
        raise HeadwiseError(f"cannot use the storage {shorten(url)}: packages are missing: pip install grpcio protobuf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = optuna.storages.GrpcStorageProxy(host=host, port=int(port))
    try:
        storage.wait_server_ready(timeout=_GRPC_SECONDS)
    except ConnectionError:
        raise HeadwiseError(
            f"cannot use the storage {shorten(url)}: no proxy answered within {_GRPC_SECONDS} s; "
            "start one with optuna.storages.run_grpc_proxy_server"
        ) from None
    return storage


def _database(url: str) -> BaseStorage:
    import sqlalchemy

    shown = without_passwords(url)
    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise HeadwiseError(f"cannot use the storage {shown}: this is no URL; known: {KNOWN}") from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", *_DRIVERS):
        raise HeadwiseError(f"cannot use the storage {shown}: unknown kind of database {backend!r}; known: {KNOWN}")
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise HeadwiseError(f"cannot use the storage {shown}: it is in memory and ends with the process; give a file")
    parsed = _with_driver(parsed)
    try:
        return _connected(parsed)
    except sqlalchemy.exc.NoSuchModuleError:
        raise HeadwiseError(f"cannot use the storage {shown}: SQLAlchemy knows no driver of that name") from None
    except ImportError:
        raise HeadwiseError(f"cannot use the storage {shown}: its driver is missing: {_install(parsed)}") from None
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
        reason = str(getattr(error, "orig", None) or error)
        if parsed.password:
            reason = reason.replace(str(parsed.password), "***")
        reason = one_line(" ".join(reason.split()))
        raise HeadwiseError(f"cannot use the storage {shown}: {reason[:300]}") from None


def _connected(url: Any) -> BaseStorage:
    import sqlalchemy

    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        options = {"connect_args": {"timeout": _SQLITE_SECONDS}}
    elif _driver(url) in _PACKAGES:
        options["connect_args"] = {"connect_timeout": _CONNECT_SECONDS}
    engine = sqlalchemy.create_engine(url, **options)
    # What is wrong with the connection shows here, and what is left after it is the race for the tables.
    engine.connect().close()
    engine.dispose()
    text = url.render_as_string(hide_password=False)
    with _alone(url):
        for attempt in range(_TABLE_ATTEMPTS):
            try:
                storage = optuna.storages.RDBStorage(text, engine_kwargs=options)
                break
            except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError):
                # Two that start together both make the tables, and one of them fails over it.
                if attempt + 1 == _TABLE_ATTEMPTS:
                    raise
                time.sleep(0.1 * 2**attempt)
    if url.get_backend_name() == "sqlite":
        _write_at_once(storage.engine)
    # Optuna caches finished trials for a storage that it makes itself.
    return optuna.storages.get_storage(storage)


@contextlib.contextmanager
def _alone(url: Any) -> Iterator[None]:
    """One process at a time makes the tables of an SQLite file: two that start together break it."""
    if url.get_backend_name() != "sqlite":
        yield
        return
    from filelock import FileLock

    with FileLock(f"{url.database}.lock"):
        yield


def _write_at_once(engine: Any) -> None:
    """Let SQLite's transactions begin as writers, so that what one reads still holds when it writes."""
    from sqlalchemy import event

    @event.listens_for(engine, "connect")
    def no_implicit_begin(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    # Connections made before do not know of it.
    engine.dispose()


def _with_driver(url: Any) -> Any:
    """A URL that names no driver with the first one that is installed."""
    backend = url.get_backend_name()
    if "+" in url.drivername or backend not in _DRIVERS:
        return url
    drivers = [name for name, module, _ in _DRIVERS[backend] if _installed(module)]
    return url.set(drivername=f"{backend}+{(drivers or [_DRIVERS[backend][0][0]])[0]}")


def _install(url: Any) -> str:
    return f"pip install '{_PACKAGES.get(_driver(url), _driver(url))}'"


def _driver(url: Any) -> str:
    return str(url.drivername.partition("+")[2])


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
