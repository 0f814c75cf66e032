"""Builds a rank's ``Job`` of a resolved config: plugins, model, weights, engine, prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlbatch.algorithms.objective import Objective
from rlbatch.api import ConfigError, ModelFamily, Prompt, RolloutContext
from rlbatch.checkpoint.carried import Carried, carried_layers, draft_model
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import EMBEDDED, Config
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.shutdown.grace_period import estimate_write_s
from rlbatch.launch.shutdown.signals import StopNotice
from rlbatch.megatron import parallel
from rlbatch.megatron.policy import Policy
from rlbatch.megatron.rng import seed_random_numbers
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.embedded import write_random_weights
from rlbatch.pipeline.engine_model import write_engine_folder
from rlbatch.pipeline.engine_ranks import engine_ranks
from rlbatch.pipeline.eval_sets import set_rewards, with_prompts
from rlbatch.pipeline.finished_groups import sampler_key
from rlbatch.pipeline.first_rank import on_first_rank
from rlbatch.pipeline.health import Health
from rlbatch.pipeline.job import EngineJob, Job
from rlbatch.pipeline.loading import load_policy, weights_source
from rlbatch.pipeline.model_folder import end_tokens, load_tokenizer
from rlbatch.pipeline.prompt_sets import held_out_sets
from rlbatch.pipeline.prompt_store import Training, open_training
from rlbatch.pipeline.prompts import load_prompts
from rlbatch.pipeline.rollout import Rollout
from rlbatch.pipeline.scorer import Scorer
from rlbatch.pipeline.stopping import Stopping
from rlbatch.plan.engine_precision import check_device, engine_quantization
from rlbatch.plan.layout import check_expert_widths, check_layout
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import Registry, load_plugins
from rlbatch.weights.coverage import expert_names

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


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
    """Builds this rank's part of the job: a ``Job``, or where it only evaluates one without optimizer and prompts; a collective."""
    registry = registry or load_plugins(config.plugins)
    engine_job, train = _engine_job(config, run_dir, device, store, watchdog, announce, notice or StopNotice(), registry)
    if train is None:
        return engine_job
    return Job(
        **vars(engine_job),
        estimator=registry.build_advantage(config.algorithm),
        objective=Objective(config.algorithm, registry.build_loss(config.algorithm)),
        prompts=train.prompts,
        prompts_identity=train.identity,
        order=train.order,
        needs_reference=registry.needs_reference(config.algorithm),
        needs_logprobs=registry.advantages[config.algorithm.advantage].value.needs_reference,
        health=Health(config.train, announce),
        filters=registry.build_filters(config),
    )


