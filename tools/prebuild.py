"""Build DeepSpeed's one compiled op in a single process, before any run starts ranks.

Two cold ranks that build at once wait on each other for ever. On a machine without DeepSpeed, or where it does
not use this op (anything but a Linux CPU), there is nothing to do.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from environment import EXTENSIONS, apply


def main() -> None:
    """Build the op into the private cache, or say in one sentence why that is impossible."""
    apply()
    if importlib.util.find_spec("deepspeed") is None or os.environ.get("DS_ACCELERATOR") != "cpu":
        return
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not builder.is_compatible():
        return
    try:
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001  # whatever the compiler said, the reader needs one sentence
        sys.exit(
            f"DeepSpeed's shared-memory op did not build: {type(error).__name__}: {str(error).strip()[-2000:]}\n"
            f"Run make again. If that does not help: install g++ and the Python headers (Debian: apt-get install "
            f"g++ python3-dev), and delete {EXTENSIONS}."
        )


if __name__ == "__main__":
    main()
