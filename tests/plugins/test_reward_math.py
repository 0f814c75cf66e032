"""``reward=math``: verdicts of math-verify's own suite and of what the reward documents, and answers that are made to hang it."""

from __future__ import annotations

from typing import Any

import pytest

from rlbatch import reward_parts
from rlbatch.api import DataError
from tests.plugins.reward_cases import answer, registry, verdict

SUITE = [
    ("7425000", "7,425,000", 1),
    ("1000", "1 000", 1),
    ("1000.99", "1000,99", 1),
    ("1000.99", "the number is not 10 which is 1,000.99€", 1),
    ("1000.99", "so the number is 10 which is 1,000.99m²", 1),
    ("2", "AZYUK2A", 0),
    ("$[0,1)$", "$[0,1)$", 1),
    ("$(0,9)$", "$[0,9)$", 0),
    ("$1$", "$-[0,1)$", 0),
    ("$1/3$", "$\\frac13 $", 1),
    ("$\\sqrt{3}$", "$\\sqrt3 $", 1),
    ("$28\\%$", "making for a total loss of $\\boxed{28\\%}$.", 1),
    ("$15\\mbox{ cm}^2$", "area is $$\\frac{1}{2}\\times 3 \\times 10 = \\boxed{15\\mbox{ cm}^2}.$$", 1),
    ("$125$ miles", "The distance is $\\boxed{125\\textnormal{ miles}}.$", 1),
    ("$90^\\circ$", "$\\angle BAC = \\boxed{90^\\circ}.$", 1),
    ("$204_5$", "for a quotient of $\\boxed{204_5}$. Note $4_5\\times2_5=8_{10}=13_5$.", 1),
    (
        "$(2,1),(1,2),(-1,-20),(-20,-1)$",
        "solutions are:\n\n\\[\n\\boxed{(1, 2)}, \\boxed{(2, 1)}, \\boxed{(-1, -20)}, \\boxed{(-20, -1)}\n\\]",
        1,
    ),
    ("$1$ and $2$ and $3$", "$\\boxed{1,2,3}$", 1),
    (
        "$(37,3,3),(17,3,3,7),(3,37,3,13),(3,17,3,7),(3,3,2,3)$",
        "$\\boxed{(3, 37, 3, 13), (3, 17, 3, 7), (3, 3, 2, 3), (3,17,3,7), (17,3,3,7), (37,3,3,13)}$",
        0,
    ),
    ("$(p,q)=(3,2)$", "$\\boxed{(3, 2)}$", 1),
    ("$\\text{odd}$", "$odd$", 1),
    ("$d$", "$\\text{E}$", 0),
]
OURS = [
    ("50%", r"\boxed{50}", 1),
    (r"50\%", r"\boxed{1/2}", 1),
    (r"\frac{1}{2}", r"\boxed{50\%}", 1),
    ("50%", "the answer is 0.5", 1),
    ("50%", r"\boxed{0.05}", 0),
    ("72", r"First I tried \boxed{70}. No: \boxed{72}", 1),
    ("70", r"First I tried \boxed{70}. No: \boxed{72}", 0),
    ("70", r"\boxed{70}, but I cut \boxed{72", 1),
    (r"\{1,2\}", r"$\boxed{1}$ and $\boxed{2}$", 1),
    ("18", r"\boxed{$18.00}", 1),
    (r"\frac{3}{4}", r"\boxed{0.75}", 1),
    ("1,234", r"\boxed{1234}", 1),
    (18, r"\fbox{18}", 1),
    (-0.5, r"\boxed{-\frac12}", 1),
    ("They sell 1234. #### 1,234", "1234", 1),
    (r"So it is $\boxed{\frac{1}{3}}$.", r"\boxed{1/3}", 1),
    ("x=3", r"\boxed{3}", 1),
    (r"\sqrt{2}", r"\boxed{1.41421356}", 1),
    ("0.333", r"\boxed{1/3}", 0),
    ("5", r"\boxed{5\text{ cm}}", 1),
    (r"\text{odd}", r"\boxed{odd}", 1),
    ("2", r"\boxed{1 \text{ or } 2}", 0),
    (r"\$18.90", r"\boxed{18.9}", 1),
    (r"\$36", r"\boxed{\$36}", 1),
    ("$18.00", "18", 1),
    (1e-05, r"\boxed{1\times10^{-5}}", 1),
    (1e16, r"\boxed{10^{16}}", 1),
    ("300000000", r"\boxed{3e8}", 1),
    ("2.5E7", "it is 25000000", 1),
    ("2e - 1", r"\boxed{2e-1}", 1),
    ("1 1/2", r"\boxed{\frac32}", 1),
    ("3/2", r"\boxed{1 1/2}", 1),
    ("11/2", r"\boxed{1 1/2}", 0),
    ("1234567", r"\boxed{1\,234\,567}", 1),
    ("-5", "\\boxed{–5}", 1),
    ("-5", "the answer is −5", 1),
    ("5", "\\boxed{−5}", 0),
    ("30", r"\boxed{30°}", 1),
    ("5", r"\boxed  {5.}", 1),
    (r"\emptyset", r"\boxed{\varnothing}", 1),
    ("2,3", r"$x=\boxed{2}$ and $x = \boxed{3}$", 1),
    ("3", r"$x=\boxed{2}$, so $x = \boxed{3}$", 1),
    ("1234", r"\boxed{1 234}", 1),
    ("34", r"\boxed{3 4}", 0),
    ("(-2,7]", r"\boxed{-2<x\le 7}", 1),
    ("(-2,7]", r"\boxed{-2<x<7}", 0),
    ("x > 5", r"\boxed{(5,\infty)}", 1),
    ("5", r"\boxed{x > 5}", 0),
    (r"\cos 60^\circ", r"\boxed{0.5}", 1),
    (r"\frac{1}{2}", r"\boxed{\sin 30^{\circ}}", 1),
    (r"e^{\pi i/4}", r"\boxed{\frac{\sqrt2}{2}+\frac{\sqrt2}{2}i}", 1),
    ("2+3i", r"\boxed{2-3i}", 0),
    (r"\sum_{i=1}^{4} i", r"\boxed{10}", 1),
    ("5", "", 0),
    ("5", r"\boxed{}", 0),
    ("5", "\0\0", 0),
    ("5", "\\boxed{" * 100_000, 0),
    ("5", "9" * 10_000_000, 0),
    ("5", "(" * 100_000, 0),
    ("5", r"\boxed{" + "9" * 1_000_000 + "}", 0),
]


