"""``python -m relaymeter`` is the ``relaymeter`` command."""

import sys

from relaymeter.harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
