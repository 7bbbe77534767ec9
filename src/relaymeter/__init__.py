"""relaymeter: calibrate a cluster, price the moves of sharded model state, choose, move, and prove every bit.

Importing this package imports no torch. The rooms are ``relaymeter.relayout``, ``relaymeter.calibration``,
``relaymeter.policies`` and ``relaymeter.harness``.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
