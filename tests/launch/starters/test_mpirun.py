"""Which mpirun it is, and the hostfile and command that it gets."""

from __future__ import annotations

import io
import os
import signal
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.machines import ClusterConfig
from rlbatch.config.schema import Config, LayoutConfig
from rlbatch.launch.records.failures import read_first_error
from rlbatch.launch.starters import mpirun
from rlbatch.launch.starters.hostfile import Host
from rlbatch.launch.starters.mpirun import Mpi, MpiJob, find_mpi, hostfile_text, mpi_job, mpirun_variables, read_hosts, recognise, run_mpi
from tests.launch.watched import wait_for

RUN_DIR = Path("/runs/mine")
COMMAND = ["python", "-m", "rlbatch.run", "--run-dir", "/runs/mine"]
HOSTS = "n01 slots=4\nn02:4\nn03 slot=8\n"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who is not root, with few variables."""
    for name in list(os.environ):
        if mpirun.is_forwarded(name) and name not in ("PATH", "PYTHONPATH"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(mpirun, "address_towards", lambda peer: "10.0.0.9")


def job(config: Config, mpi: Mpi) -> MpiJob:
    return mpi_job(config, read_hosts(config, 8), RUN_DIR, mpi, COMMAND)


def config(tmp_path: Path, ranks: int = 10, text: str = HOSTS, interface: str = "") -> Config:
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    return Config(layout=LayoutConfig(world_size=ranks), cluster=ClusterConfig(hostfile=str(path), interface=interface))


@pytest.mark.parametrize(
    ("version", "mpi"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n", Mpi.OPEN_MPI_4),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", Mpi.OPEN_MPI_5),
        ("HYDRA build details:\n    Version:                                 4.0.2\n    Release Date:   Thu Apr  7\n", Mpi.MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307 (id: d82b3071db)\nCopyright 2003-2023", Mpi.INTEL),
    ],
)
def test_recognised(version: str, mpi: Mpi) -> None:
    """Each launcher is known by what it prints for --version."""
    assert recognise(version) is mpi


def test_unknown_launcher() -> None:
    """Another mpirun is refused with its first line."""
    with pytest.raises(ConfigError, match=r"launcher=mpi: `mpirun --version` says `LAM 7\.1`, no launcher that is known"):
        recognise("LAM 7.1\nmore")


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without mpirun is told so, with dry_run as the way to look."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"launcher=mpi: there is no mpirun in PATH here\. .*dry_run=true"):
        find_mpi()


def test_ranks_fill_hosts_in_order(tmp_path: Path) -> None:
    """As many slots as ranks: whole hosts first, the last takes what is left, others none."""
    assert read_hosts(config(tmp_path), 8) == (Host("n01", 4), Host("n02", 4), Host("n03", 2))
    assert read_hosts(config(tmp_path, ranks=3), 8) == (Host("n01", 3),)
    assert read_hosts(config(tmp_path, ranks=16, text="a\nb\n"), 8) == (Host("a", 8), Host("b", 8))


def test_fewer_slots_than_ranks(tmp_path: Path) -> None:
    """Refused with both numbers, before MPICH would wrap around."""
    with pytest.raises(ConfigError, match=r"hosts\.txt: has 16 slots on 3 hosts, fewer than layout\.world_size \(17\), one rank a slot"):
        read_hosts(config(tmp_path, ranks=17), 8)


def test_bad_hostfiles(tmp_path: Path) -> None:
    """A line that is refused is named; a file that is not there, too."""
    with pytest.raises(ConfigError, match=r"hosts\.txt:2: "):
        read_hosts(config(tmp_path, text="n01 slots=4\nn02 slots=two\n"), 8)
    missing = Config(cluster=ClusterConfig(hostfile=str(tmp_path / "absent")))
    with pytest.raises(ConfigError, match=r"cluster\.hostfile=.*absent: cannot be read"):
        read_hosts(missing, 8)


def test_each_launchers_own_hostfile() -> None:
    """`slots=` for Open MPI, `name:ranks` for Hydra; neither comments nor anything else that one of them cannot read."""
    hosts = [Host("n01", 8), Host("n02", 2)]
    assert hostfile_text(Mpi.OPEN_MPI_4, hosts) == hostfile_text(Mpi.OPEN_MPI_5, hosts) == "n01 slots=8\nn02 slots=2\n"
    assert hostfile_text(Mpi.MPICH, hosts) == hostfile_text(Mpi.INTEL, hosts) == "n01:8\nn02:2\n"


@pytest.mark.parametrize("name", ["fd00::1", "alice@n01"])
def test_what_hydra_cannot_say(name: str) -> None:
    """An IPv6 address or a user has no place in Hydra's format, so they are refused instead of misread."""
    assert hostfile_text(Mpi.OPEN_MPI_5, [Host(name, 2)]) == f"{name} slots=2\n"
    with pytest.raises(ConfigError, match="cannot be told to MPICH"):
        hostfile_text(Mpi.MPICH, [Host(name, 2)])


