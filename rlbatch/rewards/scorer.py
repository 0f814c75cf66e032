"""A rank's side of its rewards: groups go to the reward host as they are complete, and verdicts come back while others are generated."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from rlbatch import reward_parts
from rlbatch.api import Reward, RewardError, Sample, SampleGroup
from rlbatch.config.schema import Config, RewardConfig
from rlbatch.launch.ranks.children import MARK_VARIABLE, dies_with_parent, signal_group
from rlbatch.registry import Registry
from rlbatch.rewards.frames import SETUP, Frame, Peer, Setup, pack_task
from rlbatch.rewards.score import check_known, failed, score, span

MOST_WORKERS = 32
"""Most workers of a rank, unless ``reward.workers`` says more."""
MOST_LOSSES = 3
"""Reward hosts that may be lost while one generation is scored."""
POLL_S, CLOSE_S = 1.0, 10.0
"""Seconds between looks at answers; longest wait for the reward host to end, which itself may wait for what it has killed."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {"TOKENIZERS_PARALLELISM": "false"}
"""Workers are copies of a process without threads, and there is one for each core."""
Failure = Literal["error", "timeout"]


@dataclass(frozen=True)
class _Task:
    """Samples whose verdict is asked for in one call.

    Attributes:
        name: The reward's name.
        group: Whose samples they are.
        places: Theirs in the group.
        is_held_out: Whether it is an evaluation's.
        payload: The task as it was sent.
    """

    name: str
    group: SampleGroup
    places: range
    is_held_out: bool
    payload: bytes

    @property
    def samples(self) -> list[Sample]:
        return [self.group.samples[place] for place in self.places]


