"""``reward=code``: verdicts, labels and what submit says of them. What programs may not do: test_code_sandbox.py."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from rlbatch.api import ConfigError, DataError, Prompt, RewardError, Sample, SampleGroup
from rlbatch.config.schema import Config, RewardConfig
from rlbatch.registry import load_plugins
from rlbatch.rewards.scorer import Scorer
from rlbatch_plugins.code_sandbox.labels import checks_of
from rlbatch_plugins.code_sandbox.sandbox import interpreter
from rlbatch_plugins.reward_code import Options, check_label, judge, program_of, same_output

ADD = "def add(a, b):\n    return a + b"
CHECK = """
def check(candidate):
    assert abs(candidate(2, 3) - 5) < 1e-6
    assert all(map(lambda x: candidate(x, 1) == x + 1, [4]))
    assert 5 in [candidate(2, 3)] and candidate(2, 3) == 5
"""
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
"""


def verdict(program: str, label: Any, **options: Any) -> float:
    return judge(program, checks_of(label), Options(**options))


def test_answers_are_scored_in_order_and_a_label_as_text_is_one() -> None:
    """The label as verl's files have it, as JSON in a text."""
    reward = load_plugins().build_reward("code", {})
    label = json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8"]})
    empty = torch.zeros(0)
    answers = ["```python\nprint(int(input()) * 2)\n```", "```python\nprint(6)\n```", "no program", ""]
    samples = [Sample(Prompt(0, "", (), label=label), place, empty, empty, empty, text, "stop") for place, text in enumerate(answers)]
    assert list(reward(samples)) == [1.0, 0.0, 0.0, 0.0]
    broken = Sample(Prompt(7, "", (), label="x"), 0, empty, empty, empty, "print()", "stop")
    with pytest.raises(RewardError, match=r"^reward=code: label of prompt 7 has no tests: it must hold `inputs`"):
        reward([broken])


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("a\n```python\nprint(1)\n```\nb\n```py\nprint(2)\n```\n```text\n2\n```", "print(2)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)", "print(1)"),
        ("<think>\n```python\nprint(0)\n```\n</think>\n```python\nprint(1)\n```", "print(1)\n"),
        ("<think>\n```python\nprint(0)\n```\n</think>\nno", "\nno"),
    ],
)
def test_which_part_of_a_response_is_the_program(response: str, program: str) -> None:
    """The last fence of the language behind the thoughts, closed or cut; without any the whole text."""
    assert program_of(response, Options().languages) == program


@pytest.mark.parametrize(
    ("given", "expected", "is_same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1   2", "1 2", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("nan", "nan.", False),
        ("", "0", False),
        ("yes", "YES", False),
    ],
)
def test_which_outputs_are_the_same(given: str, expected: str, is_same: bool) -> None:
    """Spaces at ends do not count, lines do; numbers with decimals are compared as such."""
    assert same_output(given, expected) is is_same


def test_the_forms_of_labels() -> None:
    """As data sets have them: each gives the same tests."""
    assert checks_of([{"input": "1", "output": "2", "testtype": "stdin"}]).streams == [("1", "2")]
    assert checks_of({"input_output": '{"inputs": [["1", "2"]], "outputs": ["3"]}'}).streams == [("1\n2", "3")]
    called = {"input": "[1, 2]\n3", "output": "true", "metadata": '{"func_name": "f"}'}
    by_name = {"fn_name": "f", "inputs": [[[1, 2], 3]], "outputs": [True]}
    assert checks_of([called]).calls == checks_of(by_name).calls == [([[1, 2], 3], True)]
    texts = {"test_list": ["assert f(1)"], "test_setup_code": "import math"}
    assert checks_of(texts).code == ["import math", "assert f(1)"]
    assert checks_of("assert f(1)").code == checks_of('["assert f(1)"]').code == checks_of({"test": "assert f(1)"}).code == ["assert f(1)"]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (3, "label has no tests: it must hold"),
        ("18", "label has no tests"),
        ([], "label has no tests"),
        ({"inputs": ["1"], "outputs": []}, "label must have as many `outputs` as `inputs`"),
        ([{"input": "1"}], "label has a test with input: it must have `input` and `output`"),
        (["assert f(1) ==="], "label has a test that is no Python (SyntaxError"),
        ([3], "label has a test of type int"),
        ({"inputs": ["1"], "outputs": ["2"], "test": "assert f(1)"}, "label has several kinds of tests"),
        ({"inputs": ["1"], "outputs": ["1"], "solution": ["print(1)"]}, "label has a `solution` of type list: it must be a text"),
    ],
)
def test_labels_without_tests_are_refused(label: Any, message: str) -> None:
    """At submit, as every row's label is looked at there."""
    with pytest.raises(DataError) as refused:
        check_label(Options(), label)
    assert str(refused.value).startswith(message)


