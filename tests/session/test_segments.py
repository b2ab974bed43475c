"""Which segment files are needed, and which to merge."""

from pathlib import Path

import pytest

from llamay.errors import SessionError
from llamay.session.records import AppendIds, Delete, Purge, SegmentRef, SetSegments
from llamay.session.segments import Merge, SegmentFiles, plan_merges
from llamay.session.tree import Tree
from tests.session.sessions import RECORDS, tree_after


def refs(*parts: tuple[int, int, int]) -> tuple[SegmentRef, ...]:
    return tuple(SegmentRef(f"{start}-{end}", start, end, size) for start, end, size in parts)


def with_segments(*parts: tuple[int, int, int]) -> Tree:
    """A tree whose answer 2 has positions [2, 102)."""
    tree = tree_after(RECORDS[:1])
    tree.apply(AppendIds(2, 0, (1,) * 100, (-1.0,) * 100))
    tree.apply(SetSegments(2, refs(*parts)))
    return tree


def plan(*parts: tuple[int, int, int]) -> list[Merge]:
    return plan_merges(with_segments(*parts), small_bytes=10, merged_bytes=25)


def test_small_neighbours_are_merged_up_to_a_size() -> None:
    parts = [(2, 4, 9), (4, 6, 9), (6, 8, 9), (8, 9, 1)]
    assert plan(*parts) == [Merge(2, refs(*parts[:2])), Merge(2, refs(*parts[2:]))]


def test_what_is_large_apart_or_alone_is_left() -> None:
    assert plan((2, 4, 9)) == []
    assert plan((2, 4, 9), (5, 6, 9)) == []
    assert plan((2, 4, 10), (4, 6, 1)) == []
    assert plan((2, 4, 1), (4, 6, 10), (6, 8, 1)) == []


def test_segments_out_of_a_nodes_own_positions_are_refused() -> None:
    for parts in ([(1, 4, 9)], [(2, 103, 9)], [(2, 4, 9), (3, 5, 9)], [(4, 4, 9)]):
        with pytest.raises(SessionError, match="positions"):
            with_segments(*parts)


def test_only_files_that_no_node_needs_are_swept(tmp_path: Path) -> None:
    files, tree = SegmentFiles(tmp_path), with_segments()
    names = [files.new_name(2, 2, end) for end in (3, 3, 4)]
    assert len(set(names)) == 3
    for name in names:
        files.path(name).write_bytes(b"1234")
    (tmp_path / "other").write_bytes(b"of somebody else")
    tree.apply(SetSegments(2, (SegmentRef(names[0], 2, 3, 4),)))
    assert files.sweep(tree) == 8
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([names[0], "other"])
    tree.apply(Delete(2))
    assert files.sweep(tree) == 0
    tree.apply(Purge())
    assert files.sweep(tree) == 4


def test_segments_whose_files_are_gone_or_cut_are_named(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    names = [files.new_name(2, start, start + 1) for start in (2, 3, 4)]
    segments = tuple(SegmentRef(name, i, i + 1, 4) for i, name in enumerate(names, 2))
    files.path(names[0]).write_bytes(b"1234")
    files.path(names[1]).write_bytes(b"123")
    tree = with_segments()
    tree.apply(SetSegments(2, segments))
    assert files.missing(tree) == {2: segments[1:]}
    assert SegmentFiles(tmp_path / "none").missing(tree) == {2: segments}


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", ".."])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SessionError, match="expected the name of a segment"):
        SegmentFiles(tmp_path).path(name)
