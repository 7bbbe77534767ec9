"""The builds of a history that a check is about: which one is judged, and what came before it. Pure; no torch import.

``named("1a2b3c4", launches)`` is the commit that people mean; ``by_setting(build, before)`` its launches by suite,
machine and configuration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from relaymeter.errors import InputError
from relaymeter.harness.track.changes import (
    CommitGroup,
    SettingKey,
    build_key,
    commit_groups,
    commit_key,
    committed_at,
    setting_key,
)
from relaymeter.harness.track.records import LaunchRecord

__all__ = [
    "by_setting",
    "earlier",
    "held_text",
    "named",
    "named_commits",
    "newest_build",
    "order_note",
    "other_build",
    "other_sessions",
]

#: An order that was another than that of the launches is said while it is among so many newest commits.
_NOTED = 10
_WHOLE = re.compile(r"[0-9a-f]{40}(-dirty)?")


def named_commits(text: str, launches: Sequence[LaunchRecord]) -> list[CommitGroup]:
    """The commits that ``text`` may mean: the beginning of a revision (with ``-dirty`` at the end: of its changed
    checkout, and of that the newest session), or, of launches outside a checkout, the version."""
    prefix, dirty = text.removesuffix("-dirty").lower(), text.endswith("-dirty")
    found = [
        group
        for group in commit_groups(launches)
        if (group.commit and prefix and group.commit.lower().startswith(prefix) and group.dirty == dirty)
        or (group.commit is None and text in (group.label, group.launches[-1].version))
    ]
    return list({commit_key(group.launches[-1]): group for group in found}.values())


def named(text: str, launches: Sequence[LaunchRecord]) -> CommitGroup | None:
    """The one commit that ``text`` means, None where there is none. Raises InputError where it may mean several."""
    found = named_commits(text, launches)
    if len(found) > 1:
        raise InputError(f"{text!r} begins {', '.join(group.label for group in found)}: give more of it")
    return found[0] if found else None


def newest_build(launches: Sequence[LaunchRecord]) -> CommitGroup:
    """All launches of the build that the last one is of. ``launches``: at least one."""
    key = build_key(launches[-1])
    return next(group for group in commit_groups(launches) if build_key(group.launches[0]) == key)


def earlier(launches: Sequence[LaunchRecord], judged: CommitGroup) -> list[LaunchRecord]:
    """The launches of the commits before the judged one, in the order of ``commit_groups``."""
    keys = [build_key(group.launches[0]) for group in commit_groups(launches)]
    before = set(keys[: keys.index(build_key(judged.launches[0]))])
    return [launch for launch in launches if build_key(launch) in before]


def order_note(launches: Sequence[LaunchRecord], used: Sequence[LaunchRecord]) -> list[str]:
    """What to say of a commit, one of those launched last, that was launched after a newer one; else nothing.

    ``launches``: the file. ``used``: those of it that count."""
    counting = {id(launch) for launch in used}
    firsts: dict[object, LaunchRecord] = {}
    for launch in launches:
        if id(launch) in counting:
            firsts.setdefault(build_key(launch), launch)
    found = [group for launch in firsts.values() for group in commit_groups([launch])]
    times = [committed_at(group) for group in found]
    whole = all(time is not None for time in times)
    newest = -1
    note = []
    for at, time in enumerate(times):
        if time is None:
            continue
        if newest >= 0 and time < (times[newest] or time):
            how = "commits are in the order in which they were committed"
            if not whole:
                how = "commits are in the order of the file, as not all launches say when theirs was committed"
            said = f"{found[at].label} was launched after {found[newest].label}, which is the newer commit: {how}"
            note = [said] if at >= len(found) - _NOTED else []
        else:
            newest = at
    return note


def other_build(against: str, judged: CommitGroup, launches: Sequence[LaunchRecord]) -> CommitGroup | None:
    """The commit that ``judged`` is held against; None where the history has nothing of it. Raises InputError."""
    group = named(against, launches)
    if group is None and not _WHOLE.fullmatch(against.lower()):
        raise InputError(f"the history holds no launch of {against}: {held_text(launches)}")
    own = build_key(judged.launches[0])
    if group is not None and build_key(group.launches[0]) == own:
        # why: of a changed checkout, the session before is another build of the same name
        group = named(against, [launch for launch in launches if build_key(launch) != own])
        if group is None or commit_key(group.launches[0]) != commit_key(judged.launches[0]):
            raise InputError(
                f"{against} is the newest commit of the history itself, or the one that is judged: name an earlier "
                "one, judge another with --commit, or compare checkouts with --ab"
            )
    return group


def other_sessions(whole: CommitGroup, launches: Sequence[LaunchRecord]) -> int:
    """How many other builds of the same changed checkout there are."""
    own = whole.launches[0]
    keys = {build_key(launch) for launch in launches if commit_key(launch) == commit_key(own)}
    return len(keys - {build_key(own)})


def by_setting(whole: CommitGroup, before: Sequence[LaunchRecord]) -> list[CommitGroup]:
    """The launches of a commit by setting: the one with most commits before it first, then with most of another
    machine, then with most launches, then the newest."""
    parts: dict[SettingKey, list[LaunchRecord]] = {}
    for launch in whole.launches:
        parts.setdefault(setting_key(launch), []).append(launch)
    same: dict[SettingKey, set[object]] = {}
    alike: dict[tuple[str, str], set[object]] = {}
    for launch in before:
        same.setdefault(setting_key(launch), set()).add(build_key(launch))
        alike.setdefault((launch.suite, launch.config_hash), set()).add(build_key(launch))
    last = {setting_key(launch): at for at, launch in enumerate(whole.launches)}

    def weight(key: SettingKey) -> tuple[int, ...]:
        suite, _, config = key
        return len(same.get(key, ())), len(alike.get((suite, config), ())), len(parts[key]), last[key]

    return [replace(whole, launches=tuple(parts[key])) for key in sorted(parts, key=weight, reverse=True)]


def held_text(launches: Sequence[LaunchRecord]) -> str:
    """Which commits there are, for an error: the newest three, and how many before."""
    labels = [group.label for group in commit_groups(launches)]
    return f"it holds {', '.join(labels[-3:])}" + (f" and {len(labels) - 3} older" if len(labels) > 3 else "")