def test_a_solution_that_fails_its_own_tests_is_refused() -> None:
    """As long as there is time for it."""
    right = {"tests": ["assert add(1, 2) == 3"], "solution": f"```python\n{ADD}\n```"}
    check_label(Options(), right)
    wrong = {**right, "tests": ["assert add(1, 2) == 4"]}
    with pytest.raises(DataError, match=r"^label: its own solution does not pass its tests\. Correct or remove the row\.$"):
        check_label(Options(), wrong)
    check_label(Options(solution_seconds=0.0), wrong)


@pytest.mark.parametrize(
    ("program", "label"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]),
        (ADD, {"test": CHECK, "entry_point": "add"}),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, ["ab"]]}),
        ("class Solution:\n    def f(self, n): return (n, n / 3)", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 0.33333333]]}),
        ("def f(x): return x * 2", {"test": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "f"}),
        ("def sum(a, b): return a - b", {"tests": ["assert sum(3, 2) == 1"], "entry_point": "sum"}),
        ("def f(x): x.append(3)", ["given = [1]\nf(given)\nassert given == [1, 3]"]),
        (STACK, ["s = Stack()\ns.push(4)\nassert len(s) == 1 and 4 in s and s.pop() == 4"]),
        ("def f(n):\n    if n < 0: raise ValueError('n')", ["try:\n    f(-1)\nexcept ValueError: pass\nelse: raise AssertionError"]),
        (ADD, ["from solution import add\ndef test_add():\n    assert add(2 ** 100, 1) == 2 ** 100 + 1"]),
        (
            ADD,
            [
                "import unittest, math\nclass T(unittest.TestCase):\n    def test(self):\n"
                "        self.assertTrue(math.isclose(add(1.5, 1), 2.5))"
            ],
        ),
        (
            "import sys\ndef f(): return {1: (2, {3}), 'a': b'b', None: 1j}\nsys.exit(0)",
            ["assert f() == {1: (2, {3}), 'a': b'b', None: 1j}"],
        ),
    ],
)
def test_right_programs_pass(program: str, label: Any) -> None:
    """Functions, methods, classes, work in place, exceptions; texts in the styles of MBPP, HumanEval, pytest and unittest."""
    assert verdict(program, label) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return 0",
        "add = 3",
        "def other(): pass",
        "def add(a, b):",
        "a\0b",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b): raise StopIteration",
        "import os\nfor stream in (1, 2, *range(3, 20)):\n    try: os.write(stream, b'passed')\n    except OSError: pass\nos._exit(0)",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "class Equal(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "class Any(list):\n    def __contains__(self, item): return True\ndef add(a, b): return Any()",
        "class Odd:\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\ndef add(a, b): return Odd()",
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.abs = lambda x: 0\ndef add(a, b): return 0",
        "def abs(x): return 0\ndef all(x): return True\ndef check(x): pass\ndef test_it(): pass\ndef add(a, b): return 0",
        "import sys, atexit, os\natexit.register(os._exit, 0)\nsys.settrace(print)\nsys.excepthook = print\ndef add(a, b): return 0",
        # Answers in the place of the server: of a test's own words, and of what its names mean.
        """
import json, os
said = {"failed": None, "names": {"__builtins__": {"d": [["abs", {"o": 0}], ["AssertionError", 3]]}, "add": {"o": 0}, "check": {"o": 0}}}
for stream in range(3, 20):
    try: os.write(stream, b"".join(json.dumps(line).encode() + b"\\n" for line in [said] + 9 * [{"value": 0, "after": {"t": []}}]))
    except OSError: pass
""",
        "import os\nfor stream in range(3, 20):\n    try: os.write(stream, b'[' * 10 ** 6 + b'\\n')\n    except OSError: pass",
    ],
)
def test_no_program_passes_without_right_answers(program: str) -> None:
    """Whatever it prints, exits with, returns or writes into the line to its tests."""
    assert verdict(program, {"test": CHECK, "entry_point": "add"}) == 0.0


