"""`dry_run=true`: everything that would run, read by a person; nothing starts, nothing stays on disk."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import rlbatch.prepare
import rlbatch.submit
from rlbatch.api import ConfigError, EngineShape
from rlbatch.config.compose import compose
from rlbatch.launch.starters import mpirun
from rlbatch.plan.engine_memory import memory_inputs
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.nodes import Placement
from rlbatch.registry import compose_job, load_plugins
from tests.large_models import CONFIGS, write_model
from tests.megatron.real_models import CONFIGS as PUBLISHED

REGISTRY = load_plugins()
ENGINE = "rollout.engine.python=/shared/vllm/bin/python"
LARGE = """\
Dry run: nothing is submitted, started or written.

Job         rlbatch-qwen3_235b, launcher=slurm, cluster h20x32
Model       {tmp}/model, 235.1 billion parameters, bf16
Prompts     {tmp}/train.jsonl
Run folder  {tmp}/mine (new)
Ranks       32 = 4 nodes x 8 H20 (95 GiB a GPU, 2000 GiB host memory a node)
Notice      USR2 960 s before the time limit: the job saves 3291 GB (1e9 bytes) at cluster.storage_gbs=5 GB/s, is queued again, goes on

Layout      attention and dense layers: tp 4 x cp 1 x dp 1 x pp 8
            experts: etp 1 x ep 4 x edp 1 x pp 8
            recompute full, offload cpu_adam fraction=1.0 optimizer_state=false weights=false pin_memory=true
            tokens to experts: gather (layout.dispatcher=auto: 4 ranks share them, fewer than the 8 experts of a token)
Stages      0: 11 layers on ranks 0-3 of node 0
            1: 12 layers on ranks 4-7 of node 0
            2: 12 layers on ranks 8-11 of node 1
            3: 12 layers on ranks 12-15 of node 1
            4: 12 layers on ranks 16-19 of node 2
            5: 12 layers on ranks 20-23 of node 2
            6: 12 layers on ranks 24-27 of node 3
            7: 11 layers on ranks 28-31 of node 3

Engines     2 of vllm, each on 16 ranks as 2 data-parallel replicas of 8, 0.7 of a GPU's memory
At least    of 2000 GiB a node: load 254.6, start 254.6, sync 922.3 (optimizer 890.3, processes 32.0), \
generate 922.3, log-probs 922.3, update 922.3, save 922.3
Interpreter /shared/vllm/bin/python: not on this machine; its vllm and options are looked at on the nodes only

Hosts       4 nodes, chosen by Slurm
Slurm       cluster.partition=rl, cluster.time_limit=1-00:00:00, the site's defaults for cluster.account, cluster.qos
Command     sbatch <the script below>, submitted by submitit; its task is rlbatch.run of the run folder
Environment that of the shell which submits, and the script's exports

#!/bin/bash
#SBATCH --job-name=rlbatch-qwen3_235b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=rl
#SBATCH --time=1-00:00:00
#SBATCH --signal=USR2@960
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={tmp}/mine/logs/job.log

export OMP_NUM_THREADS=16
export PYTHONUNBUFFERED=1
export SUBMITIT_EXECUTOR=slurm
export SUBMITIT_LOG_LEVEL=CRITICAL

touch {tmp}/mine/unfinished # until rank 0 has come to an end that it means
srun --export=ALL --kill-on-bad-exit=1 --wait=30 --cpu-bind=none --gpu-bind=none \\
    {python} -u -m submitit.core._submit {tmp}/mine/submitit && code=0 || code=$?
case $code in 0 | 143) [ ! -e {tmp}/mine/unfinished ] || code=1 ;; esac
case $code in 0) exit ;; 2 | 75 | 129 | 130 | 138 | 140 | 143) [ -e {tmp}/mine/first_error.json ] || exit $code ;; esac
[ -e {tmp}/mine/first_error.json ] || echo "No rank said why: srun names the task above, or all ended with 0." >&2
exit 1 # srun's code is the highest of all ranks: 137 if one was killed. See docs/use/troubleshooting.md#exit-codes

