"""What of a history ``track check --against`` was asked about: its ``--suite`` and ``--case``. Pure; no torch import.

The commit to judge is chosen from the whole history first. So ``asked.refuse_missing(whole, own, label)`` finds out
where it lacks what was asked for, instead of an older commit being judged in its place; ``asked.launches(whole, base)``
is what the check then gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relaymeter.errors import InputError, NothingMeasured, Undecided
from relaymeter.harness.config import nearest
from relaymeter.harness.track.changes import CommitGroup, commit_groups, commit_key
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.row_verdicts import bare_row
from relaymeter.harness.track.verdicts import Check

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """The suite and the cases that were asked for; None and nothing: all of them."""

    suite: str | None = None
    cases: tuple[str, ...] = ()

    def refuse_unknown(self, whole: Sequence[LaunchRecord], where: str) -> None:
        """Refuse what no launch of the history ``where`` has. Raises NothingMeasured (a suite), InputError (a case)."""
        alike = [launch for launch in whole if self.suite in (None, launch.suite)]
        if not alike:
            raise NothingMeasured(f"history {where} has no launch of suite {self.suite}")
        have = list(dict.fromkeys(case.name for launch in alike for case in launch.cases))
        for name in self.cases:
            if name not in have:
                raise InputError(f"history {where} has no case {name!r}: {nearest(name, have)}")

    def launches(self, whole: Sequence[LaunchRecord], base: CommitGroup | None = None) -> list[LaunchRecord]:
        """The launches of the suite, with the cases that were asked for alone. Of ``base``, the commit that is held
        against, all where it has none of that, so that the check finds it, and nothing in it."""
        own = None if base is None else commit_key(base.launches[0])
        lacks = not any(self._has(launch) for launch in whole if commit_key(launch) == own)
        kept = [launch for launch in whole if self._has(launch) or (lacks and commit_key(launch) == own)]
        return [self._cut(launch) for launch in kept]

    def missing_in(self, whole: Sequence[LaunchRecord], group: CommitGroup) -> dict[str, str]:
        """By case what to say of those that the commit of ``group`` lacks: the newest commit that has it. Where it
        lacks the suite, that alone, under the empty name."""
        own = commit_key(group.launches[0])
        parts = {"": replace(self, cases=())} if self.suite is not None else {}
        parts |= {name: replace(self, cases=(name,)) for name in self.cases}
        found: dict[str, str] = {}
        for name, part in parts.items():
            having = [launch for launch in whole if part._has(launch)]
            if "" not in found and not any(commit_key(launch) == own for launch in having):
                what = f"with case {name}" if name else f"of suite {self.suite}"
                newest = commit_groups(having)[-1].label
                found[name] = f"{group.label} has no launch {what}: the newest commit that has one is {newest}"
        return found

    def refuse_missing(self, whole: Sequence[LaunchRecord], judged: CommitGroup) -> None:
        """Refuse a commit that has nothing of what was asked for. Raises Undecided, which names what, and the newest
        commit that has it."""
        own = commit_key(judged.launches[0])
        if not any(self._has(launch) for launch in whole if commit_key(launch) == own):
            raise Undecided("; ".join(self.missing_in(whole, judged).values()))

    def told(self, found: Check, whole: Sequence[LaunchRecord], judged: CommitGroup) -> Check:
        """The check with a note for each case that the judged commit lacks, and an undecided row for it where the check
        has none, as of a case that an earlier commit dropped. Of a changed checkout also where not its newest session,
        ``judged``, has what was asked for, but one before."""
        have = {row.case for row in found.rows}
        missing = self.missing_in(whole, judged)
        notes = list(missing.values())
        if not any(self._has(launch) for launch in judged.launches):
            notes.append(f"the newest session of {judged.label} has none of that: an earlier one is judged")
        rows = [bare_row(name, "digest", "inconclusive", line) for name, line in missing.items() if name not in have]
        return replace(found, rows=(*found.rows, *rows), notes=(*notes, *found.notes))

    def _has(self, launch: LaunchRecord) -> bool:
        if self.suite not in (None, launch.suite):
            return False
        return not self.cases or any(case.name in self.cases for case in launch.cases)

    def _cut(self, launch: LaunchRecord) -> LaunchRecord:
        if not self.cases:
            return launch
        return replace(launch, cases=tuple(case for case in launch.cases if case.name in self.cases))
