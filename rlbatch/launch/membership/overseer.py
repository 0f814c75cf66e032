"""Rank 0's side of the watch: gathers the ranks, hears from their kernels and from themselves, and decides which failure came first."""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlbatch.config.machines import LaunchConfig
from rlbatch.launch.membership.messages import PROBE_S, Handshake, Link, MachineLost, Message
from rlbatch.launch.membership.stack_locations import StackLocation, find_culprit
from rlbatch.launch.membership.store_port import End, StorePort
from rlbatch.launch.ranks.children import END_SIGNAL
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.attempt import Attempt, is_superseded, name_of
from rlbatch.launch.records.failures import FirstError, claim, read_first_error
from rlbatch.launch.records.streams import output_hint

TICK_S = 0.25
"""Seconds between looks at the time limits."""
BEAT_S = float(PROBE_S)
"""Seconds between signs of life of rank 0 to the others."""
PATIENCE_S = 1.0
"""Seconds between a failure that may follow from another one and the decision."""
DEATH_PATIENCE_S = 0.3
"""The same after a death, where a launcher that knows the exit code may speak meanwhile; Open MPI kills all ranks 1 s after it."""
ANSWER_S = 3.0
"""Seconds that ranks have to say where they are."""
STOPPING_S = 5.0
"""Seconds in which the others must end after a rank was stopped by a signal, or it was that rank alone."""
LEAVING_S = 60.0
"""Seconds in which the others must end after a rank came to its regular end."""
ENDED = "ended without a word (killed, out of memory, os._exit, or a hang in C code)"
GRACE_S = 5.0
"""Seconds that rank 0 waits longer for ranks than they for it, so that one that cannot connect says why before it is missed."""
HANDSHAKE_S = 10.0
"""Seconds in which a connection must say who it is."""
SPARE_HANDSHAKES, SHOWN_REFUSALS = 64, 8
"""Connections beside the ranks' that may be unknown at once; those whose refusal is printed."""


@dataclass
class Member:
    """What is known of a rank.

    Attributes:
        link: The link to the rank.
        host: Its node.
        phase: What it does.
        since: Time when that began, of ``time.monotonic``.
        deadline: When its phase has lasted too long; None: it waits for others.
        limit_s: Hang limit of its phase, seconds.
        location: Where its main thread is, if it answered.
        has_left: Whether it came to its regular end, or was stopped.
        is_gone: Whether its process has ended.
        ends: Its ends of connections to the store, once it has told them.
    """

    link: Link
    host: str
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    limit_s: float = 0.0
    location: StackLocation | None = None
    has_left: bool = False
    is_gone: bool = False
    ends: Sequence[End] | None = None


@dataclass
class Evidence:
    """What went wrong in the job so far.

    Attributes:
        decide_at: When the first error is chosen.
        answer_until: How long ranks have to say where they are.
        failures: What ranks said of themselves, with whether it may follow from another failure.
        deaths: Ranks that ended without a word, how that showed, and after how many seconds in their phase.
        hung: Ranks whose phase lasted too long.
        stopped: A rank that was stopped by a signal, and by which.
    """

    decide_at: float | None = None
    answer_until: float = 0.0
    failures: list[tuple[FirstError, bool]] = field(default_factory=list)
    deaths: dict[int, tuple[str, float]] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    stopped: tuple[int, str] | None = None