Config (config.yaml; all other keys have the defaults of --help)
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder on a machine with neither Slurm nor MPI nor GPUs."""
    for name in ("MODEL_DIR", "TRAIN_DATA", "EVAL_DATA", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(rlbatch.prepare, "visible_gpus", lambda: 0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.chdir(tmp_path)


def dry_run(*overrides: str, code: int = 0) -> None:
    before = sorted(Path().rglob("*"))
    assert rlbatch.submit.main([*overrides, "dry_run=true"]) == code
    assert sorted(Path().rglob("*")) == before


def test_large_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Resources, mesh, script and config of a job for Slurm, compared whole, on a machine without Slurm."""
    monkeypatch.setenv("MODEL_DIR", str(write_model("qwen3_235b", tmp_path / "model")))
    monkeypatch.setenv("TRAIN_DATA", str(tmp_path / "train.jsonl"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "label": "1"}\n' * 32)
    dry_run("+cluster=h20x32", "cluster.partition=rl", "cluster.time_limit=1-00:00:00", "run_dir=mine", "cluster.gpu_memory_gib=0", ENGINE)
    said = capsys.readouterr()
    text = LARGE.format(tmp=tmp_path, python=sys.executable).replace(" (95 GiB a GPU, ", " (")
    out = re.sub(r"^Plan .*\n {12}a step in .*\n", "", said.out, flags=re.MULTILINE)  # of tests/plan
    assert out != said.out
    assert out.startswith(text)
    keys = out.removeprefix(text)
    for words in ("layout.first_stage_layers=11\n", "train.precision=bf16\n", "offload.options={fraction:1.0,", "cluster.partition=rl\n"):
        assert f"    {words}" in keys
    assert "plan.calibrations" not in keys  # a default that is a path counts as one, though it is absolute now
    assert "dry_run" not in keys
    assert said.err == ""


def test_cluster_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """`+cluster=h20x96 dry_run=true` shows the job even where model and data are not, says what is missing, and ends with 2."""
    dry_run("+cluster=h20x96", code=2)
    said = capsys.readouterr()
    for words in (
        "#SBATCH --nodes=12\n",
        "Model       $MODEL_DIR, 671 billion parameters, bf16\n",
        "tp 8 x cp 1 x dp 1 x pp 12\n",
        "Engines     3 of vllm, each on 32 ",
        "Memory      of 95 GiB a GPU: engine 66.5 (weights at least 19.5; its cache is unknown until model.hf is there), trainer 13.0 "
        "while it generates, free 15.5\n",
        "Interpreter rlbatch's own (rollout.engine.python is not set): looked at on the nodes. Warning, this machine's would be refused: "
        f"rollout=vllm: {sys.executable} has no vLLM. ",
    ):
        assert words in said.out
    assert "#SBATCH --signal=USR2@1320\n" in said.out
    assert "            11: ranks 88-95 of node 11\n" in said.out
    refused = said.err.strip().splitlines()
    assert refused[0] == "This would be refused:"
    assert refused[1].startswith("  model.hf=$MODEL_DIR: the environment variable MODEL_DIR is not set. Set it, or give model.hf=<path>.")
    assert refused[2].startswith("  data.train=$TRAIN_DATA: the environment variable TRAIN_DATA is not set.")
    assert len(refused) == 3


def test_memory_of_an_accepted_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a refusal would count is shown of a plan that fits, beside what is left; a config.json is enough."""
    set_model("deepseek671b", tmp_path, monkeypatch)
    dry_run("+cluster=h100x128", "train.max_tokens_per_gpu=auto")
    out = capsys.readouterr().out
    (tokens,) = re.findall(r"^ +packs of (\d+) tokens a GPU \(train.max_tokens_per_gpu=auto: fits 79 GiB a GPU\)$", out, re.MULTILINE)
    assert f"    train.max_tokens_per_gpu={tokens}\n" in out
    assert "At least    of 79 GiB a GPU: load 45.9 (gradients 23.6, weights 11.8, " in out
    assert (
        "Memory      of 79 GiB a GPU: engine 55.3 (weights 11.9, cache of one longest sample 2.3), trainer 11.8 while it generates, "
        "free 11.9\n"
    ) in out


def test_memory_of_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Only what model.parameters says is counted, and what is unknown is called so."""
    dry_run("+cluster=h20x96", "rollout.options.gpus_per_engine=8", "rollout.engine.data_parallel_size=1", code=2)
    assert (
        "rollout=vllm: an engine needs 78.1 GiB for weights on each of its 8 GPUs, and has 66.5 of 95 GiB (cluster.gpu_memory_gib), "
        "where the trainer keeps 13.0. Its cache is unknown until model.hf is there. Use rollout=vllm "
    ) in capsys.readouterr().err


@pytest.mark.parametrize("container", ["none", "pyxis"])
def test_an_engine_that_is_here(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A login node that has the interpreter of the nodes' engines says what is wrong with it, also when the job is really submitted;
    not if ranks are in a container, which has its own.
    """
    set_model("deepseek671b", tmp_path, monkeypatch)
    job = ["+cluster=h20x96", f"rollout.engine.python={sys.executable}"]
    if container == "pyxis":
        job += ["cluster.container=pyxis", "cluster.container_image=x", f"cluster.container_mounts=['{tmp_path}:{tmp_path}']"]
    monkeypatch.setattr(shutil, "which", lambda name: name)  # sbatch, too
    message = f"rollout=vllm: {sys.executable} has no vLLM. Install vllm"
    dry_run(*job, code=0 if container == "pyxis" else 2)
    said = capsys.readouterr()
    assert (message in said.err) == (container == "none")
    assert (
        f"Interpreter {sys.executable}: {'its vllm and options were looked at here' if container == 'none' else 'in the container;'}"
        in said.out
    )
    if container == "none":
        assert rlbatch.submit.main(job) == 2
        assert capsys.readouterr().err.startswith(message)


def test_an_engine_that_each_node_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A name without a path may be another program on a login node: what that lacks refuses nothing."""
    set_model("deepseek671b", tmp_path, monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    dry_run("+cluster=h20x96", "rollout.engine.python=python3", code=0)
    assert (
        "Interpreter python3: as each node's PATH finds it; its vllm and options are looked at on the nodes only" in capsys.readouterr().out
    )


def test_embedded_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The local launcher: command, environment and mesh, with the model that would be generated."""
    dry_run("+cluster=local")
    out = capsys.readouterr().out
    assert "Job         rlbatch-run, launcher=local, cluster local\n" in out
    assert "Ranks       2 = 1 node x 2 (CPU)\n" in out
    assert "Stages      0: 2 layers on ranks 0-1 of node 0\n" in out
    assert "-m rlbatch.run --run-dir " in out
    assert "    OMP_NUM_THREADS=1\n" in out


def test_an_evaluation_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What it evaluates, and nothing of training."""
    sets = ("eval.sets.a.file=embedded", "eval.sets.a.n=4")
    dry_run("mode=eval", *sets)
    assert "Prompts     held-out embedded, a embedded x 4\n" in capsys.readouterr().out
    dry_run(*sets, "data.eval=")
    assert "Prompts     embedded; held-out a embedded x 4\n" in capsys.readouterr().out


def test_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts with their ranks, the hostfile that would be written, the command and the environment."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    (programs / "mpirun").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:/bin")
    (tmp_path / "hosts").write_text("n1:2\nn2 slots=2\nn3 slots=4\n")
    dry_run("+cluster=local", "launcher=mpi", "cluster.hostfile=hosts", "layout.world_size=6", "run_dir=mine")
    out = capsys.readouterr().out
    assert "Launcher    Open MPI 5\n" in out
    assert "Hosts       n1, n2, n3: ranks 0-5, 2 on each\n" in out
    assert f"Hostfile    {tmp_path}/mine/hostfile\n    n1 slots=2\n    n2 slots=2\n    n3 slots=2\n" in out
    assert f"Command     mpirun -np 6 --hostfile {tmp_path}/mine/hostfile --map-by slot --bind-to none" in out
    assert "    PYTHONUNBUFFERED=1\n" in out


def test_mpi_without_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an mpirun, Open MPI's command is shown, and that it is assumed."""
    monkeypatch.setattr(mpirun.shutil, "which", lambda name: None)
    dry_run("+cluster=local", "launcher=mpi")
    assert "Launcher    Open MPI 5, assumed because there is no mpirun here\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.ep_size=3"], "layout.ep_size=3: must divide num_experts (4)"),
        (["launcher=slurm", "layout.world_size=3"], "layout.world_size=3: must be a multiple of cluster.gpus_per_node (2)"),
        (["launcher=slurm", "cluster.time_limit=soon"], "cluster.time_limit=soon: must be a time"),
        (["run_dir=."], "run_dir={here}: must be new or empty"),
        (["launcher=mpi", "cluster.hostfile=absent"], "cluster.hostfile={here}/absent: cannot be read"),
    ],
)
def test_what_would_be_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: list[str], message: str) -> None:
    """A job that would be refused is shown as far as it goes, with the reason; the exit code says so."""
    (tmp_path / "file").touch()
    dry_run("+cluster=local", *overrides, code=2)
    assert f"\n  {message.replace('{here}', str(tmp_path))}" in capsys.readouterr().err


