"""One process at a time works in a folder."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

LOCK = ".lock"


def holds_something(folder: Path) -> bool:
    """Whether there is anything in a folder besides the lock, which a killed process leaves behind."""
    return any(entry.name != LOCK for entry in folder.iterdir())


class FolderLock:
    """Keeps other processes out of a folder, between `take` and `give_back`.

    The system gives the lock back when the process ends, however it ends, and no process that it began inherits it.
    A file system without locks keeps nobody out of a folder that is there.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: IO[str] | None = None
        self.is_new = False
        """Whether the folder was made for this lock."""

    def take(self, *, new: bool = False) -> bool:
        """Take the lock, in a folder that is made where it is not there.

        Args:
            new: whether the folder must not be there.

        Returns:
            Whether it was taken; False where another process has it, or is just giving it back.

        Raises:
            OSError: the folder or the file cannot be made.
        """
        try:
            self._folder.mkdir(parents=True)
            self.is_new = True
        except FileExistsError:
            if not self._folder.parent.is_dir():  # a link to nowhere, which no process will take away
                raise
            if new:
                return False
        try:
            file = (self._folder / LOCK).open("w")
        except FileNotFoundError:  # whose folder it was has just taken it away
            return False
        if not self._is_ours(file):
            file.close()
            return False
        self._file = file
        return True

    def _is_ours(self, file: IO[str]) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), (self._folder / LOCK).stat())
        return False  # another process took the file away between opening and locking

    def give_back(self, *, unused: bool) -> None:
        """Let other processes in, if `take` kept them out.

        Args:
            unused: take the file away as well, and the folder where it was made for this lock and holds nothing more.
        """
        if self._file is None:
            return
        if unused:
            (self._folder / LOCK).unlink(missing_ok=True)
            if self.is_new:
                with suppress(OSError):  # others put something there
                    self._folder.rmdir()
        self._file.close()
        self._file = None
