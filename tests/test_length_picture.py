"""Histograms count every length once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlbatch.length_picture import bars, bins, write_svg


@pytest.mark.parametrize("lengths", [[5], [1, 1, 2], list(range(100)), [3, 1000], [7] * 9 + [40]])
def test_bins(lengths: list[int]) -> None:
    """Side by side, from the shortest to the longest."""
    found = bins(lengths)
    assert found[0][0] == min(lengths) and found[-1][1] >= max(lengths)
    assert all(high + 1 == following[0] for (_, high, _), following in pairwise(found))
    for low, high, count in found:
        assert count == sum(low <= length <= high for length in lengths)
    assert len(found) <= 16 and len(bars(lengths)) == len(found)


def test_svg(tmp_path: Path) -> None:
    """One that programs can read, with a bar for each bin of each set that has lengths."""
    write_svg(tmp_path / "p.svg", {"a<b": [1, 2, 2], "none": [], "c": [4]})
    tree = ElementTree.parse(tmp_path / "p.svg").getroot()
    texts = [node.text or "" for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a<b: tokens of 3 prompts, at most 2 a bar"
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}title"))) == 3
