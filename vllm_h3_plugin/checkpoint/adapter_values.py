# SPDX-License-Identifier: Apache-2.0
"""Look at every number of an adapter: one NaN in a factor makes every pixel of a clip NaN.

The bits are looked at as they are, so that neither torch nor a BF16 type is needed: a number is infinite or NaN where
all bits of its exponent are set.
"""

from __future__ import annotations

import os

import numpy as np

from vllm_h3_plugin.checkpoint.safetensors_header import ShardFile, TensorRecord
from vllm_h3_plugin.errors import AdapterError

EXPONENT: dict[str, tuple[str, int]] = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
"""dtype -> (unsigned type of its width, mask of its exponent)."""
_CHUNK = 8 << 20


def refuse_values(file: ShardFile) -> None:
    """Stop at the first number that is none.

    Args:
        file: its dtypes are those of :data:`EXPONENT`.

    Raises:
        AdapterError: a tensor holds NaN or infinity, or the file cannot be read.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for record in file.tensors:
                _look(descriptor, record)
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise AdapterError(
            f"adapter {file.path} cannot be read", why=exc.strerror or str(exc), fix="Check the file and the disk."
        ) from exc


def _look(descriptor: int, record: TensorRecord) -> None:
    kind, mask = EXPONENT[record.dtype]
    for start in range(0, record.nbytes, _CHUNK):
        size = min(_CHUNK, record.nbytes - start)
        data = os.pread(descriptor, size, record.offset + start)
        if len(data) != size:
            raise AdapterError(
                f"adapter {record.file}: {record.name}", why="the file became shorter while it was read", fix="Wait."
            )
        bits = np.frombuffer(data, kind)
        bad = int(np.count_nonzero((bits & mask) == mask))
        if bad:
            raise AdapterError(
                f"adapter {record.file}: {record.name}",
                why=f"numbers that are NaN or infinite: {bad}",
                fix="Download it again and compare its checksum; an adapter that was saved so is of no use.",
            )
