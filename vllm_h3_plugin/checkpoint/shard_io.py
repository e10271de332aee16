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


class OpenShard:
    """A descriptor of a file that is still the one whose header was read.

    The kernel's readahead stays as it is. Without it (POSIX_FADV_RANDOM) nothing but what was asked for would be
    cached, but reading costs a third more CPU time, since the kernel then takes pages one by one; and what it reads
    too much is dropped when the file is closed.

    Raises:
        CheckpointError: it cannot be opened, or has changed since.
    """

    def __init__(self, file: ShardFile) -> None:
        self.file = file
        try:
            self.descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise self._unreadable(0, exc) from exc
        try:
            self.check_unchanged()
        except BaseException:
            os.close(self.descriptor)
            raise

    def read_into(self, view: memoryview, offset: int, what: str = "") -> None:
        """Fill ``view`` with the bytes from ``offset`` on and drop them from the page cache.

        Args:
            what: what these bytes belong to, for the message.

        Raises:
            CheckpointError: the file cannot be read or ends early; ``details["offset"]`` is the byte.
        """
        done = 0
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
        drop_range(self.descriptor, offset, offset + len(view))

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
