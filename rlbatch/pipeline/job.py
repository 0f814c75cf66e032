"""The objects that a rank of a running job uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlbatch.algorithms.objective import Objective
from rlbatch.api import AdvantageEstimator, GroupFilter, ModelFamily, OffloadStrategy, Prompt
from rlbatch.config.schema import Config
from rlbatch.foreign_code import foreign_code, foreign_context
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.megatron.policy import Policy
from rlbatch.megatron.trainer import Trainer
from rlbatch.metrics.phases import PhaseClock
from rlbatch.pipeline.health import Health
from rlbatch.pipeline.logprob_limit import LogprobLimit
from rlbatch.pipeline.rollout import Rollout
from rlbatch.pipeline.stopping import Stopping
from rlbatch.pipeline.waiting_groups import Waiting
from rlbatch.prompts.eval_sets import EvalSet
from rlbatch.prompts.prompt_order import PromptOrder
from rlbatch.registry import Registry
from rlbatch.rewards.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """The objects with which a rank generates and scores: all that an evaluation needs.

    Attributes:
        config: Resolved config.
        run_dir: Run folder.
        rank: Rank of this process.
        device: ``cpu`` or ``cuda:<index>``.
        store: Store on which ranks wait for each other outside of collectives.
        watchdog: Ends the job if a rank hangs; is told what this rank does.
        stopping: Decides when a job that was asked to stop does so.
        hf_folder: Folder with the model's config.json and tokenizer.
        family: Family of the model.
        trainer: The trained policy.
        rollout: This rank's part of its engine.
        offload: Strategy that moves the trainer's memory off GPUs while engines use them.
        scorer: Computes rewards: the job's, those that prompts name, and those of evaluation sets.
        eval_sets: Held-out prompts; may be empty.
        quantises: Whether engines hold the family's fp8 weights quantised.
    """

    config: Config
    run_dir: Path
    rank: int
    device: str
    store: JobStore
    watchdog: Watchdog
    stopping: Stopping
    hf_folder: Path
    family: ModelFamily
    trainer: Policy
    rollout: Rollout
    offload: OffloadStrategy
    scorer: Scorer
    eval_sets: Sequence[EvalSet]
    quantises: bool = False

    def generating(self, clock: PhaseClock) -> AbstractContextManager[None]:
        """Context for weight sync and generation, in which the offload strategy gives GPUs to engines. Its moves are timed as a phase."""
        return _timed(clock, foreign_context(self._strategy, self.offload.generating))

    @property
    def _strategy(self) -> str:
        return f"offload={self.config.offload.name}"

    def sync_weights(self, *, is_taken: bool = True) -> None:
        """Sends the policy to the engines that take it, in the form in which they hold it; a collective."""
        with foreign_code(self._strategy):
            self.offload.sync_begins()
        wanted = self.rollout.wanted_experts()
        tensors = self.trainer.export(quantize=self.quantises, wanted=wanted)
        version = self.trainer.policy_version
        lasting = frozenset[int]() if self.offload.moves_weights else self.trainer.storages()
        self.rollout.sync_weights(tensors, version, is_taken=is_taken, lasting=lasting, wanted=wanted, sent=self._sync_ends)
        self._sync_ends()  # where nothing was taken

    def _sync_ends(self) -> None:
        with foreign_code(self._strategy):
            self.offload.sync_ends()


@dataclass(frozen=True, kw_only=True)
class Job(EngineJob):
    """The objects that a training step uses.

    Attributes:
        trainer: Policy and optimizer.
        estimator: Computes advantages.
        objective: Loss of an update.
        prompts: Training prompts, by position.
        prompts_identity: Values that identify these prompts among those of other runs.
        order: Decides which prompts a step takes.
        needs_reference: Whether log-probs of the reference model are computed.
        needs_logprobs: Whether the estimator reads reference and old log-probs, which are then computed before any update.
        health: Ends a run with values that are not finite, or without a learning signal.
        registry: Plugins of the job.
        filters: Filters of groups by name, in order.
        waiting: Groups that the last step left to the next.
        limit: Largest accepted difference between log-probs of trainer and engine.
    """

    trainer: Trainer
    estimator: AdvantageEstimator
    objective: Objective
    prompts: Sequence[Prompt]
    prompts_identity: Mapping[str, Any]
    order: PromptOrder
    needs_reference: bool
    needs_logprobs: bool
    health: Health
    registry: Registry
    filters: Mapping[str, GroupFilter] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)
    limit: LogprobLimit = field(default_factory=LogprobLimit)

    def training(self, clock: PhaseClock) -> AbstractContextManager[None]:
        """Context for log-probs and updates, in which the offload strategy gives GPUs to the trainer. Its moves are timed as a phase."""
        return _timed(clock, foreign_context(self._strategy, self.offload.training))


@contextmanager
def _timed(clock: PhaseClock, manager: AbstractContextManager[None]) -> Iterator[None]:
    """Times entering and leaving the context as ``offload``, but not moves that continue during the phases inside."""
    with ExitStack() as stack:
        with clock.phase("offload", waits=False):
            stack.enter_context(manager)
        yield
        with clock.phase("offload", waits=False):
            stack.close()