OPEN_MPI = "-np 10 --hostfile /runs/mine/hostfile --map-by slot --bind-to none"


@pytest.mark.parametrize(
    ("mpi", "words"),
    [
        (Mpi.OPEN_MPI_4, f"{OPEN_MPI} -x MASTER_ADDR -x OMP_NUM_THREADS -x PATH -x PYTHONUNBUFFERED -x RLBATCH_LAUNCH -x TERM"),
        (Mpi.OPEN_MPI_5, f"{OPEN_MPI} -x MASTER_ADDR -x OMP_NUM_THREADS -x PATH -x PYTHONUNBUFFERED -x RLBATCH_LAUNCH -x TERM"),
        (Mpi.MPICH, "-n 10 -f /runs/mine/hostfile -disable-auto-cleanup -bind-to none -localhost 10.0.0.9"),
        (Mpi.INTEL, "-n 10 -machinefile /runs/mine/hostfile"),
    ],
)
def test_commands(tmp_path: Path, mpi: Mpi, words: str) -> None:
    """The whole command line of each launcher: ranks node after node, not bound, variables forwarded by name only."""
    assert job(config(tmp_path), mpi).command == ("mpirun", *words.split(), *COMMAND)


def test_root_and_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI runs as root only if it is told to, and only root tells it; the interface goes to its own sockets too."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    four = job(config(tmp_path, interface="lo"), Mpi.OPEN_MPI_4).command
    assert "--allow-run-as-root" in four
    assert " ".join(four).count("--mca oob_tcp_if_include lo --mca btl_tcp_if_include lo") == 1
    five = " ".join(job(config(tmp_path, interface="lo"), Mpi.OPEN_MPI_5).command)
    assert "--prtemca prte_if_include lo --mca btl_tcp_if_include lo" in five
    assert "-x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME" in five
    assert "-iface lo" in " ".join(job(config(tmp_path, interface="lo"), Mpi.INTEL).command)


def test_values_of_variables_stay_off_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line can be read by every user of a machine: tokens go through the environment."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    made = job(config(tmp_path), Mpi.OPEN_MPI_5)
    assert "HF_TOKEN" in made.command
    assert not [word for word in made.command if "secret" in word]


def test_without_hostfile(tmp_path: Path) -> None:
    """All ranks on this machine, even if it has fewer cores."""
    made = job(Config(layout=LayoutConfig(world_size=4)), Mpi.OPEN_MPI_5)
    assert made.hostfile == ""
    assert "slot:OVERSUBSCRIBE" in made.command
    assert len(made.hosts) == 1


def test_output_that_goes_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI gives rank 0 a terminal in any case: it is told that there is none to draw on."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert mpirun_variables(Config(), Mpi.OPEN_MPI_5, ())["TERM"] == "dumb"
    assert "TERM" not in mpirun_variables(Config(), Mpi.MPICH, ())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "TERM" not in mpirun_variables(Config(), Mpi.OPEN_MPI_5, ())


def test_intel_does_not_pin() -> None:
    """Pinning is a variable there."""
    assert mpirun_variables(Config(), Mpi.INTEL, ())["I_MPI_PIN"] == "0"
    assert "I_MPI_PIN" not in mpirun_variables(Config(), Mpi.MPICH, ())