def test_the_tests_are_not_where_the_program_is() -> None:
    """It finds neither their texts nor what they expect, in files or in other processes."""
    program = """
import os, sys
def secret():
    found = []
    for folder, inner, names in os.walk("/"):
        if folder in ("/usr", "/proc", "/dev", "/etc", sys.base_prefix): inner.clear(); continue
        for name in names:
            try: found.append(open(os.path.join(folder, name), errors="replace").read())
            except OSError: pass
    for pid in os.listdir("/proc"):
        for name in ("environ", "cmdline", "mem"):
            try: found.append(open(f"/proc/{pid}/{name}", errors="replace").read(1000))
            except (OSError, ValueError): pass
    return any("4711" + "0815" in text for text in found)
"""
    assert verdict(program, ["x = 47110815\nassert secret() is False"], limit_addresses=False) == 1.0


def test_partial_and_time() -> None:
    """The share of streams that pass; an answer's time ends its tests; a function that hangs fails them all."""
    label = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "0", "4"]}
    assert verdict("print(input())", label, partial=True) == 0.75
    assert verdict("print(input())", label) < 1.0
    assert verdict("print(input())", label, partial=True, answer_seconds=1e-9) == 0.0
    assert verdict("def f():\n    while True: pass", ["assert f() == 1"], seconds=1.0) == 0.0
    assert verdict("def f(): return 1", ["assert f() == 1\nwhile True: pass"], seconds=1.0) == 0.0


RIGHT = "print(int(input()) * 2)"
ATTACKS = {
    "loop": "while True: pass",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "worker": "import os\nfor pid in range(1, 99999):\n    try: os.kill(pid, 9)\n    except OSError: pass",
    "verdict": """for number in range(3, 99):
    try: __import__("os").write(number, b'{"rewards": [1.0], "parts": [{}], "answers": []}')
    except OSError: pass
print('{"rewards": [1.0]}')""",
    "daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(600)\n    os._exit(0)",
    "none": "",
}


def test_workers_judge_and_attacks_cost_their_own_answer() -> None:
    """While others are generated; the memory of a program is its own limit, not its worker's; nothing is left."""
    options = {"seconds": 5.0, "memory_mib": 512}
    reward = RewardConfig("code", 2, memory_gib=0.1, options=options)
    scorer = Scorer(replace(Config(), reward=reward), load_plugins())
    programs = [RIGHT, *ATTACKS.values(), f"held = bytearray(300 * 2**20)\n{RIGHT}", RIGHT]
    prompt = Prompt(0, "", (), label={"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8\n"]})
    empty = torch.zeros(0)
    group = SampleGroup(prompt, [Sample(prompt, place, empty, empty, empty, program, "stop") for place, program in enumerate(programs)])
    try:
        scorer.submit(group)
        assert scorer._host is not None
        host = psutil.Process(scorer._host.pid)
        scorer.finish([group])
        assert group.rewards == [1.0, *[0.0] * len(ATTACKS), 1.0, 1.0]
        assert (group.failures, scorer.counts) == ([""] * len(programs), {})
        assert not [child for worker in host.children() for child in worker.children(recursive=True)]
    finally:
        scorer.close()


def test_other_languages_by_a_command() -> None:
    """The program's file is in its place; what it prints is compared as ever."""
    label = {"inputs": ["3\n"], "outputs": ["6"]}
    assert verdict("read x; echo $((x * 2))", label, command=("/bin/sh", "{file}")) == 1.0
    assert verdict("read x; echo $((x * 3))", label, command=("/bin/sh", "{file}")) == 0.0
    python, _ = interpreter()
    assert verdict("print(int(input()) * 2)", label, command=(python, "{file}")) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow_weaker": ["net"]}, "allow_weaker=net: must be of user, files, processes"),
        ({"command": ["node", "{file}"]}, "command: must begin with a path from the root, not node"),
        ({"command": ["/usr/bin/node"]}, r"command: must have \{file\}"),
    ],
)
def test_options_that_name_nothing(options: dict[str, Any], message: str) -> None:
    """Are refused with the key."""
    with pytest.raises(ConfigError, match=f"^reward.options of reward=code: {message}"):
        load_plugins().build_reward("code", options)
