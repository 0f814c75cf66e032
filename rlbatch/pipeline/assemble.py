"""Builds a rank's ``Job`` from a resolved config: plugins, model, weights, engine, prompts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from rlbatch.algorithms.objective import Objective
from rlbatch.api import ConfigError, ModelFamily, OffloadStrategy, Prompt, RolloutBackend, RolloutContext, StartingBackend
from rlbatch.checkpoint.carried import Carried, carried_layers, draft_model
from rlbatch.collectives import gathered
from rlbatch.config.hf_config import read_config
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.first_rank import on_first_rank
from rlbatch.foreign_code import foreign_code, foreign_context, state_kept
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.shutdown.grace_period import estimate_write_s
from rlbatch.launch.shutdown.signals import StopNotice
from rlbatch.megatron import parallel
from rlbatch.megatron.policy import Policy
from rlbatch.megatron.rng import seed_random_numbers
from rlbatch.megatron.trainer import Trainer
from rlbatch.metrics.phases import PartClock
from rlbatch.pipeline.engine_model import FOLDER, write_engine_folder
from rlbatch.pipeline.engine_ranks import EngineRanks, engine_ranks
from rlbatch.pipeline.finished_groups import sampler_key
from rlbatch.pipeline.health import Health
from rlbatch.pipeline.job import EngineJob, Job
from rlbatch.pipeline.loading import load_policy, weights_source
from rlbatch.pipeline.plan_vs_actual import tell_host_plans
from rlbatch.pipeline.rollout import Rollout
from rlbatch.pipeline.route_checks import Routers
from rlbatch.pipeline.stopping import Stopping
from rlbatch.plan.engine_precision import Quantization, check_device, engine_quantization
from rlbatch.plan.layout import check_expert_widths, check_layout, check_routing_replay
from rlbatch.plan.parameters import ModelSize
from rlbatch.prompts.embedded import write_random_weights
from rlbatch.prompts.eval_sets import set_rewards, with_prompts
from rlbatch.prompts.model_folder import end_tokens, load_tokenizer
from rlbatch.prompts.prompt_sets import held_out_sets
from rlbatch.prompts.prompt_store import Training, open_training
from rlbatch.prompts.tokenizing import load_prompts
from rlbatch.registry import Registry, load_plugins
from rlbatch.rewards.scorer import Scorer
from rlbatch.weights.coverage import expert_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Started = tuple[Rollout, "PreTrainedTokenizerBase"]


def assemble(
    config: Config,
    run_dir: Path,
    device: str,
    store: JobStore,
    watchdog: Watchdog,
    announce: Callable[[str], None],
    notice: StopNotice | None = None,
    registry: Registry | None = None,
) -> EngineJob:
    """Builds this rank's part of the job; a collective. A job that only evaluates is an ``EngineJob``, without optimizer and prompts."""
    registry = registry or load_plugins(config.plugins)
    engine_job, train = _Assembly(config, run_dir, device, store, watchdog, announce, notice or StopNotice(), registry).engine_job()
    if train is None:
        return engine_job
    return Job(
        **vars(engine_job),
        estimator=registry.build_advantage(config.algorithm),
        objective=Objective(config.algorithm, registry.build_loss(config.algorithm), config.correction),
        prompts=train.prompts,
        prompts_identity=train.identity,
        order=train.order,
        needs_reference=registry.needs_reference(config.algorithm),
        needs_logprobs=registry.advantages[config.algorithm.advantage].value.needs_reference,
        health=Health(config.train, announce),
        registry=registry,
        filters=registry.build_filters(config),
    )