def test_name_of_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on several hosts are told by which name the others know rank 0's, without a user, unless the environment says another."""
    hosts = (Host("alice@n01", 4), Host("n02", 4))
    assert mpirun_variables(Config(), Mpi.OPEN_MPI_5, hosts)["MASTER_ADDR"] == "n01"
    assert "MASTER_ADDR" not in mpirun_variables(Config(), Mpi.OPEN_MPI_5, hosts[:1])
    monkeypatch.setenv("MASTER_ADDR", "n01-ib")
    assert mpirun_variables(Config(), Mpi.OPEN_MPI_5, hosts)["MASTER_ADDR"] == "n01-ib"


def fake(tmp_path: Path, script: str) -> MpiJob:
    """A job whose mpirun is a shell script."""
    program = tmp_path / "fake_mpirun"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return MpiJob(Mpi.OPEN_MPI_5, (Host("n01", 2),), "n01 slots=2\n", (str(program),))


def test_run_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hostfile is written first, and mpirun has the cluster's variables; in a job of `sbatch --export=NONE` its srun hands them on."""
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    settings = Config(cluster=ClusterConfig(environment={"NCCL_DEBUG": "INFO"}))
    job = fake(
        tmp_path, f'test "$NCCL_DEBUG $SLURM_EXPORT_ENV" = "INFO ALL" && grep -q slots=2 {tmp_path}/hostfile && rm {tmp_path}/unfinished'
    )
    assert run_mpi(job, settings, tmp_path) == 0


def test_failed_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If no rank recorded an error, mpirun's exit code is told, and recorded: of no rank, since nobody knows of which."""
    assert run_mpi(fake(tmp_path, "exit 7"), Config(), tmp_path) == 1
    told = f"[host {socket.gethostname()}] Open MPI 5: mpirun ended with exit code 7, no rank said why; its output is above."
    assert capfd.readouterr().err == told + "\n"
    assert str(read_first_error(tmp_path)) == told


def start(folder: Path, mpi: Mpi, code: int, config: str = "") -> subprocess.Popen[bytes]:
    """A process that waits for an mpirun, which writes the signals that it gets to `got`, until there is a file `end`."""
    trap = 'for s in USR1 USR2 TERM INT; do trap "echo $s >> got" $s; done'
    fake(folder, f"cd {folder}\n{trap}\ntouch ready\nwhile [ ! -e end ]; do sleep 0.02; done; rm unfinished; exit {code}")
    script = (
        "import pathlib, sys\n"
        "from rlbatch.config.schema import Config, LaunchConfig\n"
        "from rlbatch.launch.starters.mpirun import Mpi, MpiJob, run_mpi\n"
        f"job = MpiJob(Mpi.{mpi.name}, (), '', ('{folder}/fake_mpirun',))\n"
        f"sys.exit(run_mpi(job, Config(launch=LaunchConfig({config})), pathlib.Path('{folder}')))\n"
    )
    hang_up = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
    process = subprocess.Popen([sys.executable, "-c", script], preexec_fn=hang_up)
    wait_for((folder / "ready").exists)
    return process


def wait_for_signals(folder: Path, number: int) -> None:
    """Waits until mpirun has got so many."""
    got = folder / "got"
    wait_for(lambda: got.exists() and len(got.read_text().split()) == number)


