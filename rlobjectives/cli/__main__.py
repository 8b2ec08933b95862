"""``python -m rlobjectives.cli`` is ``rlobjectives``."""

import sys

from rlobjectives.cli import main

if __name__ == "__main__":
    sys.exit(main())