class Scorer:
    """The rewards of a rank.

    Args:
        config: ``reward.*``, plugins and seed.
        registry: The job's registry.
        names: Rewards that prompts name, beside the job's.
        workers: Processes, unless ``reward.workers`` says it.
        sets: Rewards of evaluation sets: name among the job's rewards -> name and options.

    Attributes:
        in_rank: Rewards that run in this process.
        may_drop: Whether groups without a verdict are left out.
        counts: Samples without a verdict by kind, since whoever reports them put a new one here.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        names: Sequence[str] = (),
        workers: int = 1,
        sets: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
    ) -> None:
        self._config: RewardConfig = config.reward
        trained: dict[str, tuple[str, Mapping[str, Any]]] = {name: (name, {}) for name in names}
        if config.reward.name:
            trained[config.reward.name] = (config.reward.name, config.reward.options)
        rewards = {**(sets or {}), **trained}
        scopes = {key: reward_parts.scope_of(registry.rewards, *said) for key, said in rewards.items()}
        # Those of workers are built too: what they refuse is told here, as it always was.
        built = {key: registry.build_reward(*said) for key, said in rewards.items()}
        self.in_rank: Mapping[str, Reward] = {key: reward for key, reward in built.items() if scopes[key] == "rank"}
        self._answers_in_rank = {key: reward_parts.answer_reader(registry.rewards, *rewards[key]) for key in self.in_rank}
        self._scopes, self._known = scopes, sorted(rewards)
        specs = {key: registry.rewards[name].value for key, (name, _) in rewards.items()}
        self._unscored = {key: self._config.on_timeout or spec.unscored for key, spec in specs.items()}
        self.may_drop = "drop_group" in (self._config.on_error, *(self._unscored[key] for key in trained))
        self._limits = {key: self._config.timeout_s or reward_parts.deadline_of(registry.rewards, *said) for key, said in rewards.items()}
        served = {key: said for key, said in rewards.items() if scopes[key] != "rank"}
        at_once = self._config.workers or min(max(workers, 1), MOST_WORKERS)
        self._setup = Setup(config.plugins, served, config.seed, at_once, self._config.memory_gib)
        self._host: subprocess.Popen[bytes] | None = None
        self._peer: Peer | None = None
        self._next, self._losses = SETUP + 1, 0
        self._asked: dict[int, _Task] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._told: set[str] = set()
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Starts the reward host, which loads plugins while this rank goes on; on the main thread. Else the first ``submit`` does so."""
        if self._host is not None or not self._setup.rewards:
            return
        ours, theirs = socket.socketpair()
        self._host = subprocess.Popen(
            [sys.executable, "-m", "rlbatch.rewards.host", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_ONE_THREAD, MARK_VARIABLE: secrets.token_hex(8)},
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
        theirs.close()
        self._peer = Peer(ours)
        self._peer.send_all(Frame(SETUP, 0.0, pickle.dumps(self._setup)))

    def submit(self, group: SampleGroup, *, is_held_out: bool = False) -> None:
        """Has a group scored, if its reward runs in workers; does not wait for it. Of an evaluation's the answers are wanted too, and a
        sample without a verdict counts 0.
        """
        name = group.prompt.reward_name or self._config.name
        check_known(name, group.prompt, self._known)
        if self._scopes[name] == "rank":
            return
        self.start()
        size = len(group.samples)
        places = [range(place, place + 1) for place in range(size)] if self._scopes[name] == "sample" else [range(size)]
        for part in places:
            samples = [group.samples[place] for place in part]
            task = _Task(name, group, part, is_held_out, pack_task(name, samples, is_held_out=is_held_out))
            self._ask(self._next, task)
            self._next += 1
        self._take()

    def _ask(self, number: int, task: _Task) -> None:
        assert self._peer is not None
        self._asked[number] = task
        self._peer.send_all(Frame(number, self._limits[task.name], task.payload))

    def finish(self, groups: Sequence[SampleGroup], *, is_held_out: bool = False) -> None:
        """Fills ``rewards`` of groups, all of which were submitted: waits for workers, and calls what runs in this process.

        Groups without a verdict keep no rewards if they are to be left out. Those of an evaluation get their ``answers`` too.

        Raises:
            RewardError: a reward is unknown, broken, or gave no verdict, where that stops the job.
        """
        dropped = []
        try:
            for name in self.in_rank:
                own = [group for group in groups if self._name(group) == name]
                dropped += self._score_here(name, own, is_held_out=is_held_out)
            while len(self._answers) < len(self._asked):
                assert self._peer is not None
                self._peer.wait(seconds=POLL_S)
                self._take()
        finally:
            asked, answers = self._asked, self._answers
            self._asked, self._answers, self._losses = {}, {}, 0
        for group in {id(task.group): task.group for task in asked.values()}.values():
            _clear(group)
        dropped += [task.group for number, task in sorted(asked.items()) if self._take_verdict(task, answers[number])]
        for group in dropped:
            group.rewards = []

    def _score_here(self, name: str, groups: list[SampleGroup], *, is_held_out: bool) -> list[SampleGroup]:
        """Scores groups of a reward that runs in this process, in one call; returns those that are left out, which are all or none."""
        try:
            score(groups, self.in_rank, name)
            for group in groups if is_held_out else ():
                group.answers = self._answers_in_rank[name](group.samples)
        except RewardError as error:
            for group in groups:
                _clear(group)
            tasks = [_Task(name, group, range(len(group.samples)), is_held_out, b"") for group in groups]
            return [task.group for task in tasks if self._take_verdict(task, failed(error))]
        return []

    def _name(self, group: SampleGroup) -> str:
        return group.prompt.reward_name or self._config.name

    def _take_verdict(self, task: _Task, answer: Mapping[str, Any]) -> bool:
        """Puts an answer into its group, and returns whether the group is left out for it."""
        group = task.group
        if "rewards" in answer:
            for place, reward, parts in zip(task.places, answer["rewards"], answer["parts"], strict=True):
                group.rewards[place], group.parts[place] = float(reward), parts
            for place, found in zip(task.places, answer["answers"], strict=task.is_held_out):
                group.answers[place] = found
            return False
        kind, policy, message = self._failure(task, answer)
        is_dropped = policy == "drop_group" and not task.is_held_out
        if "traceback" in answer and (policy == "stop" or kind not in self._told):
            print(answer["traceback"], end="", file=sys.stderr)
        if policy == "stop":
            raise RewardError(message)
        if kind not in self._told:
            self._told.add(kind)
            does, where = "its group is left out" if is_dropped else "it counts as 0", "" if task.is_held_out else "reward/"
            print(f"{message} ({does}; others like it are counted in {where}{kind}s)", file=sys.stderr, flush=True)
        self.counts[kind] += len(task.places)
        for place in task.places:
            group.failures[place] = kind
        return is_dropped

    def _failure(self, task: _Task, answer: Mapping[str, Any]) -> tuple[Failure, str, str]:
        """Kind of a failure, what is done about it, and what is said."""
        unscored = self._unscored[task.name]
        if "timeout" in answer:
            said = f"reward={task.name}: gave no verdict in reward.timeout_s={answer['timeout']:g} seconds on {span(task.samples)}"
            return "timeout", unscored, f"{said}. Allow more, or set reward.on_timeout=zero."
        if "died" in answer:
            said = f"reward={task.name}: its worker {answer['died']} on {span(task.samples)}"
            return "error", unscored, f"{said}. See the rank's output, or set reward.on_timeout=zero."
        return "error", unscored if answer["is_unscored"] else self._config.on_error, answer["message"]

    def _take(self) -> None:
        """Takes what the host has answered. A host that is gone is started anew, and asked again."""
        assert self._peer is not None
        for frame in self._peer.receive():
            answer = json.loads(frame.payload)
            if frame.number == SETUP and "ready" not in answer:
                print(answer["traceback"], end="", file=sys.stderr)
                raise RewardError(answer["message"])
            if frame.number in self._asked:
                self._answers.setdefault(frame.number, answer)
        if not self._peer.is_open:
            self._restart()

    def _restart(self) -> None:
        assert self._host is not None
        code = self._host.wait()
        self._losses += 1
        self.close()
        if self._losses > MOST_LOSSES:
            times, self._asked, self._losses = self._losses, {}, 0
            raise RewardError(f"reward={', '.join(self._setup.rewards)}: the process that runs it ended {times} times, with {code}.")
        self.start()
        for number, task in self._asked.items():
            if number not in self._answers:
                self._ask(number, task)

    def close(self) -> None:
        """Ends the reward host with all that it started."""
        if self._peer is not None:
            self._peer.close()
        if self._host is not None:
            with suppress(subprocess.TimeoutExpired):
                self._host.wait(CLOSE_S)
            if self._host.poll() is None:
                signal_group(self._host.pid, signal.SIGKILL)
                self._host.wait()
        self._host = self._peer = None


def _clear(group: SampleGroup) -> None:
    """Gives a group a place for each sample's verdict."""
    size = len(group.samples)
    group.rewards, group.parts, group.failures, group.answers = [0.0] * size, [{} for _ in range(size)], [""] * size, [None] * size