@pytest.mark.parametrize(
    ("mpi", "sent", "passed", "of_mpirun", "code"),
    [
        (Mpi.MPICH, ["TERM"], ["USR1"], 75, 75),
        (Mpi.OPEN_MPI_5, ["USR2"], ["USR1"], 140, 140),
        (Mpi.MPICH, ["HUP", "HUP"], ["USR1", "USR1"], 1, 129),
        (Mpi.OPEN_MPI_4, ["USR1", "USR1"], ["USR1", "USR1"], 75, 75),
        (Mpi.MPICH, ["USR2", "INT"], ["USR1", "INT"], 75, 130),
        (Mpi.OPEN_MPI_5, ["INT"], ["TERM"], 1, 130),
        (Mpi.OPEN_MPI_5, ["TERM", "TERM"], ["USR1", "TERM"], 1, 143),
        (Mpi.INTEL, ["TERM", "TERM"], ["USR1", "INT"], 1, 143),
        (Mpi.OPEN_MPI_5, ["TERM"], ["USR1"], 0, 0),  # it was done
    ],
)
def test_stopped(tmp_path: Path, mpi: Mpi, sent: list[str], passed: list[str], of_mpirun: int, code: int) -> None:
    """A request to stop goes on as a signal that mpirun hands to its ranks and that ends nothing; what ends at once ends mpirun."""
    process = start(tmp_path, mpi, of_mpirun)
    for number, name in enumerate(sent, 1):
        process.send_signal(signal.Signals[f"SIG{name}"])
        wait_for_signals(tmp_path, number)
    (tmp_path / "end").touch()
    assert process.wait(60) == code
    assert (tmp_path / "got").read_text().split() == passed


def test_late_after_sigterm(tmp_path: Path) -> None:
    """What still runs `launch.notice_s` later is ended."""
    process = start(tmp_path, Mpi.OPEN_MPI_5, 1, "notice_s=1")
    process.send_signal(signal.SIGTERM)
    wait_for_signals(tmp_path, 2)
    (tmp_path / "end").touch()
    assert process.wait(60) == 143
    assert (tmp_path / "got").read_text().split() == ["USR1", "TERM"]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "CUDA_VISIBLE_DEVICES",
            "CUBLAS_WORKSPACE_CONFIG",
            "CUBLASLT_LOG_LEVEL",
            "CUDNN_LOGLEVEL_DBG",
            "NVIDIA_TF32_OVERRIDE",
            "NVTE_FLASH_ATTN",
        ),
        *(
            "NVSHMEM_SYMMETRIC_SIZE",
            "NCCL_DEBUG",
            "UCX_TLS",
            "FI_PROVIDER",
            "OFI_NCCL_PROTOCOL",
            "PSM2_CUDA",
            "GLOO_SOCKET_IFNAME",
            "MLX5_SINGLE_THREADED",
        ),
        *(
            "TORCH_NCCL_BLOCKING_WAIT",
            "TORCHINDUCTOR_CACHE_DIR",
            "PYTORCH_CUDA_ALLOC_CONF",
            "TRITON_CACHE_DIR",
            "FLASHINFER_WORKSPACE_BASE",
        ),
        *(
            "VLLM_USE_V1",
            "SGLANG_X",
            "SGL_DG_CACHE_DIR",
            "DG_JIT_CACHE_DIR",
            "DEEP_EP_X",
            "HF_HOME",
            "HUGGINGFACE_HUB_CACHE",
            "TRANSFORMERS_CACHE",
        ),
        *(
            "OMP_PROC_BIND",
            "KMP_AFFINITY",
            "OPENBLAS_NUM_THREADS",
            "MKL_NUM_THREADS",
            "GOMP_CPU_AFFINITY",
            "NUMEXPR_MAX_THREADS",
            "MALLOC_ARENA_MAX",
        ),
        *(
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "PATH",
            "PYTHONPATH",
            "TMPDIR",
            "XDG_CACHE_HOME",
            "CC",
            "LC_ALL",
            "LANG",
            "SSL_CERT_FILE",
            "RES_OPTIONS",
        ),
    ],
)
def test_families_that_matter_are_forwarded(name: str) -> None:
    """Open MPI sends nothing by itself, and a setting that only one node has is not noticed."""
    assert mpirun.is_forwarded(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HOME",
            "USER",
            "HOSTNAME",
            "SSH_AUTH_SOCK",
            "DISPLAY",
            "PWD",
            "RANK",
            "OMPI_COMM_WORLD_RANK",
            "PMIX_RANK",
            "PRTE_MCA_x",
            "SLURM_JOB_ID",
        ),
        *("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN", "CCACHE_DIR", "FILES", "OMPX", "PATHS"),
    ],
)
def test_what_is_a_nodes_own_stays(name: str) -> None:
    """Nor go secrets that no rank asks for."""
    assert not mpirun.is_forwarded(name)
