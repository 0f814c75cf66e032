"""What every engine in a host of its own promises, for the real vLLM and the real SGLang on CPU: the same tests for each backend.

A backend's own file makes classes of these, with what is its own as their attributes, and imports the fixtures. The order of its classes is
that of the tests: engines are shared, and families change seldom.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import Continued, Prompt, RolloutContext, RolloutError
from rlbatch.engines.backend.hosted import HostedOptions, HostedRollout
from rlbatch.engines.backend.weight_check import Compared
from rlbatch.engines.client.engine_process import EngineHost
from rlbatch.engines.protocol.shared_names import remove_leftovers
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout
from tests.leftovers import no_memory_left, process_called, processes_of, wait_until_gone
from tests.plugins.poke import one_bit_changed, places
from tests.plugins.vllm_cases import LIMIT, PARAMS, PROMPTS, Pair, gathers_of_threads, tensors, tokens_of
from tests.stopwatch import Stopwatch

Named = list[tuple[str, torch.Tensor]]
CHANGES: dict[str, Callable[[Named], Named]] = {
    "part of a matrix": lambda named: [pair for pair in named if "layers.1.self_attn.k_proj" not in pair[0]],
    "missing": lambda named: [pair for pair in named if "layers.2.mlp.gate.weight" not in pair[0]],
    "unknown": lambda named: [*named, ("model.extra.weight", torch.zeros(1))],
    "twice": lambda named: [*named, named[0]],
    "shape": lambda named: [(name, tensor[:, :5] if "q_proj" in name else tensor) for name, tensor in named],
}
REFUSALS = {
    "part of a matrix": r"layers\.1\.self_attn\.qkv_proj\.weight \(",
    "missing": r"layers\.2\.mlp\.gate\.weight \(",
    "unknown": r"model\.extra\.weight",
    "twice": r"{first} is written twice",
    "shape": r"refuses model\.layers\.0\.self_attn\.q_proj\.weight",
}


@dataclass(frozen=True)
class Backend:
    """What the tests need of a backend.

    Attributes:
        name: ``rollout=<name>``.
        make: Of its plugin.
        options: ``rollout.options``.
        write_model: A tiny model of a family as a folder.
        python: An interpreter that has it.
        returns_routes: Whether it tells which experts tokens went to.
        engine: ``rollout.engine`` of the engines that tests share.
    """

    name: str
    make: Callable[[RolloutContext, Any], HostedRollout]
    options: Callable[..., HostedOptions]
    write_model: Callable[[str, Path], Path]
    python: Callable[[Path], str]
    returns_routes: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)


class Pairs:
    """Both backends by family, of which one lives at a time: an idle scheduler of SGLang's takes a processor."""

    def __init__(self, backend: Backend, python: str, new_folder: Callable[[str], Path]) -> None:
        self._backend, self._python, self._new_folder = backend, python, new_folder
        self._made: dict[str, Pair] = {}

    def __call__(self, family: str) -> Pair:
        if family not in self._made:
            self.close()
            folder = self._backend.write_model(family, self._new_folder(family))
            routes, engine = self._backend.returns_routes and family != "qwen2", {"python": self._python, **self._backend.engine}
            context = RolloutContext(folder, "cpu", "float32", engine=engine, folder=self._new_folder("engine"), with_routes=routes)
            oracle = TransformersRollout(context, TransformersOptions())
            self._made[family] = Pair(folder, self._backend.make(context, self._backend.options()), oracle)
        return self._made[family]

    def close(self) -> None:
        while self._made:
            self._made.popitem()[1].engine.close()


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    """The file's own."""
    found: Backend = request.module.BACKEND
    return found


@pytest.fixture(scope="module")
def python(backend: Backend, repository: Path) -> str:
    return backend.python(repository)


