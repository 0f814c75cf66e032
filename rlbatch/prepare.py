"""Checks everything that can be checked before ranks start. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rlbatch.api import ConfigError, DataError, ModelFamily, RlbatchError
from rlbatch.checkpoint.hf_index import read_headers
from rlbatch.checkpoint.model_files import model_files
from rlbatch.checkpoint.newest import check_unused, newest
from rlbatch.checkpoint.run_folder import check_places, checkpoint_root
from rlbatch.config.compose import CONFIG_FILE, load_config, save_config
from rlbatch.config.evaluation import longest_response, needs_reward
from rlbatch.config.hf_config import read_config
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.paths import check_variable, paths_of
from rlbatch.config.schema import Config
from rlbatch.job_parts import (
    check_engines,
    job_memory_inputs,
    known_family,
    model_family,
    model_folder,
    node_ranks,
    on_gpu,
    write_embedded,
)
from rlbatch.launch.ranks.interfaces import addresses_of
from rlbatch.launch.ranks.rank_info import check_trainer, visible_gpus
from rlbatch.launch.records.ownership import read_run_id
from rlbatch.launch.starters.container import RUN_FOLDER, check_container
from rlbatch.pipeline.checkpoint_match import check_first_weights, check_resumed
from rlbatch.plan.engine_precision import check_device, engine_quantization
from rlbatch.plan.fit import check_fit
from rlbatch.plan.layout import check_expert_widths, check_layout, check_routing_replay
from rlbatch.plan.packs import check_packs, packs_chosen
from rlbatch.prompts.model_folder import check_model_folder
from rlbatch.prompts.prompt_sets import PromptSet, held_out_sets, training_sets
from rlbatch.registry import Registry
from rlbatch.run_dir import check_run_dir, run_dir_path, taken_run_dir

RANKS_PER_CORE = 8
"""Most ranks a core on a machine without GPUs."""


@contextmanager
def prepared_run(config: Config, registry: Registry) -> Iterator[tuple[Config, Path]]:
    """Makes the run folder and checks the model, layout and prompts. What was made is removed again if a check, or what starts the job in
    this context, is refused.

    Yields:
        The config with its ``run_dir``, and the run folder: config.yaml and, for the embedded run, ``embedded/``.

    Raises:
        RlbatchError: what was refused.
    """
    with taken_run_dir(config) as run_dir:
        config = dataclasses.replace(config, run_dir=str(run_dir))
        write_embedded(config, run_dir)
        check_all(config, registry, run_dir)
        config, _ = packs_chosen(config, job_memory_inputs(config, registry, known_family(config, registry, run_dir)))
        save_config(config, run_dir / CONFIG_FILE)
        yield config, run_dir


def find_problems(config: Config, registry: Registry) -> tuple[list[RlbatchError], Path, ModelFamily | None]:
    """What ``prepared_run`` would refuse, without leaving anything on disk; with the run folder that would be made, and the model's family
    if it is known.
    """
    problems: list[RlbatchError] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            check_run_dir(run_dir_path(config), config)
        except RlbatchError as error:
            problems.append(error)
        write_embedded(config, Path(scratch))
        for check in CHECKS:
            try:
                check(config, registry, Path(scratch))
            except RlbatchError as error:
                problems += [error] if str(error) not in map(str, problems) else []
        family = known_family(config, registry, Path(scratch))
    return problems, run_dir_path(config).resolve(), family


def check_all(config: Config, registry: Registry, run_dir: Path) -> None:
    """Every check, in the order in which a user would correct things."""
    for check in CHECKS:
        check(config, registry, run_dir)


def _check_model(config: Config, registry: Registry, run_dir: Path) -> None:
    registry.check_hardware(config, on_gpu=on_gpu(config))
    folder = model_folder(config, run_dir)
    family = model_family(config, registry, run_dir)
    model_files(folder)
    check_model_folder(folder, read_config(folder), family.vocab_size)
    check_expert_widths(family, config.train.precision, on_gpu=on_gpu(config))
    check_layout(config.layout, family, on_gpu=on_gpu(config))
    check_routing_replay(config.algorithm.routing_replay, family)
    check_device(config, engine_quantization(config, registry, family, read_config(folder)), on_gpu=on_gpu(config))
    most, key = longest_response(config)
    if most >= family.max_sequence_length:
        raise ConfigError(
            f"{key}={most}: must leave room for a prompt in the model's context ({family.max_sequence_length} tokens). Use less."
        )
    checkpoint = config.checkpoint
    is_elsewhere = checkpoint.ref_load or (checkpoint.load and not registry.needs_reference(config.algorithm))
    if config.model.hf == EMBEDDED or is_elsewhere:
        return
    if not list(folder.glob("*.safetensors")):
        fix = "set checkpoint.ref_load" if checkpoint.load else "set checkpoint.load or checkpoint.ref_load"
        raise DataError(f"model.hf={folder}: has no *.safetensors. Download the weights, or {fix}.")
    read_headers(folder)


def names_engine_here(config: Config) -> bool:
    """Whether ``rollout.engine.python`` is a program of this machine, the same one that ranks elsewhere start: not in a container, and not
    one that each machine finds by a ``PATH`` of its own.
    """
    named = str(config.rollout.engine.get("python", ""))
    return os.sep in named and config.cluster.container == "none" and shutil.which(named) is not None


def _check_rollout(config: Config, registry: Registry, run_dir: Path) -> None:
    check_engines(config, registry, known_family(config, registry, run_dir))


def _check_memory(config: Config, registry: Registry, run_dir: Path) -> None:
    """Checks the memory of GPUs and nodes, in every phase."""
    if not config.plan.enforce:
        return
    job = job_memory_inputs(config, registry, known_family(config, registry, run_dir))
    if job is not None:
        check_fit(job, registry, partial(node_ranks, registry))
        check_packs(job)


def _check_paths(config: Config, registry: Registry, run_dir: Path) -> None:
    """Checks the paths that no other check reads."""
    for key, path, _ in paths_of(config):
        if key not in ("model.hf", "data.train", "data.eval") and not key.startswith("eval.sets."):
            check_variable(key, path)
    for key, path in (("checkpoint.load", config.checkpoint.load), ("checkpoint.ref_load", config.checkpoint.ref_load)):
        if path and not Path(path).is_dir():
            raise ConfigError(f"{key}={path}: there is no such folder. Correct the path.")
    if (family := known_family(config, registry, run_dir)) is not None:
        needs_reference = registry.needs_reference(config.algorithm)
        check_first_weights(config, registry, family, model_folder(config, run_dir), needs_reference=needs_reference)
    if config.mode == "eval":
        return
    folder = run_dir_path(config)
    root = checkpoint_root(config.checkpoint.save, folder)
    if config.resume != "auto":
        check_unused(root)
    elif found := newest(root):
        hf_config = None
        with suppress(RlbatchError):  # told by another check
            hf_config = read_config(model_folder(config, run_dir))
        if hf_config is not None:
            check_resumed(config, hf_config, *found)
        if config.checkpoint.save_interval >= 0:
            check_places(root, read_run_id(folder), range(int(found[1]["step"]) + 1, config.train.steps + 1))
    else:
        _check_moved(root, folder)


def _check_moved(root: Path, run_dir: Path) -> None:
    """Refuses another checkpoint folder for a run that has checkpoints: without them it would start anew."""
    before = found = None
    with suppress(RlbatchError):  # this folder's first run
        before = checkpoint_root(load_config(run_dir / CONFIG_FILE).checkpoint.save, run_dir)
        found = newest(before)
    if found:
        raise ConfigError(
            f"checkpoint.save={root}: has no checkpoint, and this run's are in {before} (newest: {found[0].name}). "
            "Use that folder, or move its checkpoints; a new run takes another run_dir."
        )


def _check_builds(config: Config, registry: Registry, run_dir: Path) -> None:
    """Refuses options that a plugin itself refuses."""
    registry.check_builds(config)


def _check_container(config: Config, registry: Registry, run_dir: Path) -> None:
    """Checks that the launcher can start the container, and that it sees all that ranks read and write."""
    kind, launcher = config.cluster.container, config.launcher
    if (kind, launcher) in (("pyxis", "local"), ("pyxis", "mpi"), ("apptainer", "local")):
        fix = "launcher=slurm or none" if kind == "pyxis" else "launcher=slurm, mpi or none"
        raise ConfigError(f"cluster.container={kind}: launcher={launcher} does not start it. Use {fix}, or cluster.container=none.")
    check_container(config.cluster, [(RUN_FOLDER, str(run_dir_path(config).resolve())), *registry.paths_for_ranks(config)])


def _check_machine(config: Config, registry: Registry, run_dir: Path) -> None:
    """Checks what this machine has, if the ranks start on it."""
    ranks = config.layout.world_size
    here = config.launcher == "local" or (config.launcher == "mpi" and not config.cluster.hostfile)
    if here and config.cluster.interface:
        addresses_of(config.cluster.interface)
    if config.launcher != "local":
        if names_engine_here(config):
            registry.check_engine(config)
        return
    check_trainer("launcher=local")
    gpus = visible_gpus()
    if 0 < gpus < ranks:
        raise ConfigError(
            f"layout.world_size={ranks}: must be at most the GPUs of this machine ({gpus}), one a rank. "
            f"Use layout.world_size={gpus} with sizes that fit, or set CUDA_VISIBLE_DEVICES= to run on the CPU."
        )
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
    if not gpus and ranks > most:
        raise ConfigError(f"layout.world_size={ranks}: must be at most {most} without GPUs, {RANKS_PER_CORE} ranks a core. Use less.")
    registry.check_engine(config)
    _check_trackers(config, registry)


def _check_trackers(config: Config, registry: Registry) -> None:
    for tracker in registry.chosen_trackers(config):
        if (module := tracker.spec.module) and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"trackers=[{','.join(config.trackers)}]: {tracker.name} needs the package {module}, which is not installed for "
                f"{sys.executable}. Install it (pip install {module}), or leave {tracker.name} out."
            )


def _family_with_tokenizer(config: Config, registry: Registry, run_dir: Path) -> ModelFamily | None:
    """The model's family, if a tokenizer may be made of the folder's files; what is wrong with these another check tells."""
    with suppress(RlbatchError):
        family, folder = model_family(config, registry, run_dir), model_folder(config, run_dir)
        model_files(folder)
        check_model_folder(folder, read_config(folder), family.vocab_size)
        return family
    return None


def _check_prompts(config: Config, registry: Registry, run_dir: Path) -> None:
    from rlbatch.prompts.prompt_check import check_count, check_rows, check_tokens

    trained = training_sets(config, run_dir) if config.mode == "train" else []
    for one in trained:
        _check_paths_of(one)  # before what is wrong with the reward
    if not config.reward.name and needs_reward(config):
        known = ", ".join(sorted(registry.rewards))
        raise ConfigError(f"reward=: must be named for a model of your own. Known: {known}; others with plugins=[<file>.py] reward=<name>.")
    family = _family_with_tokenizer(config, registry, run_dir)
    counted = []
    for one, own in [*((one, config) for one in trained), *held_out_sets(config, run_dir)]:
        _check_paths_of(one)
        if one.source == EMBEDDED and config.model.hf != EMBEDDED:
            raise ConfigError(f"{one.key}={EMBEDDED}: its prompts are for model.hf={EMBEDDED}. Give {one.key}=<file>.")
        rows = check_rows(own, registry, one)
        counted += [rows] if one in trained else []
        if trained and len(counted) == len(trained):
            check_count(config, trained, counted)
        if family is not None and (one.source, config.model.hf) != (EMBEDDED, EMBEDDED):
            check_tokens(own, family, model_folder(config, run_dir), one, rows)


def _check_paths_of(one: PromptSet) -> None:
    for path in one.paths:
        check_variable(one.key, str(path))


CHECKS = (_check_model, _check_rollout, _check_memory, _check_builds, _check_paths, _check_container, _check_prompts, _check_machine)
PLACE_CHECKS = (_check_container, _check_machine)
"""Checks of where ranks run, which have nothing to do with training."""
