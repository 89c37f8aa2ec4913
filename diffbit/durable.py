"""What the system offers for files that survive a crash: fsync, a rename that exchanges two folders, locks of files.

It needs the standard library alone, so that the device runtime can use it.
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
    """Wait until a file, or a folder's list of names, is on the disk."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a device, or a file system that has none for folders
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` of all that is in a folder, and of the folder."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            sync_tree(entry)
        elif entry.is_file():
            sync(entry)
    sync(folder)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at one moment. False, and nothing done, where the system cannot."""
    import ctypes

    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # no Linux, or an old C library
        return False
    return bool(rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


def lock(file: Path) -> int | None:
    """The descriptor of a lock file that is this process's now, with its number in it; None where there are no locks.

    Raises BlockingIOError where another process has it. The system takes the lock from a process that ends in any way,
    so a file that one leaves holds up nobody.
    """
    if fcntl is None:
        return None
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:  # nothing can be written there, and whatever else is tried will say so
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()}\n".encode())
                    return descriptor
            os.close(descriptor)  # its last holder has removed it meanwhile
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:  # a file system without locks, or a full one
            os.close(descriptor)
            return None


def unlock(file: Path, descriptor: int) -> None:
    """Give a lock back, and remove its file."""
    file.unlink(missing_ok=True)  # first: once it is given back, the file may be another's
    os.close(descriptor)