def test_one_reason_hides_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """A time limit that is too short leaves out the script, whose notice cannot be computed; nodes, hosts and settings are shown."""
    dry_run("+cluster=local", "launcher=slurm", "layout.world_size=4", "cluster.time_limit=00:01:00", code=2)
    said = capsys.readouterr()
    for line in (
        "Ranks       4 = 2 nodes x 2 (CPU)\n",
        "Hosts       2 nodes, chosen by Slurm\n",
        "Slurm       cluster.time_limit=00:01:00, ",
    ):
        assert line in said.out
    assert "  cluster.time_limit=00:01:00: must be longer than " in said.err


def set_model(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MODEL_DIR and TRAIN_DATA, as far as submit looks at them."""
    monkeypatch.setenv("MODEL_DIR", str(write_model(name, folder / "model")))
    monkeypatch.setenv("TRAIN_DATA", str(folder / "train.jsonl"))
    (folder / "train.jsonl").write_text('{"prompt": "a", "label": "1"}\n' * 512)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *(("deepseek671b", [f"+cluster={cluster}"]) for cluster in ("h20x96", "h20x128", "h20x256", "h20x512", "h100x128")),
        ("deepseek671b", ["+cluster=h100x128", "model=deepseek671b"]),
        *(("qwen3_235b", [f"+cluster={cluster}", "model=qwen3_235b"]) for cluster in ("h20x32", "h20x64", "h20x128", "h20x256")),
        *(("qwen3_30b", [f"+cluster={cluster}", "model=qwen3_30b"]) for cluster in ("h20x8", "h20x16", "h20x32", "h100x8")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_recipes(
    name: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every shipped layout: its engines have a place on nodes, and room on GPUs beside the trainer."""
    set_model(name, tmp_path, monkeypatch)
    dry_run(*overrides)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout=transformers"],
            "rollout=transformers: an engine needs 1249.9 GiB for weights and 0.5 GiB to cache one sample on each of its 1 GPUs, and has "
            "78.5 of 95 GiB (cluster.gpu_memory_gib), where the trainer keeps 16.5. Use rollout=vllm rollout.options.gpus_per_engine=24 "
            "rollout.engine.data_parallel_size=3 rollout.engine.enable_expert_parallel=true.",
        ),
        (
            ["rollout.options.gpus_per_engine=8", "rollout.engine.data_parallel_size=1"],
            "rollout=vllm: an engine needs 78.3 GiB for weights and 0.7 GiB to cache one sample on each of its 8 GPUs, and has 66.5 of "
            "95 GiB (cluster.gpu_memory_gib), where the trainer keeps 16.5. Use rollout=vllm rollout.options.gpus_per_engine=16 "
            "rollout.engine.data_parallel_size=2 rollout.engine.enable_expert_parallel=true.",
        ),
        (
            ["rollout.engine.gpu_memory_utilization=0.9"],
            "rollout.engine.gpu_memory_utilization=0.9: the engine takes 85.5 of a GPU's 95 GiB (cluster.gpu_memory_gib), and the trainer "
            "keeps 16.5 there. Use 0.8 or less, or keep more of the trainer on the host.",
        ),
        (
            ["rollout.options.gpus_per_engine=16", "rollout.engine.data_parallel_size=1"],
            "rollout.options.gpus_per_engine=16: makes 1 data-parallel replicas of 16 GPUs, which must each be on a node of 8. "
            "Use rollout.engine.data_parallel_size=2, or a multiple of it.",
        ),
        (
            ["rollout.options.gpus_per_engine=12"],
            "rollout.options.gpus_per_engine=12: must divide the ranks of a node (8) or be a multiple of them. "
            "Use 1 or 2 or 4 or 8 or 16 or 24 or 32 or 48 or 96.",
        ),
        (
            ["rollout.max_response_tokens=32768"],
            "rollout.engine.max_model_len=10240: must hold a prompt of 2048 tokens (data.max_prompt_tokens) and a response of 32768 "
            "(rollout.max_response_tokens). Use 34816 or more.",
        ),
        (
            ["rollout.engine.data_parallel_address=n1"],
            "rollout.engine.data_parallel_address=n1: rollout.options.gpus_per_engine decides it. ",
        ),
    ],
    ids=["a rank", "a node", "share", "replica", "nodes", "context", "decided"],
)
def test_engines_without_a_place(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V3 on 12 nodes: what an engine needs and has, in numbers, and what would do."""
    set_model("deepseek671b", tmp_path, monkeypatch)
    assert rlbatch.submit.main(["+cluster=h20x96", *overrides, "dry_run=true"]) == 2
    assert capsys.readouterr().err.removeprefix("\nThis would be refused:\n").lstrip().startswith(message)


def test_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that shares no GPU with the trainer may take all of its memory."""
    set_model("deepseek671b", tmp_path, monkeypatch)
    config, registry = compose_job(["+cluster=h20x96"])
    family = registry.resolve_model_family(CONFIGS["deepseek671b"])
    for is_colocated in (False, True):
        shape = EngineShape(8, 2, 0.9, separate_gpus=0 if is_colocated else 8)
        plan = EnginePlan(config, registry, 16, shape, Placement(12, 8))
        job = replace(memory_inputs(config, registry, family, on_gpu=True), shape=shape, gpus=16)
        with pytest.raises(ConfigError, match=r"takes 85\.5 of a GPU.s 95 GiB .* trainer keeps 16\.5") if is_colocated else nullcontext():
            plan.check_memory(job)


def test_an_engine_on_several_nodes_divides_experts(tmp_path: Path) -> None:
    """A model without experts cannot have one."""
    job = ["+cluster=h20x16", "model.hf=x", "data.train=x", "rollout.options.gpus_per_engine=16"]
    plan = EnginePlan(compose(job), REGISTRY, 16, EngineShape(8, 2), Placement(2, 8))
    plan.check_nodes()
    with pytest.raises(
        ConfigError, match=r"gpus_per_engine=16: an engine over several nodes divides experts, and model\.hf has none\. Use 8"
    ):
        plan.check_experts(REGISTRY.resolve_model_family(PUBLISHED["Qwen3-8B"]))
    with pytest.raises(ConfigError, match=r"must divide the ranks of a node \(8\): rollout=sglang has no engines over several nodes"):
        EnginePlan(compose([*job, "rollout=sglang"]), REGISTRY, 16, EngineShape(8, 2), Placement(2, 8)).check_nodes()


def test_hosts_that_take_differently_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hostfile says where ranks go, not cluster.gpus_per_node: nothing is refused or said of nodes that does not hold."""
    (tmp_path / "hosts").write_text("n1:1\nn2 slots=2\n")
    layout = ("layout.world_size=3", "layout.ep_size=1", "train.prompts_per_step=6", "train.updates_per_step=1")
    dry_run("+cluster=local", "launcher=mpi", "cluster.hostfile=hosts", *layout)
    out = capsys.readouterr().out
    assert "Ranks       3 on the hosts below (CPU)\n" in out
    assert "Stages      0: 2 layers on ranks 0-2\n" in out
    assert "Hosts       n1: rank 0, 1 on each\nHosts       n2: ranks 1-2, 2 on each\n" in out
