"""Load the native kernels: a wheel's, or compiled at first use and kept in the cache."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from kernels.native import prebuilt

_KERNELS = Path(__file__).parents[1]
SOURCES = tuple(
    _KERNELS / name
    for name in (
        "attention/cpu.cpp",
        "decode/cpu.cpp",
        "decode/sums.cpp",
        "patterns/cpu.cpp",
    )
)
HEADERS = tuple(
    _KERNELS / name
    for name in (
        "native/vectors.h",
        "native/tiles.h",
        "native/engines.h",
        "attention/index.h",
        "attention/panels.h",
    )
)
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-w",
    # Tuning for AMD splits each fused multiply-add in two: a fifth slower, also there.
    *(("-mtune=generic",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
_THIS_MACHINE = ("-march=native",)
_log = logging.getLogger("headwise")


_loading = threading.Lock()
# Seconds after which nobody waits for another process any more.
_LONGEST_BUILD = 600


@functools.cache
def load() -> str | None:
    """Make torch.ops.headwise available, compiled if need be; the reason where it cannot be.

    A library that the wheel brought for this processor is taken, unless CXX asks for a compiler.
    Else it is compiled, which is tried once a process, and done once by all processes of a machine
    that start together: they wait for the first. It is compiled in a temporary folder and renamed,
    so that an interrupted build does no harm. A library that does not load (cut off, or of another
    machine that shares the folder) is compiled again. The folder must belong to the user, and
    nobody else may write to it. HEADWISE_CACHE moves the cache folder, CXX names another
    compiler.
    """
    # Threads that come first together would compile and load two, and torch takes operators of a
    # name only once.
    with _loading:
        return _load()


def _load() -> str | None:
    if os.environ.get("CXX"):
        brought = None
    else:
        brought = prebuilt.find()
    if brought is not None:
        if (reason := _why_not_loaded(brought)) is None:
            return None
        _log.warning("the CPU kernels of the wheel are not used: %s", reason)
    compiler = find_compiler()
    if isinstance(compiler, str):
        return compiler
    try:
        library = cache_folder() / f"cpu-{_key(compiler)}.so"
        if (reason := _make_private(library)) is not None:
            return (
                f"compiled kernels are not taken from there: {reason} "
                f"(HEADWISE_CACHE moves the cache folder)"
            )
        if library.exists() and _why_not_loaded(library) is None:
            return None
        with _lock(library):
            exists = library.exists()
            # Another process may have compiled it in the meantime.
            if not exists or _why_not_loaded(library) is not None:
                if exists:
                    _log.warning("the compiled CPU kernels do not load: compiling them again")
                _log.info("compiling the CPU kernels, once for this machine")
                compile_library(compiler, library)
                return _why_not_loaded(library)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(compiler)} failed: {_first_error(error.stderr)}"
    except (OSError, RuntimeError) as error:
        return (
            f"the compiled library cannot be stored: {error} "
            f"(HEADWISE_CACHE moves the cache folder)"
        )
    return None


@contextmanager
def _lock(library: Path) -> Iterator[None]:
    """Lock the library for one process of this machine; after a long wait for none."""
    from filelock import FileLock, Timeout

    lock = FileLock(library.parent.parent / f"{library.stem}.lock", timeout=_LONGEST_BUILD)
    try:
        lock.acquire()
    except (Timeout, NotImplementedError):
        # A second build at the same time costs time and nothing else.
        _log.warning(
            "waited %d s for another process that compiles the CPU kernels", _LONGEST_BUILD
        )
    try:
        yield
    finally:
        lock.release()


def _make_private(library: Path) -> str | None:
    """Make the library's folder, for its user alone; why nothing is loaded from there, else None.

    Loading a library runs it: whoever can write there runs code as whoever loads from it.
    """
    folder = library.parent
    root = folder.parent
    root.parent.mkdir(parents=True, exist_ok=True)
    # Whatever the umask: one that others could write to would be refused.
    root.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.name != "posix":
        return None
    user = os.geteuid()
    for path, remedy in (
        (folder, "empty it and chmod 700 it"),
        (root, "chmod go-w it"),
        (library, "remove it"),
    ):
        if path is library and not library.exists():
            continue
        status = path.stat()
        # Nobody needs to be kept from what root could do anyway; but the folder has to be written
        # to.
        if status.st_uid != user and (status.st_uid != 0 or path is folder):
            return f"{path} belongs to user {status.st_uid}, not to {user}"
        # In a folder such as /tmp nobody can rename the files of other users.
        shared = path is root and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not shared:
            return f"others can write to {path} (mode {status.st_mode & 0o777:03o}): {remedy}"
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return None


def _why_not_loaded(library: Path) -> str | None:
    if _cut_off(library):
        return "the compiled library cannot be loaded: it is cut off"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the compiled library cannot be loaded: {error}"
    return None


def _cut_off(library: Path) -> bool:
    """True if the file ends before its table of sections: loading it would end the process."""
    with library.open("rb") as file:
        head = file.read(64)
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        return False
    table, size, count = (
        int.from_bytes(head[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62))
    )
    return library.stat().st_size < table + size * count


def cache_folder() -> Path:
    """Folder of compiled libraries; RuntimeError where the user has no home."""
    root = os.environ.get("HEADWISE_CACHE") or Path.home() / ".cache" / "headwise"
    return Path(root) / "kernels"


def find_compiler() -> list[str] | str:
    """The compiler's command (CXX, c++ or g++), or why there is none."""
    if name := os.environ.get("CXX"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
        return f"no C++ compiler found: CXX is {name!r}"
    path = shutil.which("c++") or shutil.which("g++")
    if path is None:
        return "no C++ compiler found (install g++, or set CXX)"
    return [path]


def _first_error(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[0])


def compile_library(
    compiler: list[str], library: Path, machine: tuple[str, ...] = _THIS_MACHINE
) -> None:
    """Compile all sources into one library, for the processors that the flags `machine` name.

    Raises subprocess.CalledProcessError with the compiler's message, OSError where it cannot be
    stored.
    """
    home = Path(torch.__file__).parent
    openmp = ["-fopenmp"]
    if sys.platform == "darwin":
        openmp = []
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [*compiler, *machine, *_FLAGS, *openmp, abi]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [str(Path(folder) / f"{at}.o") for at in range(len(SOURCES))]
        # One compiler process a source, all at once: most of the time goes into torch's headers.
        for _ in pool.map(
            lambda source, to: _run(
                [*command, f"-I{home / 'include'}", "-c", str(source), "-o", to]
            ),
            SOURCES,
            objects,
        ):
            pass
        built = Path(folder) / library.name
        _run(
            [
                *command,
                "-shared",
                *objects,
                "-o",
                str(built),
                f"-L{home / 'lib'}",
                "-ltorch_cpu",
                "-lc10",
            ]
        )
        # Whatever the umask: one that others could write to would not be loaded.
        built.chmod(0o755)
        os.replace(built, library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _key(compiler: list[str]) -> str:
    """Digest of sources, flags, compiler, torch and this processor's instructions."""
    processor = (platform.machine(), *sorted(prebuilt.processor_flags()))
    texts = (path.read_text() for path in (*SOURCES, *HEADERS))
    flags = (*_THIS_MACHINE, *_FLAGS)
    parts = (
        *texts,
        *flags,
        *compiler,
        _version(compiler),
        torch.__version__,
        sys.platform,
        *processor,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _version(compiler: list[str]) -> str:
    """The compiler's version line; empty where it says none."""
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