class Overseer(threading.Thread):
    """A thread of rank 0 from the rendezvous to the end of the job; every rank, rank 0 too, is connected to it.

    That a rank's process ended, its kernel tells at once. That its machine is gone, the kernel here finds after ``wire.LOST_S``. Neither
    needs Python on the other side: a slow import or a long call into C code is no death.
    """

    def __init__(
        self, server: socket.socket, attempt: Attempt, info: RankInfo, run_dir: Path, store_port: StorePort, limits: LaunchConfig
    ) -> None:
        super().__init__(name="rlbatch-overseer", daemon=True)
        self.attempt, self._server, self._info, self._run_dir, self._store_port = attempt, server, info, run_dir, store_port
        self._timeout_s, self._collective_s = limits.rendezvous_timeout_s, limits.collective_timeout_s
        self._gather_until = time.monotonic() + self._timeout_s + GRACE_S
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._handshakes: dict[Link, Handshake] = {}
        self._refused = 0
        self._members: dict[int, Member] = {}
        self._evidence = Evidence()
        self.has_met = False
        self._launcher_ends_all = False
        self._leave_until: float | None = None
        self._next_beat = 0.0
        self.on_failure: Callable[[FirstError], None] = lambda error: None

    def run(self) -> None:
        """Watches until all ranks have ended or the job has failed."""
        try:
            while not self._is_over():
                self._serve(TICK_S)
                error = self._look()
                if error:
                    self._end(error)
                    return
        finally:
            self._selector.close()
            self._server.close()
            for link in [*self._handshakes, *(member.link for member in self._members.values())]:
                link.close()

    def _is_over(self) -> bool:
        has_ended = (self.has_met or self._is_late()) and not any(self._running())
        return (has_ended or self._launcher_ends_all) and not self._pending()

    def _is_late(self) -> bool:
        """Whether a rank left, and the others had their time to do so too; those that never came are their launcher's."""
        return self._leave_until is not None and time.monotonic() > self._leave_until

    def _pending(self) -> bool:
        return bool(self._evidence.failures or self._evidence.deaths or self._evidence.hung)

    def _serve(self, wait_s: float) -> None:
        """Accepts connections and reads messages, after a wait of at most ``wait_s`` seconds."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._server:
                with suppress(OSError):
                    self._accept(self._server.accept()[0])
            elif isinstance(key.data, int):
                self._hear(key.data)
            elif key.fileobj in self._handshakes:
                self._continue_handshake(self._handshakes[key.fileobj])

    def _accept(self, connection: socket.socket) -> None:
        """Begins a handshake; of too many the one that has waited longest without proof ends: a rank proves itself at once."""
        handshake = Handshake(connection, self.attempt.token, HANDSHAKE_S)
        self._handshakes[handshake.link] = handshake
        self._selector.register(handshake.link, selectors.EVENT_READ)
        unknown = [other for other in self._handshakes.values() if not other.is_known]
        if len(unknown) > self._info.world_size + SPARE_HANDSHAKES:
            self._refuse(unknown[0])

    def _continue_handshake(self, handshake: Handshake) -> None:
        """Gives a newcomer its member, or says why not."""
        try:
            messages = handshake.receive()
        except ConnectionError:
            return self._refuse(handshake)
        if not messages:
            return
        refusal = self._refusal(messages[0])
        if refusal:
            handshake.link.send({"refused": refusal, "final": True})
            self._drop(handshake)
            return
        del self._handshakes[handshake.link]
        self._members[messages[0]["rank"]] = Member(handshake.link, str(messages[0].get("host")))
        self._selector.modify(handshake.link, selectors.EVENT_READ, messages[0]["rank"])
        handshake.link.send({"joined": True, "store_port": self._store_port.port})
        if len(self._members) == self._info.world_size:
            self._met()

    def _met(self) -> None:
        """Closes the door once all ranks have come: no new connection is accepted any more."""
        self.has_met = True
        self._selector.unregister(self._server)
        self._server.close()
        for handshake in list(self._handshakes.values()):
            self._drop(handshake)
        hosts = [self._members[rank].host for rank in range(self._info.world_size)]
        for member in self._members.values():
            member.link.send({"hosts": hosts})

    def _refuse(self, handshake: Handshake) -> None:
        """Ends a connection that has not proved that it knows the token, and says so."""
        self._refused += 1
        if self._refused <= SHOWN_REFUSALS:
            where = handshake.link.peer_address()
            print(f"rendezvous: refused a process at {where}: it is of another job, or of an earlier attempt.", file=sys.stderr)
        self._drop(handshake)

    def _drop(self, handshake: Handshake) -> None:
        del self._handshakes[handshake.link]
        self._selector.unregister(handshake.link)
        handshake.link.close()

    def _refusal(self, join: Message) -> str:
        rank, size, me = join.get("rank"), join.get("world_size"), f"rank 0 of {name_of(self.attempt)} on {self._info.host}"
        if size != self._info.world_size or not isinstance(rank, int) or not 0 <= rank < self._info.world_size:
            return f"{me} has {self._info.world_size} ranks, this process is rank {rank} of {size}"
        if rank in self._members:
            return f"{me} has a rank {rank} already, on {self._members[rank].host}: two jobs in one run folder, or a rank twice"
        return ""

    def _hear(self, rank: int) -> None:
        member = self._members[rank]
        try:
            messages = member.link.receive()
        except ConnectionError as error:
            member.is_gone = True
            self._selector.unregister(member.link)
            member.link.close()
            if not member.has_left and all(failure.rank != rank for failure, _ in self._evidence.failures):
                how = str(error) if isinstance(error, MachineLost) else ENDED
                self._evidence.deaths[rank] = how, time.monotonic() - member.since
                self._decide_within(DEATH_PATIENCE_S)
            return
        for message in messages:
            self._note(rank, member, message)

    def _note(self, rank: int, member: Member, message: Message) -> None:
        if "phase" in message:
            member.phase, member.limit_s, member.since = message["phase"], message["limit_s"], time.monotonic()
            member.deadline = None if message["waits"] else member.since + member.limit_s
        elif "location" in message:
            member.location = StackLocation(tuple(message["location"]), message["waits"])
        elif "failed" in message:
            self._evidence.failures.append((FirstError(**message["failed"]), message["follows"]))
            self._decide_within(PATIENCE_S if message["follows"] else 0.0)
        elif "ends" in message:
            member.ends = [(str(address), int(port)) for address, port in message["ends"]]
            if all(other.ends is not None for other in self._members.values()):
                self._seal()
        elif "left" in message:
            member.has_left = True
            if message["left"]:
                self._evidence.stopped = self._evidence.stopped or (rank, message["left"])
                self._excuse(rank)
            if message["left"] == END_SIGNAL.name:
                self._launcher_ends_all = True
                for other in self._running():
                    other.link.send({"launcher_ends_all": True})
            else:
                within = STOPPING_S if message["left"] else LEAVING_S
                self._leave_until = min(self._leave_until or float("inf"), time.monotonic() + within)

    def _seal(self) -> None:
        """Closes the store's door once all ranks are there: hangs up on all others, and tells the ranks."""
        for address, port in self._store_port.close({end for member in self._members.values() for end in member.ends or ()}):
            print(f"store: hung up on {address}:{port}, which is no rank of this job.", file=sys.stderr)
        for member in self._members.values():
            member.link.send({"sealed": True})

    def _excuse(self, rank: int) -> None:
        """Forgets complaints of a rank that is stopped too: they were of the end of others, which the signal reached before."""
        evidence = self._evidence
        evidence.failures = [(error, follows) for error, follows in evidence.failures if error.rank != rank or not follows]
        if not self._pending():
            evidence.decide_at = None

    def _decide_within(self, seconds: float) -> None:
        if self._evidence.decide_at is None and seconds:
            self._ask()
        self._evidence.decide_at = min(self._evidence.decide_at or float("inf"), time.monotonic() + seconds)

    def _ask(self) -> None:
        self._evidence.answer_until = time.monotonic() + ANSWER_S
        for member in self._running():
            member.location = None
            member.link.send({"where": True})

    def _running(self) -> Iterator[Member]:
        return (member for member in self._members.values() if self._is_running(member))

    def _is_running(self, member: Member) -> bool:
        return not member.is_gone and not member.has_left

    def _look(self) -> FirstError | None:
        """The first error, once it is clear which one that is."""
        now = time.monotonic()
        for handshake in [handshake for handshake in self._handshakes.values() if now > handshake.until]:
            self._refuse(handshake)
        if now > self._next_beat:
            self._next_beat = now + BEAT_S
            for member in self._running():
                member.link.send({"beat": True})
            if not self.has_met:
                recorded = read_first_error(self._run_dir)
                if recorded:  # by a rank that failed before it came here
                    return recorded
        if not self.has_met and now > self._gather_until:
            return self._missing()
        if self._evidence.decide_at is None:
            hung = [rank for rank, member in self._members.items() if member.deadline and now > member.deadline and not member.has_left]
            if self._is_late():
                hung = hung or [rank for rank, member in self._members.items() if self._is_running(member)]
            if hung:
                self._evidence.hung = hung
                self._decide_within(ANSWER_S)
        elif (now > self._evidence.decide_at and not self._waits_for_answers(now)) or (self._evidence.hung and self._has_answers()):
            return read_first_error(self._run_dir) or self._decide()
        return None

    def _has_answers(self) -> bool:
        failed = {error.rank for error, _ in self._evidence.failures}
        return all(member.location for rank, member in self._members.items() if self._is_running(member) and rank not in failed)

    def _waits_for_answers(self, now: float) -> bool:
        """Whether the decision turns on what a rank, maybe on a busy machine, may still say: where it is, or why it hung up on another."""
        evidence = self._evidence
        if not evidence.failures and not evidence.deaths:
            return False
        if now > evidence.answer_until or not all(follows for _, follows in evidence.failures):
            return False
        if evidence.deaths:
            return self._gave_up() and not self._has_answers()
        return not (self._waited_in_vain() and self._has_answers())

    def _waited_in_vain(self) -> FirstError | None:
        """The failure that is a collective's time-out, if there is one: it ends connections too, and the other end may be heard first."""
        return next((error for error, _ in self._evidence.failures if "timed out" in error.message.lower()), None)

    def _gave_up(self) -> bool:
        """Whether the first rank that ended may have done so because a collective did: NCCL ends such a process."""
        how, seconds = next(iter(self._evidence.deaths.values()))
        return how == ENDED and seconds >= self._collective_s

    def _missing(self) -> FirstError:
        nodes = f" No rank came from {', '.join(self._absent_nodes()[:8])}." if self._absent_nodes() else ""
        wait = f"See their logs in {self._run_dir / 'logs'}, or wait longer."
        return self.missing_ranks_error(f"launch.rendezvous_timeout_s={self._timeout_s:g}", f"{nodes} {wait}")

    def missing_ranks_error(self, why: str, more: str) -> FirstError:
        """The failure of ranks that did not come: why the wait for them ended, and what is said behind their names."""
        missing = [rank for rank in range(self._info.world_size) if rank not in self._members]
        named = _named({rank: self._expected_host(rank) for rank in missing})
        text = f"{why}: {len(missing)} of {self._info.world_size} ranks did not come: {named}.{more}"
        return FirstError(missing[0], self._expected_host(missing[0]) or "?", "LaunchError", text, "", time.time())

    def _absent_nodes(self) -> list[str]:
        came = {member.host for member in self._members.values()}
        return [node for node in self._info.nodes if node not in came]

    def _expected_host(self, rank: int) -> str:
        """Tells where a rank should run, if ranks fill equal nodes one after the other."""
        info = self._info
        is_even = info.nodes and len(info.nodes) * info.local_size == info.world_size
        return info.nodes[rank // info.local_size] if is_even else ""

    def _decide(self) -> FirstError:
        evidence = self._evidence
        causes = [error for error, follows in evidence.failures if not follows]
        if causes:
            return causes[0]
        failed = {error.rank for error, _ in evidence.failures}
        locations = {rank: member.location for rank, member in self._members.items() if self._is_running(member) and rank not in failed}
        working = {rank: location for rank, location in locations.items() if location is None or not location.waits}
        if evidence.deaths:
            if self._gave_up() and working:  # the culprit is one of those that are in no collective
                return self._hang(find_culprit(working), locations)
            return self._death(next(iter(evidence.deaths)))
        if evidence.stopped and evidence.hung:
            rank, name = evidence.stopped
            return FirstError(rank, self._members[rank].host, "Exit", f"was stopped by {name}, and other ranks were not.", "", time.time())
        if evidence.hung:
            return self._hang(find_culprit(locations), locations)
        if working and self._waited_in_vain():
            return self._hang(find_culprit(working), locations)
        return evidence.failures[0][0]

    def _death(self, rank: int) -> FirstError:
        member, (how, _) = self._members[rank], self._evidence.deaths[rank]
        text = f"{how}, in phase {member.phase}. {output_hint(rank)}"
        return FirstError(rank, member.host, "Exit", text, "", time.time())

    def _hang(self, rank: int, locations: Mapping[int, StackLocation | None]) -> FirstError:
        member, location = self._members[rank], locations[rank]
        waiting = sum(other is not None and other.waits for number, other in locations.items() if number != rank)
        waiting += len(self._evidence.failures) + len(self._evidence.deaths)
        where = f"is at {location}" if location else "does not answer: it is stopped, or C code holds its interpreter"
        if self._leave_until:
            what = f"other ranks ended {LEAVING_S:g} s ago, and this one did not"
        elif self._evidence.deaths:
            dead, (_, seconds) = next(iter(self._evidence.deaths.items()))
            what = f"launch.collective_timeout_s={self._collective_s:g}: rank {dead} ended after {seconds:.0f} s in phase {member.phase}"
        elif self._evidence.failures:
            first = self._waited_in_vain() or self._evidence.failures[0][0]
            what = f"rank {first.rank} waited in vain ({first.message.splitlines()[0][:200]})"
        else:
            key = member.phase if member.phase in ("start", "generation", "checkpoint") else "training"
            what = f"launch.{key}_limit_s={self._members[self._evidence.hung[0]].limit_s:g}: phase {member.phase} lasts longer"
        text = f"{what}. This rank {where}; {waiting} others wait for it. Stacks of all ranks: logs/rank*.stacks."
        return FirstError(rank, member.host, "Hang", text, "\n".join(location.frames) if location else "", time.time())

    def _end(self, error: FirstError) -> None:
        """Records the error and ends all ranks."""
        # In a thread: a file system that hangs must not keep the ranks alive.
        recording = threading.Thread(target=self._record, args=(error,), daemon=True)
        recording.start()
        recording.join(ANSWER_S)
        known = [handshake.link for handshake in self._handshakes.values() if handshake.is_known]
        for link in [*known, *(member.link for member in self._members.values() if not member.is_gone)]:
            link.send({"end": str(error)})
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until and any(not member.is_gone for rank, member in self._members.items() if rank):
            with suppress(ConnectionError):
                self._serve(TICK_S)

    def _record(self, error: FirstError) -> None:
        if is_superseded(self._run_dir, self.attempt.token):
            return  # the folder is another attempt's
        claim(self._run_dir, error)
        self.on_failure(read_first_error(self._run_dir) or error)


def _named(hosts: Mapping[int, str]) -> str:
    """Ranks in words: ``rank 3 (host n1), rank 17 (host n3) and 5 more``."""
    shown = [f"rank {rank}" + (f" (host {host})" if host else "") for rank, host in list(hosts.items())[:8]]
    return ", ".join(shown) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
