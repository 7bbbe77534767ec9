"""Every rule for cutting one dim: tables worked out by hand, and properties against plain slicing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import POISON
from slicing import cut_rows
from strategies import cuts_along, loose_rules

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import (
    Blocks,
    Cut,
    Even,
    Fused,
    FusedHeads,
    Intervals,
    Listed,
    Only,
    Padded,
    Units,
    Widths,
    nest,
)
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.meshes import deal_blocks

Rows = list[list[tuple[int, int, int]]]


def rows_of(found: Intervals) -> Rows:
    return [found.of(index) for index in range(found.degree)]


def stored(found: Intervals, whole: np.ndarray, index: int) -> np.ndarray:
    """The storage of one index, filled interval by interval."""
    out = np.full(int(found.width[index]), POISON, dtype=np.int64)
    for lo, at, size in found.of(index):
        assert size > 0 and (out[at : at + size] == POISON).all()
        out[at : at + size] = whole[lo : lo + size]
    return out


@pytest.mark.parametrize(
    ("cut", "extent", "degree", "rows", "width"),
    [
        (Cut(0), 7, 3, [[(0, 0, 2)], [(2, 0, 2)], [(4, 0, 3)]], [2, 2, 3]),
        (Cut(0), 1, 2, [[], [(0, 0, 1)]], [0, 1]),
        (Cut(0), 0, 2, [[], []], [0, 0]),
        (Cut(0, 4), 8, 2, [[(0, 0, 4)], [(4, 0, 4)]], [4, 4]),
        (Cut(0, 3), 9, 2, [[(0, 0, 3)], [(3, 0, 6)]], [3, 6]),
        (Cut(0, 2), 6, 4, [[(0, 0, 3)], [(0, 0, 3)], [(3, 0, 3)], [(3, 0, 3)]], [3, 3, 3, 3]),
        (Cut(0, 1), 5, 2, [[(0, 0, 5)], [(0, 0, 5)]], [5, 5]),
        (Cut(0, rule=Widths((0, 5, 2))), 7, 3, [[], [(0, 0, 5)], [(5, 0, 2)]], [0, 5, 2]),
        (Cut(0, rule=Padded(2)), 5, 4, [[(0, 0, 2)], [(2, 0, 2)], [(4, 0, 1)], []], [2, 2, 2, 2]),
        (Cut(0, rule=Padded(8)), 5, 1, [[(0, 0, 5)]], [8]),
        (Cut.fused(0, (4, None), (4, None)), 8, 2, [[(0, 0, 2), (4, 2, 2)], [(2, 0, 2), (6, 2, 2)]], [4, 4]),
        (Cut.fused(0, (4, None), (4, None)), 8, 1, [[(0, 0, 8)]], [8]),
        (Cut.fused(0, (4, 2), (2, 1)), 6, 2, [[(0, 0, 2), (4, 2, 2)], [(2, 0, 2), (4, 2, 2)]], [4, 4]),
        (Cut.fused(0, (3, Padded(2)), (1, None)), 4, 2, [[(0, 0, 2)], [(2, 0, 1), (3, 2, 1)]], [2, 3]),
        (Cut.experts(0, [[0, 1, 3], [2]]), 4, 2, [[(0, 0, 2), (3, 2, 1)], [(2, 0, 1)]], [3, 1]),
        (Cut.experts(0, [[1, 0], []]), 2, 2, [[(1, 0, 1), (0, 1, 1)], []], [2, 0]),
        (Cut.experts(0, [[1], [0]], units=2), 6, 2, [[(3, 0, 3)], [(0, 0, 3)]], [3, 3]),
        (Cut.experts(0, [[0, 1], [1, 2]]), 3, 2, [[(0, 0, 1), (1, 1, 1)], [(1, 0, 1), (2, 1, 1)]], [2, 2]),
    ],
)
def test_intervals_and_widths_are_those_worked_out_by_hand(
    cut: Cut, extent: int, degree: int, rows: Rows, width: list[int]
) -> None:
    found = cut.intervals(extent, degree)
    assert (rows_of(found), found.width.tolist()) == (rows, width)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_rule_stores_what_slicing_gives(data: st.DataObject) -> None:
    extent, degree = data.draw(st.integers(0, 24)), data.draw(st.integers(1, 6))
    cut = data.draw(cuts_along(0, extent, degree))
    found = cut.intervals(extent, degree)
    whole = np.arange(extent)
    rule = Units(cut.units) if cut.units is not None else cut.rule
    for index in range(degree):
        np.testing.assert_array_equal(stored(found, whole, index), cut_rows(rule, whole, degree, index))
    runs = set(zip(found.lo.tolist(), (found.lo + found.size).tolist(), strict=True))
    assert sorted(e for lo, hi in runs for e in range(lo, hi)) == list(range(extent))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nested_cuts_store_what_slicing_a_slice_gives(data: st.DataObject) -> None:
    extent, outer, inner = data.draw(st.integers(0, 24)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    first = data.draw(cuts_along(0, extent, outer))
    second = Cut(0, rule=data.draw(loose_rules()))
    found = nest(first.intervals(extent, outer), second, inner)
    whole = np.arange(extent)
    rule = Units(first.units) if first.units is not None else first.rule
    for a, b in itertools.product(range(outer), range(inner)):
        local = cut_rows(second.rule, cut_rows(rule, whole, outer, a), inner, b)
        np.testing.assert_array_equal(stored(found, whole, a * inner + b), local)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 300), st.integers(1, 12), st.integers(1, 7))
def test_no_deal_of_blocks_has_a_smaller_largest_share(extent: int, size: int, degree: int) -> None:
    widths = Blocks(size).intervals(extent, degree).width
    assert widths.sum() == extent
    assert all(border % size == 0 or border == extent for border in np.cumsum(widths).tolist())
    blocks = [min(size, extent - k) for k in range(0, extent, size)]

    def ranks_for(most: int) -> int:
        count, room = 0, 0
        for block in blocks:
            if block > room:
                count, room = count + 1, most
            room -= block
        return count

    best = next(most for most in range(max(blocks, default=0), extent + 1) if ranks_for(most) <= degree)
    assert int(widths.max()) == best


def test_spare_blocks_of_many_tensors_do_not_all_land_on_the_same_ranks() -> None:
    specs = {f"w{k}": TensorSpec(f"w{k}", (6 * 64, 8), "int8") for k in range(4)}
    fixed = sum(Blocks(64).intervals(6 * 64, 4).width for _ in specs)
    assert fixed.tolist() == [4 * 64, 8 * 64, 4 * 64, 8 * 64]
    cuts = deal_blocks(specs, dict.fromkeys(specs, 0), 64, 4)
    dealt = sum(cuts[name].intervals(6 * 64, 4).width for name in specs)
    assert dealt.tolist() == [6 * 64] * 4
    with pytest.raises(LayoutError, match=r"tensor w0 \[384, 8\]: cut along dim 2"):
        deal_blocks(specs, {"w0": 2}, 64, 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 8), st.integers(1, 5))
def test_dealt_spare_blocks_never_fill_the_fullest_rank_more_than_one_rule_for_all(extents, size, degree) -> None:
    specs = {f"w{k}": TensorSpec(f"w{k}", (extent,), "int8") for k, extent in enumerate(extents)}
    cuts = deal_blocks(specs, dict.fromkeys(specs, 0), size, degree)
    assert list(cuts) == list(specs)
    held = sum(cuts[name].intervals(spec.numel, degree).width for name, spec in specs.items())
    assert held.sum() == sum(extents)
    alike = sum(Blocks(size).intervals(spec.numel, degree).width for spec in specs.values())
    assert held.max() <= alike.max()


HEAD = 2
#: Four query heads, two key heads, width 2 as (heads, width) arrays that say what each row is.
QUERY = np.array([[f"q{h}.{r}" for r in range(HEAD)] for h in range(4)])
KEY = np.array([[f"k{h}.{r}" for r in range(HEAD)] for h in range(2)])
VALUE = np.array([[f"v{h}.{r}" for r in range(HEAD)] for h in range(2)])
BLOCKS = np.concatenate([QUERY.ravel(), KEY.ravel(), VALUE.ravel()])
GROUPS = np.concatenate([QUERY.reshape(2, 2, HEAD), KEY[:, None], VALUE[:, None]], axis=1)  # [groups, 2 + 2, width]


def heads_of(cut: Cut, whole: np.ndarray, degree: int, index: int) -> list[str]:
    """The heads of one index in the order of its storage, each checked to be there whole."""
    found = cut.intervals(len(whole), degree)
    out = [""] * int(found.width[index])
    for lo, at, size in found.of(index):
        out[at : at + size] = whole[lo : lo + size]
    heads = [row.split(".")[0] for row in out[::HEAD]]
    assert out == [f"{head}.{r}" for head in heads for r in range(HEAD)]
    return heads


@pytest.mark.parametrize(
    ("degree", "ranks"),
    [
        (1, ["q0 q1 q2 q3 k0 k1 v0 v1"]),
        (2, ["q0 q1 k0 v0", "q2 q3 k1 v1"]),
        (4, ["q0 k0 v0", "q1 k0 v0", "q2 k1 v1", "q3 k1 v1"]),
        (8, [f"q{h} k{h // 2} v{h // 2}" for h in range(4) for _ in (0, 1)]),
    ],
)
@pytest.mark.parametrize(("logical", "whole"), [("blocks", BLOCKS), ("groups", GROUPS.ravel())])
def test_fused_qkv_in_blocks(degree: int, ranks: list[str], logical: str, whole: np.ndarray) -> None:
    cut = Cut.qkv_blocks(0, heads=4, kv_heads=2, logical=logical)
    assert [" ".join(heads_of(cut, whole, degree, index)) for index in range(degree)] == ranks


@pytest.mark.parametrize(
    ("degree", "ranks"),
    [
        (1, ["q0 q1 k0 v0 q2 q3 k1 v1"]),
        (2, ["q0 q1 k0 v0", "q2 q3 k1 v1"]),
        (4, ["q0 k0 v0", "q1 k0 v0", "q2 k1 v1", "q3 k1 v1"]),
    ],
)
@pytest.mark.parametrize(("logical", "whole"), [("blocks", BLOCKS), ("groups", GROUPS.ravel())])
def test_fused_qkv_by_key_value_group(degree: int, ranks: list[str], logical: str, whole: np.ndarray) -> None:
    cut = Cut.qkv_by_group(0, heads=4, kv_heads=2, logical=logical)
    assert [" ".join(heads_of(cut, whole, degree, index)) for index in range(degree)] == ranks


def test_a_group_order_over_as_many_groups_is_a_plain_slice() -> None:
    found = Cut.qkv_by_group(0, heads=4, kv_heads=2).intervals(16, 2)
    assert rows_of(found) == [[(0, 0, 8)], [(8, 0, 8)]]
    whole = np.arange(16).reshape(2, 4, HEAD)
    assert [stored(found, whole.ravel(), i).tolist() for i in (0, 1)] == [whole[i].ravel().tolist() for i in (0, 1)]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_fused_qkv_by_head(degree: int) -> None:
    """[heads, 3, width] cut over heads, and the same heads out of a whole tensor in blocks."""
    heads = 4
    apart = np.arange(3 * heads * HEAD).reshape(3, heads, HEAD)  # q, k, v of every head
    by_head = apart.transpose(1, 0, 2)
    for logical, whole in (("groups", by_head), ("blocks", apart)):
        found = Cut.qkv_by_head(0, heads, logical).intervals(whole.size, degree)
        for index, part in enumerate(np.split(by_head, degree)):
            assert stored(found, whole.ravel(), index).tolist() == part.ravel().tolist()


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_uneven_groups_keep_query_heads_with_their_key_head(degree: int) -> None:
    """Six query heads and three key heads over two ranks: one group and two."""
    found = Cut.qkv_blocks(0, heads=6, kv_heads=3).intervals(12, degree)
    groups = {1: [[0, 1, 2]], 2: [[0], [1, 2]], 3: [[0], [1], [2]]}[degree]
    for index, mine in enumerate(groups):
        want = [2 * g + j for g in mine for j in (0, 1)] + [6 + g for g in mine] + [9 + g for g in mine]
        assert stored(found, np.arange(12), index).tolist() == want


@pytest.mark.parametrize(
    ("cut", "extent", "degree", "message"),
    [
        (Cut(0, 4), 6, 2, "6 is no multiple of 4 units"),
        (Cut(0, 0), 6, 2, "6 is no multiple of 0 units"),
        (Cut(0, 3), 6, 4, "3 units over 4 ranks: neither is a multiple of the other"),
        (Cut(0, rule=Widths((3, 2))), 6, 2, r"widths \[3, 2\] \(2 of them, 5 in all\) for 6 over 2 ranks"),
        (Cut(0, rule=Widths((3, 3))), 6, 3, "give 3 that add up to 6"),
        (Cut(0, rule=Widths((-1, 7))), 6, 2, "give 2 that add up to 6"),
        (Cut(0, rule=Blocks(0)), 6, 2, "blocks of 0 elements"),
        (Cut(0, rule=Padded(0)), 6, 2, "padding to a multiple of 0"),
        (Cut.fused(0, (4, None), (3, None)), 6, 2, r"fused parts of \[4, 3\] do not add up to 6"),
        (Cut.qkv_blocks(0, 3, 2), 7, 1, "7 for 3 query and 2 key heads"),
        (Cut.qkv_blocks(0, 4, 2), 12, 2, "an extent that is a multiple of 8"),
        (Cut.qkv_blocks(0, 4, 2), 8, 3, "2 units over 3 ranks"),
        (Cut.qkv_blocks(0, 4, 2, "rows"), 8, 2, "order 'rows' of fused heads is not one of 'blocks', 'groups'"),
        (Cut.experts(0, [[0], [1]]), 2, 3, "a placement over 2 ranks for an axis of 3"),
        (Cut.experts(0, [[0], [2]]), 2, 2, r"index 1 holds unit 2; there are 0\.\.1"),
        (Cut.experts(0, [[0, 1, 0], []]), 2, 2, "index 0 holds unit 0 twice"),
        (Cut.experts(0, [[0], [1]], units=3), 4, 2, "4 is no multiple of 3 units"),
        (Cut(None), 4, 2, "cuts no dim"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused_with_its_numbers(cut: Cut, extent: int, degree: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        cut.intervals(extent, degree)


def test_cuts_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"a cut by 4 units and by Blocks\(size=64, turn=0\): give one of them"):
        Cut(0, 4, Blocks(64))
    with pytest.raises(LayoutError, match="only Only goes without a dim, and it must"):
        Cut(None, rule=Even())
    with pytest.raises(LayoutError, match="only Only goes without a dim, and it must"):
        Cut(0, rule=Only((1,)))
    with pytest.raises(LayoutError, match="no index is to hold the tensor on an axis of 2"):
        Only(()).held(2)


def test_equal_cuts_are_equal_keys() -> None:
    pairs = [
        (Cut(0, 8), Cut(0, units=8)),
        (Cut.fused(0, (4, None), (4, 2)), Cut(0, rule=Fused(((4, Even()), (4, Units(2)))))),
        (Cut.experts(0, [[1], [0]]), Cut(0, rule=Listed(((1,), (0,))))),
        (Cut.qkv_by_head(1, 4), Cut(1, rule=FusedHeads(4, 4, "groups", "groups"))),
        (Cut.only(2, 3), Cut(None, rule=Only((2, 3)))),
    ]
    for one, two in pairs:
        assert one == two and hash(one) == hash(two)
    assert Cut(0, 8) != Cut(0)
