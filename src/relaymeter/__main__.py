"""``python -m relaymeter`` is the ``relaymeter`` command."""

import sys

if __name__ == "__main__":
    try:
        from relaymeter.harness.cli import main

        sys.exit(main())
    except KeyboardInterrupt:
        print("relaymeter: interrupted", file=sys.stderr)
        sys.exit(130)
