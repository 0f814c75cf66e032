"""Slurm's compressed lists."""

from __future__ import annotations

import random
import re

import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.ranks.nodelist import MAX_NODES, expand_nodelist, expand_tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("login", "login"),
        ("n[1-3,007]", "n1 n2 n3 n007"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[5,3,4]", "n5 n3 n4"),
        ("b2,a[2,1],b1", "b2 a2 a1 b1"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("r[1-2][0-1]-x", "r10-x r11-x r20-x r21-x"),
        ("[7-8]", "7 8"),
        ("gpu-[1-2].hpc.example.org,gpu-9", "gpu-1.hpc.example.org gpu-2.hpc.example.org gpu-9"),
        ("node_a[1], GPU[1, 2]", "node_a1 GPU1 GPU2"),
        ("n1\nn2\n", "n1 n2"),
        ("n[1,1]", "n1 n1"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
    ],
)
def test_expansion(text: str, names: str) -> None:
    """Ranges, several brackets, padding, suffixes and blanks, in the order of the text, nothing dropped."""
    assert expand_nodelist(text) == names.split()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a name is empty"),
        (",", "a name is empty"),
        ("n1,", "a name is empty"),
        ("n1,,n2", "a name is empty"),
        ("n[1-2", "brackets must be closed and not nested"),
        ("n1-2]", "brackets must be closed and not nested"),
        ("n[1-[2-3]]", "brackets must be closed and not nested"),
        ("n[]", "[] must hold numbers and ranges"),
        ("n[1,]", "[1,] must hold numbers and ranges"),
        ("n[1-]", "[1-] must hold numbers and ranges"),
        ("n[-1]", "[-1] must hold numbers and ranges"),
        ("n[a-c]", "[a-c] must hold numbers and ranges"),
        ("n[1-9/2]", "[1-9/2] must hold numbers and ranges"),
        ("n[１-３]", "must hold numbers and ranges"),
        ("n[5-3]", "the range 5-3 descends. Write 3-5."),
        ("(null)", "(null) is no host name"),
        ("n1;reboot", "n1;reboot is no host name"),
        ("-oProxyCommand", "-oProxyCommand is no host name"),
        ("n[1-70000]", "70000 names, at most 65536 are expanded"),
        ("n[1-300]m[1-300]", "90000 names, at most 65536 are expanded"),
        ("n[1-40000],m[1-40000]", "80000 names, at most 65536 are expanded"),
        ("n[1-999999999999999999]", "names, at most 65536 are expanded"),
        ("[0-1]" * 40, "names, at most 65536 are expanded"),
        (f"n[{'9' * 5000}]", "must hold numbers and ranges"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    """What no Slurm writes is refused with the reason, in a short message, and a huge list before it takes memory."""
    with pytest.raises(ConfigError, match=rf"^SLURM_NODELIST=.*{re.escape(reason)}") as caught:
        expand_nodelist(text, "SLURM_NODELIST")
    assert len(str(caught.value)) < 400


def test_largest_list() -> None:
    """The limit itself is expanded."""
    assert len(expand_nodelist(f"n[1-{MAX_NODES}]")) == MAX_NODES


def compress(names: list[tuple[str, str, str]], chosen: random.Random) -> str:
    """Writes (prefix, number, suffix) as a nodelist, joining neighbours into brackets and ranges at random."""
    groups: list[tuple[str, str, list[list[str]]]] = []
    for prefix, number, suffix in names:
        if not groups or groups[-1][:2] != (prefix, suffix) or chosen.random() < 0.2:
            groups.append((prefix, suffix, []))
        ranges = groups[-1][2]
        if ranges and chosen.random() < 0.8 and number == str(int(ranges[-1][-1]) + 1).zfill(len(ranges[-1][0])):
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = []
    for prefix, suffix, ranges in groups:
        inside = ",".join(numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}" for numbers in ranges)
        texts.append(f"{prefix}[{inside}]{suffix}" if not inside.isdecimal() or chosen.random() < 0.5 else f"{prefix}{inside}{suffix}")
    return ",".join(texts)


@pytest.mark.parametrize("seed", range(50))
def test_round_trip(seed: int) -> None:
    """Expanding a compressed list gives the list, whatever was joined."""
    chosen = random.Random(seed)
    names: list[tuple[str, str, str]] = []
    for _ in range(chosen.randint(1, 5)):
        prefix, suffix = chosen.choice(["n", "gpu-", "r1n", ""]), chosen.choice(["", "-ib", ".example.org"])
        start, width = chosen.randint(0, 120), chosen.choice([1, 3, 5])
        names += [(prefix, str(start + step).zfill(width), suffix) for step in range(chosen.randint(1, 12))]
    assert expand_nodelist(compress(names, chosen)) == ["".join(name) for name in names]


@pytest.mark.parametrize(("text", "counts"), [("8", [8]), ("8(x4)", [8] * 4), ("2(x3),1,4(x2)", [2, 2, 2, 1, 4, 4]), ("1, 2", [1, 2])])
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    """Counts with and without repetition."""
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "8(x)", "8(4)", "8x4", "0", "8(x0)", "-1", "8,", "8(x70000)", "8(x2", "８"])
def test_tasks_per_node_refusals(text: str) -> None:
    """Anything else is refused under the variable's name."""
    with pytest.raises(ConfigError, match=r"^SLURM_TASKS_PER_NODE="):
        expand_tasks_per_node(text)