@pytest.mark.parametrize(("label", "response", "expected"), SUITE + OURS, ids=lambda value: str(value)[:30])
def test_verdicts(label: Any, response: str, expected: int) -> None:
    """The last box first, units and percent as documented; long and broken answers are wrong, and quickly so."""
    reward_parts.label_check(registry().rewards, "math", {})(label)
    assert verdict("math", label, response) == expected


@pytest.mark.parametrize("label", ["", "  ", "####", None, True, ["1"], {"a": 1}, "1" * 3000])
def test_labels_that_cannot_be_right(label: Any) -> None:
    """Refused at submit."""
    with pytest.raises(DataError, match=r"^reward=math: label .* Correct the prompt file"):
        reward_parts.label_check(registry().rewards, "math", {})(label)


def test_the_answer_that_votes() -> None:
    """In evaluations, samples with the same one vote together."""
    halves = [r"\boxed{\frac12}", r"so \boxed{\dfrac{1}{2}}.", r"\boxed{\frac{1}{2}} cm"]
    assert {answer("math", response) for response in halves} == {"1/2"}
    assert answer("math", r"\boxed{3}") != answer("math", r"\boxed{3\%}")
    assert answer("math", "it is " + "7" * 20_000) is None
    assert answer("math", "I do not know") is None