@pytest.fixture(scope="module")
def pairs(backend: Backend, python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(backend, python, tmp_path_factory.mktemp)
    yield made
    made.close()


@pytest.fixture
def pair(pairs: Pairs) -> Iterator[Pair]:
    """A mixture of experts with the first weights; its options and context are set back."""
    both = pairs("qwen3_moe")
    options, context = both.engine._options, both.engine._context
    both.sync(0)
    yield both
    both.engine._options, both.engine._context = options, context


@pytest.fixture
def alone(pairs: Pairs) -> None:
    """No other engine runs."""
    pairs.close()


def assert_equal_to_transformers(pair: Pair) -> None:
    """Greedy tokens are the same, log-probs of samples at temperature 1 and 0.6 within 1e-4."""
    greedy = replace(PARAMS, temperature=0.0, samples_per_prompt=1)
    assert tokens_of(pair.engine.generate(PROMPTS, greedy)) == tokens_of(pair.oracle.generate(PROMPTS, greedy))
    for temperature in (1.0, 0.6):
        assert pair.worst_difference(replace(PARAMS, temperature=temperature)) < LIMIT


def assert_experts_are_the_models(pair: Pair) -> None:
    """The engine's of every token of prompt and response but the last, in all layers that have experts; none where not asked for."""
    for completion in next(iter(pair.engine.generate(PROMPTS, PARAMS))):
        assert completion.routes is None
    asked = replace(PARAMS, with_routes=True)
    for prompt, completions in zip(PROMPTS, pair.engine.generate(PROMPTS, asked), strict=True):
        for completion in completions:
            read = Prompt(0, "", (*prompt.token_ids, *completion.token_ids[:-1]))
            [[expected]] = pair.oracle.generate([read], replace(asked, samples_per_prompt=1, max_response_tokens=1))
            assert completion.routes is not None
            assert expected.routes is not None
            own = completion.routes[:, -expected.routes.shape[1] :]  # an engine may have rows of layers without experts, which come first
            assert own.sort(-1).values.equal(expected.routes.sort(-1).values)


class SharedEngine:
    """Tests that one engine of each family serves; the last family's serves the others too.

    Attributes:
        families: Model families.
        scales: Of the weights of each sync.
        plain: Matrices that the engine has as they are in a checkpoint.
    """

    families: Sequence[Any] = ()
    plain: Sequence[str] = ("model.embed_tokens.weight",)
    scales: Sequence[float] = (1.0, 0.8, 1.2)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            metafunc.parametrize("family", self.families)

    def before_the_first_sync(self, pair: Pair) -> None:
        """What holds then."""

    def test_it_equals_transformers_after_every_sync(self, family: str, pairs: Pairs) -> None:
        """Greedy tokens are the same, log-probs of samples within 1e-4 at temperature 1 and 0.6, in small buckets too; without a sync
        neither.
        """
        pair = pairs(family)
        self.before_the_first_sync(pair)
        for version, (scale, mib) in enumerate(zip(self.scales, (1.0, 0.05, 1.0), strict=True)):
            pair.sync(version, scale, mib)
            assert_equal_to_transformers(pair)
        pair.oracle.update_weights(buckets(tensors(pair.folder, 1.0), 1, 3))
        assert pair.worst_difference(PARAMS) > 100 * LIMIT

    def test_what_its_modules_hold_is_compared(self, pair: Pair) -> None:
        """Of all tensors, in audited syncs and every second one of the others. One bit in the engine's memory is an error that names the
        tensor, and the parameter and the worker that have it.
        """
        all_of_them = Compared(held=len(list(tensors(pair.folder))), came=0, elsewhere=0)
        assert pair.engine.compared == all_of_them  # of the first sync
        pair.engine._context, pair.engine._syncs = replace(pair.engine._context, audit_interval=2), 1
        found: list[Compared | None] = []
        for version in (31, 32, 33):
            pair.engine.compared = None
            pair.sync(version, 1.1)
            found.append(pair.engine.compared)
        assert found == [None, all_of_them, None]
        pair.sync(34)
        weights = dict(tensors(pair.folder))
        rows = [weights[name][5] for name in self.plain]
        assert pair.engine._host is not None
        for name, row, found_at in zip(self.plain, rows, places(pair.engine._host.pid, rows), strict=True):
            said = rf"of 1 of \d+ tensors: {name} \(in model\.\S+ of worker 0\)\."
            with one_bit_changed(found_at, row), pytest.raises(RolloutError, match=said):
                pair.engine.check_weights()
            pair.engine.check_weights()

    def test_samples_are_named_by_seed_and_versioned(self, pair: Pair) -> None:
        """A sample does not depend on its batch, does on all that names it; it carries the version of its weights and its seconds."""
        pair.sync(41)
        together = list(pair.engine.generate(PROMPTS, PARAMS))
        assert {completion.policy_version for completions in together for completion in completions} == {41}
        assert all(completion.seconds is not None and completion.seconds > 0 for completions in together for completion in completions)
        assert tokens_of(pair.engine.generate(PROMPTS[::-1], PARAMS)) == tokens_of(together)[::-1]
        fewer = replace(PARAMS, samples_per_prompt=2)
        assert tokens_of(pair.engine.generate(PROMPTS[1:2], fewer)) == [tokens_of(together)[1][:2]]
        first = tokens_of(together)[0]
        assert len({tuple(tokens) for tokens in first}) == len(first)
        for other in (replace(PARAMS, seed=(1, 1)), replace(PARAMS, seed=(0, 2))):
            assert tokens_of(pair.engine.generate(PROMPTS[:1], other)) != [first]
        assert tokens_of(pair.engine.generate([Prompt(5, "", PROMPTS[0].token_ids)], PARAMS)) != [first]

    def test_a_response_goes_on_where_it_was_cut(self, pair: Pair) -> None:
        """In two parts the most likely tokens are those of the whole, with its log-probs; what names a part's random numbers changes it."""
        pair.sync(51)
        greedy = replace(PARAMS, temperature=0.0, samples_per_prompt=1, stop_token_ids=())
        for engine in (pair.engine, pair.oracle):
            whole = [answer[0] for answer in engine.generate(PROMPTS, greedy)]
            first = [answer[0] for answer in engine.generate(PROMPTS, replace(greedy, max_response_tokens=5))]
            begun = [Continued(p.prompt_id, "", (*p.token_ids, *c.token_ids), draw=(7, 0, 5)) for p, c in zip(PROMPTS, first, strict=True)]
            rest = [answer[0] for answer in engine.generate(begun, replace(greedy, max_response_tokens=7))]
            for all_of_it, before, after in zip(whole, first, rest, strict=True):
                assert [*before.token_ids, *after.token_ids] == list(all_of_it.token_ids)
                torch.testing.assert_close(
                    torch.tensor([*before.logprobs, *after.logprobs]), torch.tensor(all_of_it.logprobs), atol=LIMIT, rtol=0
                )
            drawn = [
                tokens_of(engine.generate([replace(begun[0], draw=draw)], PARAMS)) for draw in ((7, 0, 5), (7, 1, 5), (8, 0, 5), (7, 0, 6))
            ]
            assert len({str(tokens) for tokens in drawn}) == 4
            assert tokens_of(engine.generate(begun[:1], PARAMS)) == drawn[0]

    def test_the_stop_token_ends_a_sample_and_is_kept(self, pair: Pair) -> None:
        """Nothing follows it, its reason is `stop`; the others have the full length and `length`."""
        completions = [c for answer in pair.engine.generate(PROMPTS, replace(PARAMS, samples_per_prompt=60)) for c in answer]
        stopped = [c for c in completions if c.finish_reason == "stop"]
        assert 0 < len(stopped) < len(completions)
        for completion in completions:
            ids = list(completion.token_ids)
            assert len(ids) == len(completion.logprobs)
            assert (ids.index(7) == len(ids) - 1) if completion.finish_reason == "stop" else (7 not in ids and len(ids) == 12)

    def test_no_more_samples_at_once_than_allowed(self, pair: Pair) -> None:
        """With max_concurrency_per_replica=2 the seconds of all samples are at most twice those that passed; without it far more."""
        prompts = [Prompt(number, "", (1, 2)) for number in range(8)]

        def overlap() -> float:
            started = time.monotonic()
            seconds = sum(c.seconds or 0.0 for answer in pair.engine.generate(prompts, PARAMS) for c in answer)
            return seconds / (time.monotonic() - started)

        # Answers may be late on a busy machine, which makes an overlap smaller: a few times are looked at.
        assert any(overlap() > 4 for _ in range(3))
        pair.engine._options = replace(pair.engine._options, max_concurrency_per_replica=2)
        assert 1 < next((found for found in (overlap() for _ in range(3)) if found > 1), 0.0) <= 2

    def test_a_sample_that_takes_too_long(self, pair: Pair) -> None:
        """The error has the limit's key; the engine drops what it worked on, and the next samples and the next sync are the usual ones."""
        usual = tokens_of(pair.engine.generate(PROMPTS, PARAMS))
        options = pair.engine._options
        pair.engine._options = replace(options, request_timeout_s=0.05)
        long = replace(PARAMS, max_response_tokens=100, samples_per_prompt=40, stop_token_ids=())
        with pytest.raises(RolloutError, match=r"rollout\.options\.request_timeout_s=0\.05: sample \S+ took longer\. Raise it\."):
            list(pair.engine.generate(PROMPTS, long))
        pair.engine._options = options
        assert tokens_of(pair.engine.generate(PROMPTS, PARAMS)) == usual
        pair.sync(2, 1.1)
        assert pair.worst_difference(PARAMS) < LIMIT


class CompleteSync:
    """Tests of syncs that are refused; the last ones that an engine serves.

    Attributes:
        changes: What may be wrong with a sync.
        refusals: Regular expressions of what is then said.
    """

    changes: Mapping[str, Callable[[Named], Named]] = CHANGES
    refusals: Mapping[str, str] = REFUSALS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("change", list(self.changes))

    def after_it(self, pair: Pair, change: str) -> None:
        """What holds then."""

    def test_a_sync_must_be_complete(self, change: str, pair: Pair) -> None:
        """What is missing, unknown, doubled or of another shape is an error with its name."""
        pair.engine._context = replace(pair.engine._context, audit_sync="always")
        named = list(tensors(pair.folder))
        with pytest.raises(RolloutError, match=self.refusals[change].replace("{first}", named[0][0])):
            pair.engine.update_weights(buckets(self.changes[change](named), 1, 0))
        self.after_it(pair, change)


class OwnEngine:
    """Tests that start engines of their own.

    Attributes:
        shared: Engines of two ranks: what names each, ``rollout.engine`` and ``rollout.options.transport``.
        audit_sync: ``rollout.audit_sync`` of those.
        loads: ``rollout.engine`` with which an engine has weights from its start on.
        scheduler: Name of the process that is killed.
        host: Class in the host, and what the interpreter shall see.
        refused: Options that are refused, and regular expressions of what is said.
        absent: Of what an interpreter without the engine says.
    """

    shared: Mapping[str, Any] = {}
    audit_sync = "first"
    loads: Mapping[str, Any] = {}
    scheduler = ""
    host: tuple[str, Mapping[str, Sequence[str]]] = ("", {})
    refused: Sequence[tuple[Mapping[str, Any], str]] = ()
    absent = ""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "sizes" in metafunc.fixturenames:
            metafunc.parametrize(("sizes", "transport"), list(self.shared.values()), ids=list(self.shared))

    def start_header(self, folder: Path) -> dict[str, Any]:
        """What a start is told beside the options."""
        raise NotImplementedError

    def compare(self, pair: Pair) -> None:
        """An engine of two ranks with the oracle."""
        assert_equal_to_transformers(pair)

    def look(self, log: str, sizes: Mapping[str, Any]) -> None:
        """At what an engine of two ranks with these options said."""

    def test_two_ranks_share_an_engine(
        self, sizes: Mapping[str, Any], transport: str, backend: Backend, python: str, alone: None, tmp_path: Path
    ) -> None:
        """The first generates what transformers does, after each of two syncs: greedy tokens, and log-probs at temperature 1 and 0.6. The
        second only takes part in syncs, of which all is compared that the modules hold. Nothing stays in /dev/shm.
        """
        folder, gathers = backend.write_model("qwen3_moe", tmp_path / "model"), gathers_of_threads(2)

        def context(place: int) -> RolloutContext:
            ranks: dict[str, Any] = {"engine_rank": place, "gather": gathers[place], "node_rank": place, "node_gather": gathers[place]}
            engine = {"python": python, **sizes}
            audit: dict[str, Any] = {"audit_sync": self.audit_sync, "audit_interval": 1}
            return RolloutContext(folder, "cpu", "float32", engine=engine, folder=tmp_path / "engine", **audit, **ranks)

        options = backend.options(gpus_per_engine=2, transport=transport)

        def second() -> None:
            follower = backend.make(context(1), options)
            for version in range(2):
                follower.update_weights(buckets(tensors(folder, 1.0 + version), 1, version))

        thread = threading.Thread(target=second, daemon=True)
        with no_memory_left():
            thread.start()
            leader = backend.make(context(0), options)
            pair = Pair(folder, leader, TransformersRollout(context(0), TransformersOptions()))
            try:
                for version in range(2):
                    pair.sync(version, 1.0 + version)
                    assert leader.compared == Compared(held=len(list(tensors(folder))), came=0, elsewhere=0)
                    self.compare(pair)
                self.look((tmp_path / "engine/engine.log").read_text(), sizes)
            finally:
                leader.close()
            thread.join(60)
            assert not thread.is_alive()

    @pytest.mark.long("vllm", "sglang")
    def test_a_killed_engine_is_noticed(self, backend: Backend, python: str, alone: None, tmp_path: Path) -> None:
        """Its scheduler killed in mid-generation is a loss within 30 s; and after SIGKILL of a rank no process of the engine lives."""
        folder, engine = backend.write_model("qwen2", tmp_path / "model"), {"python": python, **self.loads}
        code = (
            "import sys, time\nfrom pathlib import Path\n"
            "from rlbatch.api import EngineLost, Prompt, RolloutContext, SamplingParams\n"
            f"from {backend.make.__module__} import {backend.make.__name__} as make, {backend.options.__name__} as Options\n"
            f"where = {{'engine': {engine!r}, 'folder': Path({str(tmp_path)!r})}}\n"
            f"backend = make(RolloutContext(Path({str(folder)!r}), 'cpu', 'float32', **where), Options())\n"
            "prompts = [Prompt(i, '', (1, 2)) for i in range(2000)]\n"
            "answers = backend.generate(prompts, SamplingParams(1.0, 120, (), 4, (0, 0)))\n"
            "next(answers)\nprint('generating', flush=True)\n"
            "try:\n    list(answers)\nexcept EngineLost as error:\n    print('noticed', flush=True)\n"
            "time.sleep(3600)\n"
        )
        rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert rank.stdout is not None
        try:
            assert rank.stdout.readline() == "generating\n"
            assert len(processes_of(tmp_path)) >= 4
            os.kill(process_called(tmp_path, self.scheduler), signal.SIGKILL)
            watch = Stopwatch()
            assert rank.stdout.readline() == "noticed\n"
            watch.assert_within(30)
        finally:
            rank.kill()
            rank.wait()
        wait_until_gone(tmp_path)
        remove_leftovers()  # a job's next engine does it

    @pytest.mark.long("vllm", "sglang")
    def test_options_are_checked(self, backend: Backend, python: str, tmp_path: Path) -> None:
        """An unknown option is named with the closest ones, a decided one with who decides, and what cannot be done with why."""
        host = EngineHost(backend.name, self.host[0], tmp_path, python=python, entry_points=self.host[1])
        header = self.start_header(tmp_path / "model")
        try:
            for options, message in self.refused:
                with pytest.raises(RolloutError, match=message):
                    host.call("start", {**header, "options": options}, limit_s=300)
        finally:
            host.close()

    def test_an_interpreter_without_it(self, backend: Backend, tmp_path: Path) -> None:
        """The error says what to install, and where."""
        with pytest.raises(RolloutError, match=rf"rollout={backend.name}: \S+ {self.absent}"):
            backend.make(RolloutContext(tmp_path, "cpu", "float32", folder=tmp_path), backend.options())
