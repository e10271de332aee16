# SPDX-License-Identifier: Apache-2.0
"""The host's own server, which also writes down when it denoised, decoded and encoded: ``python -m tools.stock_timed``.

Takes the arguments of ``vllm serve``. Nothing is changed but that three functions tell the time when they return.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TIMES = "H3_STOCK_TIMES"
"""Variable: the file that gets a JSON line for each call."""


def _told(owner: Any, name: str, file: Path) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = original(*args, **kwargs)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"name": name, "began": began, "ended": time.time()}) + "\n")
        return result

    setattr(owner, name, timed)


def main() -> None:
    """Serve."""
    from vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3 import MiniMaxH3Pipeline
    from vllm_omni.entrypoints.cli.main import main as serve
    from vllm_omni.entrypoints.openai import serving_video

    file = Path(os.environ.pop(TIMES))
    _told(MiniMaxH3Pipeline, "diffuse", file)
    _told(MiniMaxH3Pipeline, "decode", file)
    _told(serving_video, "_encode_video_bytes", file)
    sys.exit(serve())


if __name__ == "__main__":
    main()