def _engine_job(
    config: Config,
    run_dir: Path,
    device: str,
    store: JobStore,
    watchdog: Watchdog,
    announce: Callable[[str], None],
    notice: StopNotice,
    registry: Registry,
) -> tuple[EngineJob, Training | None]:
    """What every job has, and the training prompts, if it has any."""
    info = store.info
    if info.world_size != config.layout.world_size:
        raise ConfigError(f"layout.world_size={config.layout.world_size}: {info.world_size} ranks were started. Make both equal.")
    hf_folder = _model_folder(config, run_dir, info.rank)
    family = registry.resolve_model_family(read_config(hf_folder))
    check_expert_widths(family, config.train.precision, on_gpu=device != "cpu")
    check_layout(config.layout, family, on_gpu=device != "cpu")
    seed_random_numbers(config.seed, info.rank)
    if info.local_rank == 0:
        registry.check_engine(config)
    parallel.initialize_groups(config.layout, config.seed)
    announce(f"building {family.name}: {family.num_layers} layers, {family.num_experts} experts")
    offload = registry.build_offload(config.offload.name, config.offload.options)
    trainer = Trainer(config, family, offload) if config.mode == "train" else Policy(config, family)
    load_policy(config, trainer, hf_folder, announce, needs_reference=registry.needs_reference(config.algorithm))
    announce(f"starting the {config.rollout.name} engine")
    engine = engine_ranks(info, registry.ranks_per_engine(config), registry.rollout(config))
    hf_config = read_config(hf_folder)
    quantization = engine_quantization(config, registry, family, hf_config)
    check_device(config, quantization, on_gpu=device != "cpu")
    engine_folder = on_first_rank(lambda: write_engine_folder(hf_folder, run_dir, family, quantization))
    context = RolloutContext(
        engine_folder,
        device,
        "bfloat16" if quantization == "fp8" else DTYPES[config.train.precision],
        engine=config.rollout.engine,
        engine_rank=engine.place,
        gather=engine.gather,
        node_rank=engine.node_place,
        node_gather=engine.node_gather,
        engine_node=engine.node,
        engine_nodes=engine.nodes,
        address=engine.address,
        folder=run_dir / "engines" / str(engine.host),
        audit_sync=config.rollout.audit_sync,
    )
    carried = _carried(config, registry, family, hf_folder, engine_folder)
    backend = registry.build_rollout(config.rollout.name, config.rollout.options, context)
    tokenizer = load_tokenizer(engine_folder, hf_folder)
    tell = announce if info.rank == 0 else lambda told: None
    train = open_training(config, run_dir, family, tokenizer, registry, tell) if config.mode == "train" else None
    held_out = with_prompts(config, _held_out(config, run_dir, tokenizer, family, tell))
    named = {*(train.rewards if train else ()), *(prompt.reward_name for each in held_out for prompt in each.prompts)}
    job = EngineJob(
        config=config,
        run_dir=run_dir,
        rank=info.rank,
        device=device,
        store=store,
        watchdog=watchdog,
        stopping=Stopping(store, watchdog, notice, config.launch, estimate_write_s(config, ModelSize(family).total.total, run_dir)),
        hf_folder=hf_folder,
        family=family,
        trainer=trainer,
        rollout=Rollout(
            backend,
            tokenizer,
            config,
            end_tokens(hf_folder, hf_config, family.vocab_size, tokenizer.eos_token_id),
            engine.generates,
            engine.hosts,
            run_dir=run_dir,
            notice=notice,
            announce=announce if info.rank == 0 else partial(print, flush=True),  # into the rank's log
            engine=info.rank // registry.ranks_per_engine(config),
            carried=carried,
            experts=frozenset(expert_names(family)),
            sampler=sampler_key(config, backend, engine_folder),
        ),
        offload=offload,
        scorer=_scorer(config, registry, named, info.local_size, generates=engine.generates is not None),
        eval_sets=held_out,
        quantises=quantization == "fp8",
    )
    return job, train


def _carried(config: Config, registry: Registry, family: ModelFamily, hf_folder: Path, engine_folder: Path) -> Carried | None:
    """What engines speculate with, if it has weights."""
    draft = registry.draft(config)
    if draft is None:
        return None
    return draft_model(Path(draft)) if draft else carried_layers(family, read_config(engine_folder), weights_source(config, hf_folder))


def _model_folder(config: Config, run_dir: Path, rank: int) -> Path:
    """The Hugging Face folder; rank 0 makes the embedded model's weights."""
    if config.model.hf != EMBEDDED:
        return Path(config.model.hf)
    folder = run_dir / EMBEDDED / "model"
    if rank == 0 and not (folder / "model.safetensors").exists():
        write_random_weights(folder, config.seed)
    dist.barrier()
    return folder


def _held_out(
    config: Config,
    run_dir: Path,
    tokenizer: Any,
    family: ModelFamily,
    announce: Callable[[str], object],
) -> Iterator[list[Prompt]]:
    """The prompts of each evaluation set."""
    for one, own in held_out_sets(config, run_dir):
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


def _scorer(config: Config, registry: Registry, named: Collection[str], local_ranks: int, *, generates: bool) -> Scorer:
    """The job's reward, those that sets and prompts name (with their default options), and those of evaluation sets."""
    sets = set_rewards(config)
    names = sorted({*named} - {"", config.reward.name, *sets})
    generating = max(local_ranks // registry.ranks_per_engine(config), 1)
    scorer = Scorer(config, registry, names, workers=len(os.sched_getaffinity(0)) // generating, sets=sets)
    if generates:
        scorer.start()
    return scorer
