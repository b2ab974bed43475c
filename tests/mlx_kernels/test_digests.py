"""The digests that compare machines: they agree here, and a difference is told."""

from pathlib import Path

import pytest

from llamay.mlx_kernels import CONTRACT_VERSION, _cpu
from tests.mlx_kernels.digests import digests, disagreements

DIGESTS = Path(__file__).parents[2] / "testdata" / "digests"


@pytest.fixture(scope="module")
def by_set() -> dict[str, dict[str, str]]:
    return {name: digests(name) for name in _cpu.kernel_sets()}


def write(folder: Path, name: str, by_set: dict[str, dict[str, str]]) -> Path:
    path = folder / f"{name}.txt"
    with path.open("w") as file:
        for kernel_set, items in by_set.items():
            file.writelines(f"{kernel_set} {item} {digest}\n" for item, digest in items.items())
    return path


def test_every_set_here_computes_the_same_bits(by_set, tmp_path):
    assert disagreements([write(tmp_path, "here", by_set)]) == []


def test_they_are_the_recorded_ones_of_this_contract(by_set, tmp_path):
    """Recorded on x86-64 by `python -m tests.mlx_kernels.digests`; a Mac must compute the same.

    Bits that change on purpose need a new CONTRACT_VERSION and a new record.
    """
    recorded = DIGESTS / f"contract-{CONTRACT_VERSION}.txt"
    assert disagreements([recorded, write(tmp_path, "here", by_set)]) == []


def test_items_have_digests_of_their_own(by_set):
    """Equal ones would mean that an input does not reach the kernels."""
    items = by_set["scalar"]
    float_weights = {name for name in items if name.startswith(("matmul F", "matmul BF", "sample"))}
    others = [digest for name, digest in items.items() if name not in float_weights]
    assert len(set(others)) == len(others)


def test_a_difference_names_the_item_and_both_sides(tmp_path):
    here = write(tmp_path, "here", {"avx2": {"log": "ab" * 32, "rope 1": "00"}})
    there = write(tmp_path, "there", {"neon": {"log": "cd" * 32, "rope 1": "00"}})
    assert disagreements([here, there]) == [
        "log: different bits; avx2 (here): abababab; neon (there): cdcdcdcd"
    ]


def test_an_item_that_a_machine_lacks_is_no_agreement(tmp_path):
    here = write(tmp_path, "here", {"avx2": {"log": "00", "rope 1": "00"}})
    there = write(tmp_path, "there", {"neon": {"log": "00"}})
    assert disagreements([here, there]) == ["rope 1: missing from neon (there)"]


def test_no_digests_are_no_agreement(tmp_path):
    assert disagreements([write(tmp_path, "here", {})]) == ["there is no digest to compare"]
