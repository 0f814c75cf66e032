"""``python -m rlbatch.plan calibrate=...``: runs correct the plans of their cluster, and no others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlbatch.config.compose import save_config
from rlbatch.plan.accounting import STEP_PHASES, planned_memory
from rlbatch.planner import main, make_plan
from rlbatch.registry import compose_job

KEYS = ("+cluster=h20x64", "rollout.max_response_tokens=4096", "train.max_tokens_per_gpu=16384")
TRUE = {
    "sync_factor": 2.0,
    "generate_factor": 0.8,
    "logprobs_factor": 1.1,
    "update_factor": 1.3,
    "activations_factor": 1.5,
    "cuda_gib": 6.0,
    "node_gib": 40.0,
}
LENGTHS = {"mean_prompt_tokens": 300, "mean_response_tokens": 900}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(name: str, *keys: str, device: str = "NVIDIA H20", gib: float = 95.0, is_new: bool = True, **true: float) -> str:
    """A folder of a run on GPUs of which other assumptions are true than those of its plan, and samples are of ``LENGTHS``."""
    config, registry = compose_job([*KEYS, *keys])
    values: dict[str, Any] = {**TRUE, **true, **LENGTHS}
    assume = replace(config.plan.assume, **values)
    plan = make_plan(replace(config, plan=replace(config.plan, assume=assume)), registry)
    assert plan.time
    found: dict[str, Any] = {
        "machine": {"device": device, "gpu_memory_gib": gib, "ranks": 64, "date": "2026-11-29"},
        "samples": plan.work.samples,
        "tokens": {name: {"planned": 1.0, "measured": LENGTHS[f"mean_{name}_tokens"]} for name in ("prompt", "response")},
        "seconds": {name: {"planned": 1.0, "measured": plan.time.phases[phase]} for name, phase in STEP_PHASES.items()},
        "memory": {
            phase: {what: {"measured": row["planned"]} for what, row in rows.items()}
            for phase, rows in planned_memory(plan.memory, plan.nodes, on_gpu=True).items()
        },
    }
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    save_config(config, folder / "config.yaml")
    (folder / "summary.json").write_text(json.dumps({"steps": 3, "plan_vs_actual": found} if is_new else {"steps": 3}))
    return str(folder)


def planned(capsys: pytest.CaptureFixture[str], *keys: str) -> dict[str, Any]:
    main([*KEYS, *keys, "format=json", *(f"plan.assume.{name}={value}" for name, value in LENGTHS.items())])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_later_plans_are_as_a_run_was(capsys: pytest.CaptureFixture[str]) -> None:
    """What was true of the run is found, plans of the cluster take it and say whence, and what is typed still counts."""
    before = planned(capsys)
    assert main([KEYS[0], f"calibrate={ran('a')}"]) == 0
    told = capsys.readouterr().out
    for name, value in TRUE.items():
        assert f"  {name}={value:g}\n" in told
    assert "update, s" in told and "Written: " in told
    after = planned(capsys)
    for phase, factor in (("sync", 2.0), ("generate", 0.8), ("update", 1.3)):
        assert after["phase_seconds"][phase] == pytest.approx(factor * before["phase_seconds"][phase], rel=1e-3)
    grown = [each["gpu_parts_gib"]["update"] for each in (after["stages"][0], before["stages"][0])]
    assert grown[0]["activations"] == pytest.approx(1.5 * grown[1]["activations"], rel=1e-3)
    assert after["host_gib_per_node"] == pytest.approx(before["host_gib_per_node"] + 37, abs=0.1)
    source = after["assumptions"]["update_factor"]["source"]
    assert source.startswith("calibrated 2") and source.endswith(" on NVIDIA H20: a")
    main([*KEYS, "plan.assume.update_factor=1.0"])
    shown = capsys.readouterr().out
    assert f"Calibrated  {source}" in shown and "update_factor=1: Seconds of updates over what is counted. (1: as counted" in shown
    assert planned(capsys, "plan.calibrations=") == before
    assert planned(capsys, "cluster.name=other") == before


def test_several_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Of factors the median counts, of memory the most; a run that was planned by a calibration is taken as measured all the same."""
    main([f"calibrate={ran('a')}"])
    capsys.readouterr()
    folders = ["runs/a", ran("b", update_factor=1.5, cuda_gib=4.0), ran("c", "train.max_tokens_per_gpu=20480", update_factor=1.6)]
    assert main([f"calibrate=[{','.join(folders)}]"]) == 0
    told = capsys.readouterr().out
    assert "  update_factor=1.5\n" in told and "  cuda_gib=6\n" in told and "  generate_factor=0.8\n" in told
    assert json.loads(Path("calibrations/h20x64.json").read_text())["runs"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("make", "keys", "said"),
    [
        ({"device": "NVIDIA H200", "gib": 139.8}, (), "was measured on NVIDIA H200, and cluster.gpu=H20. Use a run on that GPU"),
        ({"gib": 139.8}, (), "its GPUs have 139.8 GiB, and cluster.gpu_memory_gib=95. Use 139.8, or a run on the GPUs that are meant."),
        ({"device": ""}, (), "ran on CPUs, and plans are of GPUs. Use a run on GPUs."),
        ({"is_new": False}, (), "its summary.json has no steps' times beside a plan. Use a run that has done two steps or more."),
        (
            {},
            ("+cluster=h100x8",),
            "is of another cluster: cluster.name is h20x64 there and h100x8 here, cluster.gpu is H20 there and H100",
        ),
        (
            {},
            ("+cluster=h20x64", "cluster.gpus_per_node=4"),
            "cluster.gpus_per_node is 8 there and 4 here. Use a run of this one, or leave out",
        ),
    ],
)
def test_what_says_nothing_of_a_cluster(make: dict[str, Any], keys: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another GPU, another cluster, no GPU, no plan: refused with what differs, and nothing is written."""
    assert main([*keys, f"calibrate={ran('a', **make)}"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("calibrations").exists()


def test_into_another_folder() -> None:
    """Which says nothing of the cluster: that is the run's."""
    assert main([f"calibrate={ran('a')}", "plan.calibrations=elsewhere"]) == 0
    assert Path("elsewhere/h20x64.json").is_file()
    assert not Path("calibrations").exists()


def test_folders_that_are_no_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest are named; a damaged summary is told by its key."""
    good = ran("first")
    assert main(["calibrate=runs/frist"]) == 2
    assert "calibrate=runs/frist: is no run folder, as it has no config.yaml. Did you mean `runs/first`?" in capsys.readouterr().err
    assert main([f"calibrate={good},nowhere/x"]) == 2
    assert "calibrate=nowhere/x: is no run folder, as it has no config.yaml. In nowhere there are none." in capsys.readouterr().err
    for content, told in (
        ('{"plan_vs_actual": {"seconds": {"update": {"measured": "fast"}}}}', "seconds.update.measured=fast"),
        (
            '{"plan_vs_actual": {"seconds": {"update": {"measured": NaN}}, "tokens": {"response": {"measured": Infinity}}}}',
            "no steps' times",
        ),
        ("[]", ":1: not"),
    ):
        Path(good, "summary.json").write_text(content)
        assert main([f"calibrate={good}"]) == 2
        assert told in capsys.readouterr().err


def test_a_calibration_of_another_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Where its file is found under the name of a cluster that has changed; calibrating anew mends it."""
    main([f"calibrate={ran('a')}"])
    capsys.readouterr()
    changed = ("+cluster=h20x64", "layout=qwen3_235b_64xh20", "cluster.gpu_memory_gib=141", "cluster.gpu=H200")
    assert main(list(changed)) == 2
    said = capsys.readouterr().err
    assert "h20x64.json is of another cluster: cluster.gpu is H20 there and H200 here, cluster.gpu_memory_gib is 95.0 there and 141" in said
    assert 'Calibrate it anew with python -m rlbatch.plan calibrate=<run folder>, or leave it out with plan.calibrations="".' in said
    assert main([*changed, f"calibrate={ran('b', *changed[1:], 'plan.calibrations=', device='NVIDIA H200', gib=139.8)}"]) == 0
    assert main([*changed]) in (0, 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ('{"date": 3}', "date=3: must be text"),
        ('{"assume": {"speed": 2}}', "assume.speed: unknown key"),
        ('{"assume": {"update_factor": 0}}', "assume.update_factor=0"),
        ('{"assume": {"update_factor": "fast"}}', "assume.update_factor=fast: must be a number, not `fast`. Use e.g. 1.0."),
        (f'{{"assume": {{"update_factor": "{"x" * 5000}"}}}}', "x...`. Use e.g. 1.0."),
        (json.dumps({"assume": {f"unknown_{number}": 1 for number in range(400)}}), "assume.unknown_0: unknown key. Known: assume."),
        ('{"cluster": {"gpu_memory_gib": "95"}}', "cluster.gpu_memory_gib=95: must be a number, not `95`. Use one number, e.g. 95."),
    ],
)
def test_damaged_calibrations(content: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Are told by file and key, in one short message with a way out."""
    Path("calibrations").mkdir()
    Path("calibrations/h20x64.json").write_text(content)
    assert main([KEYS[0]]) == 2
    error = capsys.readouterr().err
    assert error.count("h20x64.json") == 1 and said in error
    assert "Calibrate it anew with" in error and len(error) < 1500


def test_a_calibration_that_is_edited(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole numbers are numbers; another device is refused, also where the rest is of this cluster."""
    main([KEYS[0], f"calibrate={ran('a')}"])
    file, own = Path("calibrations/h20x64.json"), json.loads(Path("calibrations/h20x64.json").read_text())
    file.write_text(json.dumps({**own, "assume": {"mean_response_tokens": 900, "update_factor": 2}}))
    capsys.readouterr()
    main([*KEYS, "format=json"])
    assumed = json.loads(capsys.readouterr().out)["assumptions"]
    assert [assumed[name]["value"] for name in ("mean_response_tokens", "update_factor")] == [900, 2.0]
    file.write_text(json.dumps({**own, "device": "NVIDIA H200"}))
    assert main(list(KEYS)) == 2
    assert "h20x64.json: device=NVIDIA H200: must be a GPU of cluster.gpu=H20." in capsys.readouterr().err
