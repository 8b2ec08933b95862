"""Say in one sentence what a fresh machine lacks, before anything is downloaded.

Runs under the machine's own Python, so it imports the standard library alone and avoids new syntax.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig

MINIMUM = (3, 10)


def problems():
    """Give one sentence for each thing that is missing."""
    found = []
    if sys.version_info < MINIMUM:
        found.append(
            "Python %d.%d is too old: Python 3.10 or newer is needed; name one with `make PYTHON=python3.11 …`."
            % sys.version_info[:2]
        )
        return found
    if importlib.util.find_spec("ensurepip") is None:
        found.append(
            "This Python cannot make virtual environments: install its venv package "
            "(Debian: apt-get install python3-venv)."
        )
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        found.append(
            "There is no C++ compiler: install g++ (Debian: apt-get install g++); DeepSpeed compiles one small op and "
            "two example packages are built from source."
        )
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        found.append(
            "The headers of this Python are missing: install them (Debian: apt-get install python3-dev)."
        )
    return found


if __name__ == "__main__":
    found = problems()
    if found:
        sys.exit("\n".join(found))
