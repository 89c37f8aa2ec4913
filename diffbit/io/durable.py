"""System functions for files that survive a crash: fsync, a rename that exchanges two folders, file locks.

| | Linux | macOS | Windows |
|---|---|---|---|
| a file is on disk | fsync | F_FULLFSYNC, or fsync where a file system has no such | FlushFileBuffers, by fsync |
| a folder's names are on disk | fsync | the same | what NTFS's journal keeps |
| two folders exchange names | renameat2 | renamex_np | never: one is moved aside, and `files.sweep` moves it back |
| a lock | flock | flock | msvcrt.locking |

Nobody has run the columns macOS and Windows there; the tests run them on stand-ins for these functions.

Needs only the standard library, because the device runtime uses it.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # not Windows
    msvcrt = None  # type: ignore[assignment]

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)
RENAME_SWAP = 2  # of renamex_np(2)
# Windows keeps others from reading the bytes that are locked: this one is far behind the process id in the file
LOCKED_BYTE = 1 << 30
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY)
OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # there only a writer may ask for it
    try:
        if not _reaches_disk(descriptor):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # a device, or a file system without fsync for folders
            raise
    finally:
        os.close(descriptor)


def _reaches_disk(descriptor: int) -> bool:
    """Write a file to disk as macOS does it, where fsync leaves the data in the disk's own memory. Returns False where
    the system or the file system has no such call."""
    if not hasattr(fcntl, "F_FULLFSYNC"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


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

    one, other = os.fsencode(first), os.fsencode(second)
    try:
        system = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return bool(system.renamex_np(one, other, RENAME_SWAP) == 0)
        return bool(system.renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0)
    except (AttributeError, OSError, TypeError):  # Windows, or an old C library
        return False


def lock(file: Path) -> int | None:
    """Lock a file, write this process's id into it and return its descriptor; None if locks are not supported.

    Raises BlockingIOError if another process holds the lock. The system releases the lock when a process ends in any
    way, so a leftover file blocks nobody.
    """
    if fcntl is None and msvcrt is None:
        return None
    while True:
        try:
            descriptor = os.open(file, OPEN, 0o666)
        except OSError as error:
            if fcntl is None and isinstance(error, PermissionError) and file.exists():
                raise BlockingIOError(error.errno, error.strerror) from None  # Windows: its holder is removing it
            return None  # nothing can be written there; later steps report that
        try:
            _take(descriptor)
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


def _take(descriptor: int) -> None:
    """Lock an open file. Raises BlockingIOError if another process has."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EDEADLK):
            raise BlockingIOError(error.errno, error.strerror) from None
        raise
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def unlock(file: Path, descriptor: int) -> None:
    """Release a lock and remove its file."""
    if fcntl is not None:
        file.unlink(missing_ok=True)  # before the release, after which the file may belong to another process
        os.close(descriptor)
        return
    os.close(descriptor)  # first: Windows removes no file that is open, and so none that another process has locked
    with suppress(OSError):
        file.unlink()
