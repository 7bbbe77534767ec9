"""Findings about the links between GPUs: who reaches whom over NVLink, and how else. Pure.

``link_findings(gpus, environment)``. A pair is linked where NVML says so of the pair: the number of links that a GPU
has says nothing of whom they reach. Numbers are physical ones; what CUDA_VISIBLE_DEVICES shows is mapped to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from relaymeter.harness.doctor.facts import Gpus, Link, Pair
from relaymeter.harness.doctor.findings import Finding, State
from relaymeter.harness.doctor.judge_gpus import VISIBLE, numbers, visible

__all__ = ["fully_linked", "link_findings", "linked_groups", "linked_pairs"]

_SHORT: dict[Link, str] = {"NVLink": "NV"}
_MEANING = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    "?": "a way that is not told",
}


def linked_pairs(links: Mapping[Pair, Link]) -> tuple[Pair, ...]:
    """Pairs that NVLink joins, in order."""
    return tuple(sorted(pair for pair, link in links.items() if link == "NVLink"))


def fully_linked(indices: Sequence[int], links: Mapping[Pair, Link]) -> bool:
    """Whether NVLink joins every pair of these physical numbers."""
    return all(links.get(pair) == "NVLink" for pair in combinations(sorted(indices), 2))


def linked_groups(indices: Sequence[int], links: Mapping[Pair, Link]) -> list[list[int]]:
    """The given GPUs in groups of which every pair is linked, largest first: each GPU joins the first that takes it."""
    groups: list[list[int]] = []
    for index in sorted(indices):
        home = next((group for group in groups if fully_linked([*group, index], links)), None)
        if home is None:
            groups.append([index])
        else:
            home.append(index)
    return sorted(groups, key=lambda group: (-len(group), group))


def link_findings(gpus: Gpus, environment: Mapping[str, str]) -> list[Finding]:
    """Findings of the group links; none where fewer than two GPUs are visible, or links are not known."""
    shown, _ = visible(environment.get(VISIBLE), gpus.gpus)
    if len(shown) < 2 or not gpus.links:
        return []
    return [*_nvlink(gpus, shown), _matrix(gpus, shown), *_peer(gpus, shown)]


def _nvlink(gpus: Gpus, shown: Sequence[int]) -> Iterator[Finding]:
    key = "links.nvlink"
    counts = {gpu.index: gpu.nvlinks for gpu in gpus.gpus if gpu.index in shown and gpu.nvlinks is not None}
    pairs = [pair for pair in linked_pairs(gpus.links) if set(pair) <= set(shown)]
    groups = linked_groups(shown, gpus.links)
    values = {
        "linked_pairs": [list(pair) for pair in pairs],
        "groups": groups,
        "active_links": [{"index": index, "links": count} for index, count in counts.items()],
    }
    most = max(counts.values(), default=0)
    short = [index for index, count in counts.items() if count < most]
    if most and not pairs:
        means = "the links are up but join no pair: with NVSwitch most likely the fabric manager is not running"
        start = ("systemctl start nvidia-fabricmanager", "nvidia-smi -mig 0  # MIG hides NVLink")
        yield Finding(key, State.WARNING, f"{most} links are active on a GPU, no pair is joined", means, start, values)
    elif short:
        text = f"{numbers(short)} has fewer active links than the others' {most}"
        means = "a link is down: exchanges inside the node go at the pace of the slowest"
        yield Finding(key, State.WARNING, text, means, ("nvidia-smi nvlink -s", "dmesg | grep -i nvlink"), values)
    elif len(groups) == 1:
        width = f", {most} links each" if most else ""
        yield Finding(key, State.OK, f"joins every pair of {len(shown)} GPUs{width}", values=values)
    elif pairs:
        text = "joins some pairs only; all of: " + "; ".join(
            ", ".join(map(str, group)) for group in groups if len(group) > 1
        )
        means = "keep tensor-parallel ranks within such a group; other pairs are slower, and calibrate measures both"
        mend = (f"export {VISIBLE}={','.join(map(str, groups[0]))}  # or put ranks in this order",)
        yield Finding(key, State.NOTE, text, means, mend, values)
    else:
        yield Finding(key, State.NOTE, "none", "GPUs reach each other over PCIe", values=values)


def _matrix(gpus: Gpus, shown: Sequence[int]) -> Finding:
    order = sorted(shown)
    words = [[_between(gpus.links, one, two) for two in order] for one in order]
    wide = max(4, *(len(word) for row in words for word in row))
    head = " " * 6 + " ".join(f"{f'GPU{index}':>{max(wide, 5)}}" for index in order)
    rows = [
        f"{f'GPU{index}':<6}" + " ".join(f"{word:>{max(wide, 5)}}" for word in row)
        for index, row in zip(order, words, strict=True)
    ]
    kinds = Counter(gpus.links[pair] for pair in combinations(order, 2) if pair in gpus.links)
    legend = "; ".join(f"{kind}: {_MEANING[kind]}" for kind in _MEANING if kinds[kind])  # type: ignore[index]
    values = {"physical_indices": order, "links": words}
    return Finding("links.matrix", State.OK, "\n".join([head, *rows]), legend, values=values)


def _between(links: Mapping[Pair, Link], one: int, two: int) -> str:
    if one == two:
        return "X"
    link = links.get((min(one, two), max(one, two)), "?")
    return _SHORT.get(link, link)


def _peer(gpus: Gpus, shown: Sequence[int]) -> Iterator[Finding]:
    if gpus.source != "NVML":
        return
    without = sorted(pair for pair in gpus.no_peer if set(pair) <= set(shown))
    values = {"pairs_without": [list(pair) for pair in without]}
    if without:
        some = ", ".join(f"{one}-{two}" for one, two in without[:4]) + (", ..." if len(without) > 4 else "")
        means = "NCCL copies between them through the memory of the host"
        mend = ("in a virtual machine ask for peer access; on bare metal turn ACS off in the PCIe switches",)
        yield Finding("links.peer", State.NOTE, f"none between {some}", means, mend, values)
    else:
        yield Finding("links.peer", State.OK, "every pair reads the other's memory", values=values)
