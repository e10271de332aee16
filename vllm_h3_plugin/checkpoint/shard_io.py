# SPDX-License-Identifier: Apache-2.0
"""One weight file, read in blocks: every failure names the file and the byte, and a file that changes is noticed.

Importing this module does not import torch.
"""

from __future__ import annotations

import os

from vllm_h3_plugin.checkpoint.faults import DOWNLOAD_AGAIN
from vllm_h3_plugin.checkpoint.page_cache import drop_file, drop_range
from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile
from vllm_h3_plugin.errors import CheckpointError

BLOCK = 4096
"""Files are read past the page cache in multiples of this, at offsets and into memory that are multiples of it."""

# Linux has it; elsewhere files are read through the page cache.
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class OpenShard:
    """Descriptors of a file that is still the one whose header was read.

    It is read past the page cache (O_DIRECT) where its file system can: that takes a tenth of the CPU time, nothing has
    to be dropped behind, and one thread keeps a disk busy. Where it cannot (tmpfs, some network and overlay file
    systems), the kernel reads through the cache and what was read is dropped.

    Args:
        direct: False: through the page cache, for comparison.

    Raises:
        CheckpointError: it cannot be opened, or has changed since.
    """

    def __init__(self, file: ShardFile, *, direct: bool = True) -> None:
        self.file = file
        self._direct: int | None = None
        try:
            self.descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise self._unreadable(0, exc) from exc
        try:
            self.check_unchanged()
            if direct and _O_DIRECT:
                self._direct = self._open_direct()
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def direct(self) -> bool:
        """Whether it is read past the page cache."""
        return self._direct is not None

    def _open_direct(self) -> int | None:
        try:
            return os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
        except OSError:
            return None

    def read_into(self, view: memoryview, offset: int, what: str = "", *, room: memoryview | None = None) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Args:
            what: what these bytes belong to, for the message.
            room: the memory around ``view``, from the last multiple of :data:`BLOCK` before its first byte to the next
                one after its last, its address such a multiple too. None: there is none, and the page cache is used.

        Raises:
            CheckpointError: the file cannot be read or ends early; ``details["offset"]`` is the byte.
        """
        done = 0
        if room is not None and self._direct is not None:
            done = self._read_direct(room, offset, len(view))
        if done < len(view):
            self._read_cached(view, offset, done, what)

    def _read_direct(self, room: memoryview, offset: int, wanted: int) -> int:
        """Bytes of those wanted that were read; fewer where the disk or the file system does not go along."""
        assert self._direct is not None
        lead = offset % BLOCK
        done = 0
        while done < lead + wanted:
            try:
                size = os.preadv(self._direct, [room[done:]], offset - lead + done)
            except OSError:
                break  # the cached read says what is wrong, if anything is
            done += size
            if size == 0 or done % BLOCK:
                break  # the file's end, or a read that was cut short where the next one could not begin
        return max(0, min(done - lead, wanted))

    def _read_cached(self, view: memoryview, offset: int, done: int, what: str) -> None:
        begin = offset + done
        while done < len(view):
            try:
                size = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as exc:
                raise self._unreadable(offset + done, exc) from exc
            if size == 0:
                path, end = self.file.path, offset + done
                raise CheckpointError(
                    f"{path} ends at byte {end}{', inside ' if what else ''}{what}",
                    why=f"it goes on to byte {offset + len(view)} by its header",
                    fix=DOWNLOAD_AGAIN,
                    path=str(path),
                    offset=end,
                )
            done += size
        drop_range(self.descriptor, begin, offset + len(view))

    def check_unchanged(self) -> None:
        """Compare size and time with the header's, and the file that was opened with the one of that name now.

        Raises:
            CheckpointError: it was written to, replaced or removed.
        """
        file = self.file
        mine = os.fstat(self.descriptor)
        if (mine.st_size, mine.st_mtime_ns) != (file.size, file.mtime_ns):
            why = f"it had {file.size} bytes when it was checked and has {mine.st_size} now, or was written to since"
            raise self._changed(why)
        try:
            named = os.stat(file.path)
        except OSError as exc:
            raise self._changed(f"it was there when it was opened, and now: {exc.strerror}") from exc
        if (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
            raise self._changed("another file has taken its name since it was opened")

    def close(self) -> None:
        """Drop what is left of the file in the page cache, and close it."""
        try:
            drop_file(self.descriptor)
        finally:
            os.close(self.descriptor)
            if self._direct is not None:
                os.close(self._direct)
                self._direct = None

    def _changed(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path} changed while the checkpoint was in use",
            why=why,
            fix="Let the download or copy finish, then start again.",
            path=str(self.file.path),
        )

    def _unreadable(self, offset: int, exc: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path} cannot be read at byte {offset}",
            why=exc.strerror or str(exc),
            fix="Check the disk and the file's permissions.",
            path=str(self.file.path),
            offset=offset,
        )