@dataclass(frozen=True)
class _Assembly:
    """The parts from which a job is built. ``engine_job`` calls the other methods in this order."""

    config: Config
    run_dir: Path
    device: str
    store: JobStore
    watchdog: Watchdog
    announce: Callable[[str], None]
    notice: StopNotice
    registry: Registry

    def engine_job(self) -> tuple[EngineJob, Training | None]:
        """The parts that every job has, and the training prompts if the job trains."""
        config, registry, rank = self.config, self.registry, self.store.info.rank
        clock = PartClock()
        with clock.part("groups"):
            hf_folder, family = self._model()
            quantization = engine_quantization(config, registry, family, read_config(hf_folder))
        tell_host_plans(config, registry, family, self.store.info, on_gpu=self.device != "cpu")
        offload = registry.build_offload(config.offload.name, config.offload.options)
        with ExitStack() as failing:
            backend = None
            if registry.rollout(config).starts_beside:
                with clock.part("engine, begun"):
                    backend = self._backend(family, hf_folder, quantization)
                    failing.callback(backend.close)
            with clock.part("model"):
                trainer = Trainer(config, family, offload) if config.mode == "train" else Policy(config, family)
            with clock.part("weights"):
                load_policy(config, trainer, family, hf_folder, self.announce, needs_reference=registry.needs_reference(config.algorithm))
            with clock.part("engine"):
                rollout, tokenizer = self._beside_weights(offload, partial(self._rollout, family, hf_folder, quantization, backend))
            failing.pop_all()
        tell = self.announce if rank == 0 else lambda told: None
        with clock.part("prompts"):
            train = open_training(config, self.run_dir, family, tokenizer, registry, tell) if config.mode == "train" else None
            held_out = with_prompts(config, self._held_out(tokenizer, family, tell))
        self.announce(f"started: {clock.told()}")
        write_s = estimate_write_s(config, ModelSize(family).total.total, self.run_dir)
        named = {*(train.rewards if train else ()), *(prompt.reward_name for each in held_out for prompt in each.prompts)}
        job = EngineJob(
            config=config,
            run_dir=self.run_dir,
            rank=rank,
            device=self.device,
            store=self.store,
            watchdog=self.watchdog,
            stopping=Stopping(self.store, self.watchdog, self.notice, config.launch, write_s),
            hf_folder=hf_folder,
            family=family,
            trainer=trainer,
            rollout=rollout,
            offload=offload,
            scorer=self._scorer(named, generates=rollout.generates),
            eval_sets=held_out,
            quantises=quantization == "fp8",
        )
        return job, train

    def _model(self) -> tuple[Path, ModelFamily]:
        """The model's folder and family, after checks that they suit layout and engine. Also sets up process groups and seeds."""
        config, info, on_gpu = self.config, self.store.info, self.device != "cpu"
        if info.world_size != config.layout.world_size:
            raise ConfigError(f"layout.world_size={config.layout.world_size}: {info.world_size} ranks were started. Make both equal.")
        hf_folder = self._model_folder()
        family = self.registry.resolve_model_family(read_config(hf_folder))
        check_expert_widths(family, config.train.precision, on_gpu=on_gpu)
        check_layout(config.layout, family, on_gpu=on_gpu)
        check_routing_replay(config.algorithm.routing_replay, family)
        seed_random_numbers(config.seed, info.rank)
        if info.local_rank == 0:
            self.registry.check_engine(config)
        parallel.initialize_groups(config.layout, config.seed, math.gcd(*gathered(info.local_size)))
        self.announce(f"building {family.name}: {family.num_layers} layers, {family.num_experts} experts")
        return hf_folder, family

    def _model_folder(self) -> Path:
        """The model's Hugging Face folder. Rank 0 writes the weights of the embedded model."""
        if self.config.model.hf != EMBEDDED:
            return Path(self.config.model.hf)
        folder = self.run_dir / EMBEDDED / "model"
        if self.store.info.rank == 0 and not (folder / "model.safetensors").exists():
            write_random_weights(folder, self.config.seed)
        dist.barrier()
        return folder

    def _beside_weights(self, offload: OffloadStrategy, start: Callable[[], Started]) -> Started:
        """Starts engines. Where weights are offloaded, the GPU is first freed as for generation, and engines sleep afterwards."""
        if not offload.moves_weights:
            return start()
        strategy = f"offload={self.config.offload.name}"
        with foreign_context(strategy, offload.generating):
            with foreign_code(strategy):
                offload.sync_ends()
            rollout, tokenizer = start()
            rollout.sleep()
        return rollout, tokenizer

    def _backend(self, family: ModelFamily, hf_folder: Path, quantization: Quantization) -> RolloutBackend:
        """The rollout backend of this rank's part of an engine."""
        config, registry = self.config, self.registry
        self.announce(f"starting the {config.rollout.name} engine")
        check_device(config, quantization, on_gpu=self.device != "cpu")
        folder = on_first_rank(lambda: write_engine_folder(hf_folder, self.run_dir, family, quantization))
        return registry.build_rollout(config.rollout.name, config.rollout.options, self._context(folder, quantization))

    @cached_property
    def _engine(self) -> EngineRanks:
        return engine_ranks(self.store.info, self.registry.ranks_per_engine(self.config), self.registry.rollout(self.config))

    def _rollout(self, family: ModelFamily, hf_folder: Path, quantization: Quantization, begun: RolloutBackend | None) -> Started:
        """This rank's part of its engine, which may have begun to start (``begun``), and the tokenizer that the engine uses too."""
        config, registry, rank, engine = self.config, self.registry, self.store.info.rank, self._engine
        backend = begun or self._backend(family, hf_folder, quantization)
        if isinstance(begun, StartingBackend):
            with state_kept(f"rollout={config.rollout.name}"):
                begun.start()
        folder = self.run_dir / FOLDER
        carried = self._carried(family, hf_folder, folder)
        tokenizer = load_tokenizer(folder, hf_folder)
        rollout = Rollout(
            backend,
            tokenizer,
            config,
            end_tokens(hf_folder, read_config(hf_folder), family.vocab_size, tokenizer.eos_token_id),
            engine.generates,
            engine.hosts,
            run_dir=self.run_dir,
            notice=self.notice,
            announce=self.announce if rank == 0 else partial(print, flush=True),  # into the rank's log
            engine=rank // registry.ranks_per_engine(config),
            carried=carried,
            experts=frozenset(expert_names(family)),
            sampler=sampler_key(config, backend, folder),
            routers=Routers.of(family) if config.algorithm.routing_replay == "rollout" else None,
        )
        return rollout, tokenizer

    def _context(self, folder: Path, quantization: Quantization) -> RolloutContext:
        """The context that a rollout backend is built with."""
        engine = self._engine
        return RolloutContext(
            folder,
            self.device,
            "bfloat16" if quantization == "fp8" else DTYPES[self.config.train.precision],
            engine=self.config.rollout.engine,
            engine_rank=engine.place,
            gather=engine.gather,
            node_rank=engine.node_place,
            node_gather=engine.node_gather,
            engine_node=engine.node,
            engine_nodes=engine.nodes,
            address=engine.address,
            folder=self.run_dir / "engines" / str(engine.host),
            audit_sync=self.config.rollout.audit_sync,
            audit_interval=self.config.rollout.audit_interval,
            with_routes=self.config.algorithm.routing_replay == "rollout",
            starts_later=self.registry.rollout(self.config).starts_beside,
        )

    def _carried(self, family: ModelFamily, hf_folder: Path, folder: Path) -> Carried | None:
        """The weights that engines speculate with; None if they need none from the trainer."""
        draft = self.registry.draft(self.config)
        if draft is None:
            return None
        return draft_model(Path(draft)) if draft else carried_layers(family, read_config(folder), weights_source(self.config, hf_folder))

    def _held_out(
        self, tokenizer: PreTrainedTokenizerBase, family: ModelFamily, announce: Callable[[str], object]
    ) -> Iterator[list[Prompt]]:
        """Yields the prompts of each evaluation set."""
        for one, own in held_out_sets(self.config, self.run_dir):
            yield load_prompts(
                one.paths,
                one.data,
                tokenizer,
                context_tokens=family.max_sequence_length,
                max_response_tokens=own.rollout.max_response_tokens,
                vocab_size=family.vocab_size,
                most=one.most,
                limit_key=one.limit_key,
                announce=announce,
            )

    def _scorer(self, named: Collection[str], *, generates: bool) -> Scorer:
        """The scorer of the job's reward, of rewards that sets and prompts name (with default options), and of those of evaluation sets."""
        sets = set_rewards(self.config)
        names = sorted({*named} - {"", self.config.reward.name, *sets})
        generating = max(self.store.info.local_size // self.registry.ranks_per_engine(self.config), 1)
        scorer = Scorer(self.config, self.registry, names, workers=len(os.sched_getaffinity(0)) // generating, sets=sets)
        if generates:
            scorer.start()
        return scorer
