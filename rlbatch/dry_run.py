"""``dry_run=true``: shows exactly what would run, and what would be refused; starts, submits and writes nothing."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import groupby
from pathlib import Path

from rlbatch.api import ModelFamily, RlbatchError
from rlbatch.api.exit_codes import DONE, REFUSED
from rlbatch.config.evaluation import SIMPLE, eval_sets
from rlbatch.config.paths import with_absolute_paths
from rlbatch.config.schema import Config
from rlbatch.config.structured import NAME, key_docs, show_value, to_plain
from rlbatch.job_parts import engine_plan, job_memory_inputs, mpi_hosts, node_ranks, on_gpu, parameter_count, placement
from rlbatch.launch.shutdown.grace_period import notice_s
from rlbatch.launch.starters.container import cluster_variables
from rlbatch.launch.starters.hostfile import Host
from rlbatch.launch.starters.mpirun import Mpi, find_mpi, mpi_job, mpirun_variables
from rlbatch.launch.starters.sbatch import NOTICE_SIGNAL, job_name
from rlbatch.plan.checkpoint_size import checkpoint_bytes
from rlbatch.plan.engine_memory import MemoryInputs
from rlbatch.plan.job_plan import plan_job
from rlbatch.plan.layout import degrees, dispatcher_words
from rlbatch.plan.memory import PHASES, Peak, memory_floor
from rlbatch.plan.nodes import place_ranks, stages
from rlbatch.plan.packs import packs_chosen
from rlbatch.plan.report import summary
from rlbatch.prepare import find_problems, names_engine_here
from rlbatch.registry import Registry
from rlbatch.start import rank_command, slurm_script

MOST_STAGES = 64


def show(config: Config, registry: Registry) -> int:
    """Prints what would run; returns 0, or 2 if the job would be refused: the reasons are on stderr."""
    problems, run_dir, family = find_problems(config, registry)
    parameters = parameter_count(config, family)
    chosen = ""
    with suppress(RlbatchError):  # told where engines are shown
        config, chosen = packs_chosen(config, job_memory_inputs(config, registry, family))
    sections = (
        _summary(config, registry, run_dir, parameters),
        _mesh(config, registry, family, chosen),
        _engines(config, registry, family),
        _launch(config, registry, run_dir, parameters),
        _keys(config),
    )
    print("Dry run: nothing is submitted, started or written.")
    for section in sections:
        separator = "\n"
        try:
            for line in section:
                print(separator + line)
                separator = ""
        except RlbatchError as error:
            problems += [error] if str(error) not in map(str, problems) else []
    if problems:
        sys.stdout.flush()
        print("\nThis would be refused:", *(f"  {error}" for error in problems), sep="\n", file=sys.stderr)
    return REFUSED if problems else DONE


def _summary(config: Config, registry: Registry, run_dir: Path, parameters: float) -> Iterator[str]:
    cluster, where = config.cluster, placement(config, registry)
    yield f"Job         {job_name(config)}, launcher={config.launcher}{f', cluster {cluster.name}' if cluster.name else ''}"
    size = f", {parameters / 1e9:.4g} billion parameters" if parameters else ""
    yield f"Model       {config.model.hf}{size}, {config.train.precision}"
    trained = ", ".join(f"{name} {show_value(one.path)}" for name, one in config.data.sets.items()) or show_value(config.data.train)
    files = ((name, each.n, show_value(each.file)) for name, each in eval_sets(config).items())
    held_out = ", ".join(file if name == SIMPLE else f"{name} {file} x {n}" for name, n, file in files)
    yield f"Prompts     {'; '.join(filter(None, (trained, held_out and f'held-out {held_out}')))}"
    yield f"Run folder  {run_dir} ({'goes on' if run_dir.exists() else 'new'})"
    spread = f" = {_nodes(where.nodes)} x {where.ranks_per_node}" if where else " on the hosts below"
    yield f"Ranks       {config.layout.world_size}{spread}{_hardware(config)}"
    if config.launcher in ("slurm", "none"):
        seconds = notice_s(config, parameters, run_dir)
        saved = checkpoint_bytes(parameters, config.train.precision) / 1e9
        yield (
            f"Notice      {NOTICE_SIGNAL} {seconds} s before the time limit: the job saves {saved:.4g} GB (1e9 bytes) at "
            f"cluster.storage_gbs={cluster.storage_gbs:g} GB/s, is queued again, goes on"
        )


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _hardware(config: Config) -> str:
    cluster = config.cluster
    if not on_gpu(config):
        return " (CPU)"
    gpu = f" {cluster.gpu or 'GPUs'}"
    each = [f"{cluster.gpu_memory_gib:g} GiB a GPU"] if cluster.gpu_memory_gib else []
    each += [f"{cluster.host_memory_gib:g} GiB host memory a node"] if cluster.host_memory_gib else []
    return f"{gpu} ({', '.join(each)})" if each else gpu


def _mesh(config: Config, registry: Registry, family: ModelFamily | None, packs: str) -> Iterator[str]:
    """How ranks divide the model, and which stage is on which nodes; ``packs``: why packs have so many tokens."""
    layout, where = config.layout, placement(config, registry)
    dense, experts = layout.tp_size * layout.pp_size * layout.cp_size, layout.etp_size * layout.ep_size * layout.pp_size
    yield (
        f"Layout      attention and dense layers: tp {layout.tp_size} x cp {layout.cp_size} x dp {layout.world_size / dense:g} "
        f"x pp {layout.pp_size}"
    )
    yield f"            experts: etp {layout.etp_size} x ep {layout.ep_size} x edp {layout.world_size / experts:g} x pp {layout.pp_size}"
    offload = "".join(f" {name}={show_value(value)}" for name, value in config.offload.options.items())
    yield f"            recompute {layout.recompute_granularity or 'none'}, offload {config.offload.name}{offload}"
    if packs:
        yield f"            packs of {config.train.pack_tokens} tokens a GPU (train.max_tokens_per_gpu=auto: {packs})"
    if family and family.num_experts and layout.dispatcher == "auto":
        yield f"            tokens to experts: {dispatcher_words(layout, family)}"
    if family is None:
        yield f"Stages      {layout.pp_size}; their layers are unknown until model.hf is there"
    if layout.vpp_size > 1 or layout.pp_size > MOST_STAGES:
        return
    per_node = where.ranks_per_node if where else layout.world_size
    stage_layers = degrees(layout, family.num_layers).stage_layers if family else (0,) * layout.pp_size
    for number, stage in enumerate(stages(stage_layers, layout.world_size, per_node)):
        title, nodes = "Stages" if family and number == 0 else "", f" of {_span('node', stage.nodes)}" if where else ""
        yield f"{title:<12}{number}: {f'{stage.layers} layers on ' if family else ''}{_span('rank', stage.ranks)}{nodes}"


def _engines(config: Config, registry: Registry, family: ModelFamily | None) -> Iterator[str]:
    """How many ranks each engine serves, on whose GPUs it is, how it divides them and their memory, and whose interpreter runs it."""
    gpus, shape, rollout = registry.ranks_per_engine(config), registry.engine_shape(config), config.rollout
    divided = f" as {shape.replicas} data-parallel replicas of {shape.replica_gpus}" if shape.replicas > 1 else ""
    memory = "free memory" if shape.is_share_of_free else "memory"
    share = f", {shape.memory_share:g} of a GPU's {memory}" if shape.memory_share < 1 and on_gpu(config) else ""
    form = {"auto": "", "none": "", "fp8": ", fp8 weights"}[rollout.quantization]
    each = "one a rank" if gpus == 1 else f"each on {gpus} ranks{divided}"
    yield f"Engines     {config.layout.world_size // gpus} of {rollout.name}, {each}{share}{form}"
    if job := job_memory_inputs(config, registry, family):
        if config.cluster.gpu_memory_gib:
            yield f"Memory      {engine_plan(config, registry).memory_line(job)}"
        yield from _floor(job, registry)
        if job.model and job.on_gpu and (ranks := node_ranks(registry, config)):
            yield from summary(plan_job(job, ranks))
    if registry.rollout(config).has_engine:
        yield f"Interpreter {_interpreter(config, registry)}"


def _floor(job: MemoryInputs, registry: Registry) -> Iterator[str]:
    """The least memory of each phase, where it is said how much there is."""
    floor, nodes, cluster = memory_floor(job), node_ranks(registry, job.config), job.config.cluster
    title = "At least"
    if cluster.gpu_memory_gib and job.on_gpu:
        yield f"{title:<12}of {cluster.gpu_memory_gib:g} GiB a GPU: {_phases([floor.gpu(phases=[phase]) for phase in PHASES])}"
        title = ""
    if cluster.host_memory_gib and nodes:
        yield f"{title:<12}of {cluster.host_memory_gib:g} GiB a node: {_phases([floor.fullest_host(nodes, [phase]) for phase in PHASES])}"


def _phases(peaks: Sequence[Peak]) -> str:
    """The memory of each phase in words, and the parts of the largest."""
    largest = max(peaks, key=lambda peak: peak.gib)
    return ", ".join(f"{peak.phase} {peak.gib:.1f}{f' ({peak.parts_listed()})' if peak is largest else ''}" for peak in peaks)


def _interpreter(config: Config, registry: Registry) -> str:
    """Which Python runs the engine, and where it is asked what it has: what is wrong on a login node may be right on the nodes."""
    named = str(config.rollout.engine.get("python", ""))
    python = named or "rlbatch's own (rollout.engine.python is not set)"
    if config.launcher != "local" and not names_engine_here(config):
        in_container = config.cluster.container != "none"
        if named or in_container:
            where = "in the container" if in_container else "not on this machine" if os.sep in named else "as each node's PATH finds it"
            return f"{python}: {where}; its {config.rollout.name} and options are looked at on the nodes only"
        try:
            registry.check_engine(config)
        except RlbatchError as error:
            return f"{python}: looked at on the nodes. Warning, this machine's would be refused: {error}"
    return f"{python}: its {config.rollout.name} and options were looked at here, and are on each node"


def _span(word: str, numbers: range) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {numbers[0]}-{numbers[-1]}"


def _launch(config: Config, registry: Registry, run_dir: Path, parameters: float) -> Iterator[str]:
    if config.launcher == "slurm":
        yield f"Hosts       {_nodes(place_ranks(config, registry).nodes)}, chosen by Slurm"
        yield f"Slurm       {_slurm_settings(config)}"
        yield "Command     sbatch <the script below>, submitted by submitit; its task is rlbatch.run of the run folder"
        yield "Environment that of the shell which submits, and the script's exports"
        yield ""
        yield from slurm_script(config, registry, run_dir, parameters).rstrip().splitlines()
    elif config.launcher == "mpi":
        yield from _mpi(config, mpi_hosts(config, registry), run_dir)
    else:
        words = "srun or mpirun, by your own script" if config.launcher == "none" else "this machine"
        yield f"Hosts       {words}"
        yield f"Command     {shlex.join(rank_command(config, run_dir))}, once a rank"
        yield from _variables(cluster_variables(config.cluster))


def _slurm_settings(config: Config) -> str:
    names = ("partition", "account", "qos", "time_limit")
    given = [f"cluster.{name}={getattr(config.cluster, name)}" for name in names if getattr(config.cluster, name)]
    left = [f"cluster.{name}" for name in names if not getattr(config.cluster, name)]
    return ", ".join(given + ([f"the site's defaults for {', '.join(left)}"] if left else []))


def _mpi(config: Config, hosts: tuple[Host, ...], run_dir: Path) -> Iterator[str]:
    try:
        mpi, problem = find_mpi(), None
    except RlbatchError as error:
        mpi, problem = Mpi.OPEN_MPI_5, error
    job = mpi_job(config, hosts, run_dir, mpi, rank_command(config, run_dir))
    yield f"Launcher    {mpi.value}{', assumed because there is no mpirun here' if problem else ''}"
    first = 0
    for slots, group in groupby(job.hosts, key=lambda host: host.slots or 0):
        names = [host.name for host in group]
        yield f"Hosts       {', '.join(names)}: {_span('rank', range(first, first + slots * len(names)))}, {slots} on each"
        first += slots * len(names)
    if job.hostfile:
        yield f"Hostfile    {run_dir / 'hostfile'}"
        yield from (f"    {line}" for line in job.hostfile.splitlines())
    yield f"Command     {shlex.join(job.command)}"
    yield from _variables(mpirun_variables(config, mpi, job.hosts))


def _variables(variables: Mapping[str, str]) -> Iterator[str]:
    yield "Environment that of this shell, with"
    yield from (f"    {name}={shlex.quote(value)}" for name, value in variables.items())


def _keys(config: Config) -> Iterator[str]:
    """Keys that differ from the schema's defaults: what config.yaml would say beside them."""
    yield "Config (config.yaml; all other keys have the defaults of --help)"
    defaults = with_absolute_paths(Config())
    for key in (doc.name for doc in key_docs(Config) if NAME not in doc.name):
        value, default = (reduce(getattr, key.split("."), of) for of in (config, defaults))
        if value != default and key not in ("dry_run", "run_dir"):
            yield f"    {key}={show_value(to_plain(value))}"
