"""Policy files: what ``choose --out`` writes and ``load_policy`` reads.

``save_policies(policies, path)`` writes one JSON file that only this tool writes; ``load_policy(path)`` gives the
policy of its default executor, refusing a file that was edited. Any process, no torch import.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from relaymeter import __version__
from relaymeter.errors import InputError
from relaymeter.policies.choose import ClassRow
from relaymeter.policies.policy import Policy, PolicyMove
from relaymeter.policies.replicas import Rates
from relaymeter.policies.thresholds import Threshold
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.topology import Topology

__all__ = ["POLICY_SCHEMA", "load_policy", "policies_text", "save_policies"]

#: Version of the policy file. A reader refuses another one.
POLICY_SCHEMA = 2


def load_policy(path: str | PathLike[str], executor: str | None = None) -> Policy:
    """The policy in a file that ``relaymeter choose --out`` wrote, for ``executor`` (None: its default).

    Any process. Raises InputError: missing or malformed file, another schema, edited after it was written, an executor
    that it has not.
    """
    place = Path(path)
    entry = load_json(place, "policy")
    if not isinstance(entry, dict) or entry.get("kind") != "policy" or "sha256" not in entry:
        raise InputError(f"{place} is no policy: make one with relaymeter choose --out FILE")
    if entry.get("schema_version") != POLICY_SCHEMA:
        raise InputError(
            f"policy {place} has schema_version {entry.get('schema_version')!r}, this version reads {POLICY_SCHEMA}: "
            "choose again"
        )
    content = {key: value for key, value in entry.items() if key != "sha256"}
    if _hash(content) != entry["sha256"]:
        raise InputError(f"policy {place} was edited after it was written (its sha256 differs): choose again")
    try:
        executors = entry["executors"]
        if entry["executor"] != next(iter(executors)):  # the hash does not know the order of members
            raise InputError(
                f"policy {place} was edited after it was written (the order of executors differs): choose again"
            )
        name = entry["executor"] if executor is None else executor
        if name not in executors:
            raise InputError(
                f"policy {place} has no executor {name!r}, only {', '.join(executors)}: choose again with --executor "
                "both"
            )
        return _policy_from(entry, name, executors[name])
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise InputError(f"policy {place} is incomplete ({type(error).__name__}: {error}): choose again") from error


def save_policies(policies: Sequence[Policy], path: Path, *, force: bool = False) -> None:
    """Write the policies of one choice, one for each executor, whole or not at all. Raises InputError where the file
    exists and ``force`` is not given."""
    write_text(path, policies_text(policies), force=force)


def policies_text(policies: Sequence[Policy]) -> str:
    """The file's text: strict JSON. ``policies`` differ in the executor and what follows from it, the default first."""
    first = policies[0]
    content: dict[str, Any] = {
        "schema_version": POLICY_SCHEMA,
        "kind": "policy",
        "relaymeter": __version__,
        "created_utc": first.created_utc,
        "scenario": first.scenario,
        "simulated": first.simulated,
        "profile": dict(first.profile),
        "profile_note": first.profile_note,
        "profile_mismatch": list(first.profile_mismatch),
        "topology": first.topology.to_dict(),
        "rates": {
            "nic_bytes_per_s": {str(nic): rate for nic, rate in first.rates.nic.items()},
            "port_bytes_per_s": first.rates.port,
        },
        "executor": first.executor,
        "executors": {policy.executor: _executor_entry(policy) for policy in policies},
    }
    return dump_json({**content, "sha256": _hash(content)})


def _executor_entry(policy: Policy) -> dict[str, Any]:
    return {
        "price_error": policy.error,
        "price_error_matrices": policy.error_matrices,
        "extrapolated": policy.extrapolated,
        "beyond": list(policy.beyond),
        "itemsize": policy.itemsize,
        "bucket_bytes": policy.bucket_bytes,
        "min_relay": {str(fanout): one.to_dict() for fanout, one in policy.relay.items()},
        "min_split": {str(fanout): one.to_dict() for fanout, one in policy.split.items()},
        "moves": [
            {
                "move": move.name,
                "bucket_bytes": move.bucket_bytes,
                "choice": move.choice,
                "chosen_s": move.chosen_s,
                "fixed_constants_s": move.fixed_constants_s,
                "found_constants_s": move.found_constants_s,
                "regret_fixed_s": move.regret_fixed_s,
                "classes": [row.to_dict() for row in move.classes],
            }
            for move in policy.moves
        ],
    }


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(json.loads(dump_json(content, indent=None)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _policy_from(entry: Mapping[str, Any], executor: str, mine: Mapping[str, Any]) -> Policy:
    rates = entry["rates"]
    return Policy(
        scenario=entry["scenario"],
        executor=executor,
        topology=Topology.from_dict(entry["topology"]),
        rates=Rates(
            {int(nic): float(rate) for nic, rate in rates["nic_bytes_per_s"].items()}, rates["port_bytes_per_s"]
        ),
        moves=tuple(_move_from(move) for move in mine["moves"]),
        itemsize=mine["itemsize"],
        bucket_bytes=mine["bucket_bytes"],
        relay=_thresholds_from(mine["min_relay"]),
        split=_thresholds_from(mine["min_split"]),
        error=mine["price_error"],
        error_matrices=mine["price_error_matrices"],
        extrapolated=mine["extrapolated"],
        beyond=tuple(mine["beyond"]),
        profile=entry["profile"],
        profile_note=entry["profile_note"],
        profile_mismatch=tuple(entry["profile_mismatch"]),
        simulated=entry["simulated"],
        created_utc=entry["created_utc"],
    )


def _thresholds_from(entry: Mapping[str, Any]) -> dict[int, Threshold]:
    return {int(fanout): Threshold(int(fanout), **one) for fanout, one in entry.items()}


def _move_from(entry: Mapping[str, Any]) -> PolicyMove:
    rows = tuple(ClassRow(**row) for row in entry["classes"])
    for row in rows:
        if row.route not in (None, *ROUTES):
            raise ValueError(f"route {row.route!r} is not one of {', '.join(ROUTES)}")
    seconds = (entry["chosen_s"], entry["fixed_constants_s"], entry["found_constants_s"])
    return PolicyMove(entry["move"], entry["bucket_bytes"], entry["choice"], *seconds, rows)
