"""System functions for files that survive a crash: fsync, a rename that exchanges two folders, file locks.

Needs only the standard library, because the device runtime uses it.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a device, or a file system without fsync for folders
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` everything in a folder, then the folder itself."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            sync_tree(entry)
        elif entry.is_file():
            sync(entry)
    sync(folder)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders atomically. Returns False, and changes nothing, if the system cannot."""
    import ctypes

    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old C library
        return False
    return bool(rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0)


def lock(file: Path) -> int | None:
    """Lock a file, write this process's id into it and return its descriptor; None if locks are not supported.

    Raises BlockingIOError if another process holds the lock. The system releases the lock when a process ends in any
    way, so a leftover file blocks nobody.
    """
    if fcntl is None:
        return None
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:  # nothing can be written there; later steps report that
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()}\n".encode())
                    return descriptor
            os.close(descriptor)  # the last holder has removed the file meanwhile
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:  # a file system without locks, or a full one
            os.close(descriptor)
            return None


def unlock(file: Path, descriptor: int) -> None:
    """Release a lock and remove its file."""
    file.unlink(missing_ok=True)  # before the release, after which the file may belong to another process
    os.close(descriptor)
