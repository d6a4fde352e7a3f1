"""Cubins on disk, shared by processes and nodes.

A file `<key>.cubin` is the cubin followed by its SHA-256 (tools that read ELF ignore what follows it); `<key>.log` beside it says what
it is. Writers make a temporary file, flush it to disk and rename it, so a reader sees a whole file or none. One process compiles a key
while others wait on a lock that the system frees when its owner dies; without locks work is done twice, never wrongly."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .. import environment

_MAGIC = b"DGCUBIN1"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# A compilation takes seconds; who waits longer than this compiles for himself (a stopped process may hold the lock).
LOCK_WAIT_SECONDS = 300.0

counters: Counter[str] = Counter()  # hits_memory, hits_pack, hits_disk, misses, corrupted; compile_seconds

# NVRTC compiles one program at a time per process, and POSIX locks do not exclude the threads of a process: one lock serves both.
_process_lock = threading.Lock()


def _after_fork() -> None:
    global _process_lock
    _process_lock = threading.Lock()  # its owner, if any, is a thread that does not exist in the child


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Entry:
    """cubin, and where it came from: "pack", "disk" or "compiled"; path: its file, None when it is only in memory."""

    key: str
    cubin: bytes = field(repr=False)
    origin: str
    path: Path | None


def directory() -> Path | None:
    """Folder of the disk cache: DG_CACHE_DIR; None when there is no home directory to put it in."""
    try:
        return Path(environment.text("DG_CACHE_DIR")).expanduser().absolute()
    except RuntimeError:
        return None


def writable() -> bool:
    """Whether this process can add kernels to the disk cache."""
    root = directory()
    try:
        if root is not None:
            root.mkdir(parents=True, exist_ok=True)
            return os.access(root, os.W_OK | os.X_OK, effective_ids=True)
    except OSError:
        pass
    return False


@functools.cache
def warn_once(text: str) -> None:
    """RuntimeWarning, the first time that the process says this."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def seal(cubin: bytes) -> bytes:
    return cubin + _MAGIC + hashlib.sha256(cubin).digest()


def unseal(data: bytes) -> bytes | None:
    """The cubin, or None when the file is cut or changed."""
    cubin, mark = data[:-40], data[-40:]
    return cubin if cubin and mark == _MAGIC + hashlib.sha256(cubin).digest() else None


def _read(path: Path) -> Entry | None:
    try:
        cubin = unseal(path.read_bytes())
    except OSError:
        return None
    if cubin is None:
        counters["corrupted"] += 1
        return None
    return Entry(path.stem, cubin, "disk", path)


def find(key: str) -> Entry | None:
    """The cubin of `key` from the disk."""
    root = directory()
    return _read(root / f"{key}.cubin") if root else None


def _write(root: Path, name: str, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=root)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600; others may share the folder
        os.replace(temporary, root / name)
    except BaseException:
        os.unlink(temporary)
        raise


def _store(root: Path | None, key: str, cubin: bytes, log: str) -> Path | None:
    if root is None:
        warn_once("no home directory: set DG_CACHE_DIR to keep compiled kernels; each process compiles them anew")
        return None
    try:
        root.mkdir(parents=True, exist_ok=True)
        _write(root, f"{key}.log", log.encode())
        _write(root, f"{key}.cubin", seal(cubin))
    except OSError as error:
        warn_once(
            f"cannot write compiled kernels to {root} ({error.strerror}): each process compiles them anew; "
            "set DG_CACHE_DIR to a writable folder"
        )
        return None
    return root / f"{key}.cubin"


@contextmanager
def _lock(root: Path | None, key: str) -> Iterator[None]:
    """Holds the key's lock file. Goes on without it when the folder is read-only, has no locks, or the owner takes too long."""
    try:
        if root is None:
            raise OSError(errno.ENOENT, "no folder")
        (root / "locks").mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / "locks" / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield  # _store warns
        return
    try:
        if _acquire(descriptor, root):
            for leftover in root.glob(f".{key}.*.tmp"):  # of a writer that was killed: only the owner of the lock writes this key
                leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)  # frees the lock


def _acquire(descriptor: int, root: Path) -> bool:
    deadline, pause = time.monotonic() + LOCK_WAIT_SECONDS, 0.005
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warn_once(f"{root} is on a file system without locks: processes that start together compile the same kernels")
                return False
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() > deadline:
            warn_once(f"waited {LOCK_WAIT_SECONDS:.0f} s for another process to compile (locks in {root / 'locks'}): compiling here too")
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def get_or_build(key: str, build: Callable[[], tuple[bytes, str]]) -> Entry:
    """The cubin of `key`; `build` makes (cubin, text of the log file) when the disk lacks it, in one process at a time."""
    entry = find(key)
    if entry is None:
        root = directory()
        with _process_lock, _lock(root, key):
            entry = find(key)  # another process may have made it while this one waited
            if entry is None:
                begin = time.perf_counter()
                cubin, log = build()
                counters["misses"] += 1
                counters["compile_seconds"] += time.perf_counter() - begin
                return Entry(key, cubin, "compiled", _store(root, key, cubin, log))
    counters["hits_disk"] += 1
    return entry


def clear() -> None:
    """Removes the files of the disk cache. Lock files stay: a process may be waiting on one."""
    root = directory()
    if root is None:
        return
    for pattern in ("*.cubin", "*.log", ".*.tmp"):
        for path in root.glob(pattern):
            path.unlink(missing_ok=True)
