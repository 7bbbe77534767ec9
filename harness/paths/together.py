"""Steps of a path that end on every rank alike, whichever rank they failed on.

folder = attempt_together(make_folder, ranks, "making a folder fails")      # every rank of ``ranks``
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from relaymeter.errors import InputError, RelaymeterError
from relaymeter.relayout.announce import Assembly

__all__ = ["PathCannot", "attempt_together", "say_error", "told_errors"]

_T = TypeVar("_T")


class PathCannot(InputError):
    """A path has no way of making a change; every rank raises it, before any collective."""


def attempt_together(
    action: Callable[[], _T], ranks: Assembly, what: str, *, refusal: type[InputError] = InputError
) -> _T:
    """What ``action`` gives on this rank. Every rank of ``ranks`` calls this; warnings inside ``action`` are dropped.

    Where it failed on any rank, every rank raises the same error, ``what`` and then each text with the ranks that had
    it: a ``refusal`` where no error was this package's own, else an InputError.
    """
    text, ours = "", False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = action()
    except Exception as error:
        text, ours = say_error(error), isinstance(error, RelaymeterError)
    told = ranks.tell_all([text, ours])
    failed = {rank: text for rank, (text, _) in enumerate(told) if text}
    if failed:
        kind = InputError if any(own for _, own in told) else refusal
        raise kind(f"{what}: {told_errors(failed, ranks.group)}")
    return result


def told_errors(texts: Mapping[int, str], group: dist.ProcessGroup | None) -> str:
    """Texts of errors by place in ``group`` (None: the world) as one text: each once, with its ranks of the world."""
    said: dict[str, list[int]] = {}
    for place, text in sorted(texts.items()):
        said.setdefault(text, []).append(place if group is None else dist.get_global_rank(group, place))
    return "; ".join(f"{text} (ranks {members})" for text, members in said.items())


def say_error(error: Exception) -> str:
    """Text of an error of this package; of another its type, its text (or the line that raised it, where it has none)
    and the function of DeepSpeed; of a key that was not found who looked for it. Pure."""
    if isinstance(error, RelaymeterError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "deepspeed" in frame.filename]
    if isinstance(error, KeyError) and error.args:
        who = f"DeepSpeed's {inside[-1].name}" if inside else frames[-1].name if frames else "a look-up"
        return f"{who} looks for {str(error.args[0])!r}, which is not there"
    where = f" in {inside[-1].name}" if inside else ""
    return f"{type(error).__name__}{where}: {str(error) or (frames[-1].line if frames else '')}"
