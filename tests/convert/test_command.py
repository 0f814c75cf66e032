"""What the command refuses, and how it says so: before anything is written, and with the source untouched."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlbatch.convert.__main__ import main
from rlbatch.convert.arguments import parse
from tests import tiny_models
from tests.convert.test_dist import run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def hf(model: Path, tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(model, tmp_path / "hf"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on its way out with code 2."""
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names every mode and every key."""
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for word in ("hf_to_dist", "dist_to_hf", "fp8_to_bf16", "bf16_to_fp8", "check", "layout.first_stage_layers=null", "verify=false"):
        assert word in said


def test_numbers() -> None:
    """A number may be written as Python writes it."""
    assert parse(["mode=hf_to_dist", "hf=x", "out=y", "file_gb=2e-05"]).file_gb == 2e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "mode=: has no value. Choose hf_to_dist, dist_to_hf"),
        (["mode=hf_to_torch"], "mode=hf_to_torch: must be `hf_to_dist`"),
        (["mod=check"], "mod: unknown key. Did you mean `mode`?"),
        (["check"], "`check`: not of the form key=value"),
        (["mode=check"], "hf=: mode=check needs it"),
        (["mode=check", "hf=x", "out=y"], "out=y: mode=check does not use it"),
        (["mode=hf_to_dist", "hf=x", "out=y", "layout.pp=2"], "layout.pp: unknown key"),
        (["mode=hf_to_dist", "hf=x", "out=y", "layout.pp_size=two"], "layout.pp_size=two: must be an integer"),
        (["mode=hf_to_dist", "hf=x", "out=y", "layout.pp_size=0"], "layout.pp_size=0: must be greater than 0"),
        (["mode=hf_to_dist", "hf=x", "out=x"], "out=x: and hf=x lie in each other"),
        (["mode=hf_to_dist", "hf=x", "out=x/y"], "out=x/y: and hf=x lie in each other"),
        (["mode=hf_to_dist", "hf=x", "hf=y", "out=z"], "hf=y: `hf` is given twice"),
        (["mode=hf_to_dist", "hf=absent", "out=y"], "absent: there is no such folder"),
        (["mode=fp8_to_bf16", "hf=x", "out=y", "layout.pp_size=2"], "layout.*: only mode=hf_to_dist uses it"),
        (["mode=bf16_to_fp8", "hf=x", "out=y", "export=fp8"], "export=fp8: only mode=dist_to_hf uses it"),
    ],
)
def test_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values that cannot be right, with what to write instead."""
    assert message in refused(capsys, *arguments)


def test_a_run_folder_is_no_checkpoint(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoints are named instead."""
    (tmp_path / "run/checkpoints/step_000100").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step_000100/progress.json").touch()
    for folder, fix in (
        ("run", "Name one of its checkpoints: checkpoints/step_000100."),
        ("run/checkpoints", "Name one of its checkpoints: step_000100."),
    ):
        told = refused(capsys, "mode=dist_to_hf", f"dist={tmp_path / folder}", f"hf={model}", f"out={tmp_path / 'out'}")
        assert (
            told.strip() == f"dist={tmp_path / folder}: is neither a checkpoint (progress.json) nor a torch_dist folder (.metadata). {fix}"
        )


def _cut(hf: Path) -> None:
    os.truncate(hf / "model.safetensors", (hf / "model.safetensors").stat().st_size - 5)


def _zero_header(hf: Path) -> None:
    content = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(content[:8] + bytes(100) + content[108:])


def _change(hf: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(hf / "model.safetensors")
    tensors = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
    save_file(tensors, hf / "model.safetensors")


def _config(hf: Path, **changes: object) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | changes))


MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
NORM, EXPERT = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (_cut, "", "model.safetensors: is truncated or damaged"),
        (_zero_header, "", "model.safetensors: header:1: not JSON"),
        (lambda hf: _change(hf, EXPERT, None), "", "the checkpoint lacks 1 of its tensors, first model.layers.1.mlp.experts.3.down_proj"),
        (lambda hf: _change(hf, "extra", torch.zeros(1)), "", "does not use 1 tensors of the checkpoint, first extra"),
        (lambda hf: _change(hf, EXPERT, torch.zeros(32, 23)), "", f"{EXPERT}: shape (32, 23) does not fit Megatron's (32, 24)"),
        (lambda hf: _change(hf, NORM, torch.zeros(32, dtype=torch.int64)), "", "dtype I64: weights must be"),
        (lambda hf: _config(hf, **MAMBA), "", "no plugin claims model_type `mamba`. Asked: "),
        (lambda hf: None, "layout.pp_size=3", "layout.pp_size=3"),
        (lambda hf: None, "layout.ep_size=3", "layout.ep_size=3: must divide num_experts (8)"),
        (lambda hf: None, "layout.tp_size=2 layout.world_size=3 layout.etp_size=2", "layout.world_size=3: must be a multiple of"),
        (lambda hf: None, "layout.pp_size=4 layout.first_stage_layers=9", "layout.first_stage_layers=9"),
        (lambda hf: (hf / "config.json").unlink(), "", "config.json: not there"),
    ],
)
def test_input(damage, options: str, message: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damaged folders, other models, layouts that cannot hold the model: named, and no output."""
    damage(hf)
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    assert message in refused(capsys, "mode=hf_to_dist", f"hf={hf}", f"out={tmp_path / 'out'}", *options.split())
    assert list(tmp_path.iterdir()) == [hf]
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before


def test_shard_missing(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that the index names and that is not there, and one that the index does not name."""
    run("mode=fp8_to_bf16", f"hf={hf}", f"out={tmp_path / 'many'}", "file_gb=0.0001")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    files[1].rename(tmp_path / "elsewhere")
    arguments = ("mode=hf_to_dist", f"hf={tmp_path / 'many'}", f"out={tmp_path / 'out'}")
    assert f"{files[1]}: is in model.safetensors.index.json and not there" in refused(capsys, *arguments)
    (tmp_path / "elsewhere").rename(tmp_path / "many" / "model-00009-of-00002.safetensors")


@pytest.mark.parametrize("mode", ["fp8_to_bf16", "bf16_to_fp8"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda hf: _change(hf, EXPERT, None), "the checkpoint lacks 1 of its tensors, first model.layers.1.mlp.experts.3.down_proj"),
        (lambda hf: _change(hf, "extra", torch.zeros(1)), "does not use 1 tensors of the checkpoint, first extra"),
        (lambda hf: _change(hf, EXPERT, torch.zeros(32, 23)), f"{EXPERT}: shape [32, 23], must be [32, 24] (1 tensors do not fit)"),
        (lambda hf: _change(hf, NORM, torch.zeros(32, dtype=torch.int64)), f"{NORM}: type I64, must be one of F32"),
        (lambda hf: _config(hf, **MAMBA), "no plugin claims model_type `mamba`. Asked: "),
    ],
)
def test_input_of_other_types(damage, message: str, mode: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conversions between types copy no folder that is not whole, or that is not the model of its config.json."""
    damage(hf)
    assert message in refused(capsys, f"mode={mode}", f"hf={hf}", f"out={tmp_path / 'out'}")
    assert list(tmp_path.iterdir()) == [hf]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_scales(value: float, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scales that no weight can have end a conversion, with the tensor's name, and weights that are not finite do too."""
    run("mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'fp8'}")
    _change(tmp_path / "fp8", f"{EXPERT}_scale_inv", torch.tensor([[value]]))
    for mode in ("hf_to_dist", "fp8_to_bf16"):
        said = refused(capsys, f"mode={mode}", f"hf={tmp_path / 'fp8'}", f"out={tmp_path / mode}")
        assert f"{EXPERT}_scale_inv: scales must be positive, finite" in said
        assert not (tmp_path / mode).exists()
    if value:
        _change(hf, EXPERT, torch.full((32, 24), value))
        assert "scales must be positive, finite" in refused(capsys, "mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'again'}")


@pytest.mark.parametrize("mode", ["hf_to_dist", "bf16_to_fp8", "fp8_to_bf16", "dist_to_hf"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite(mode: str, value: float, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the tensor's name where values are looked at (finite=true, or verify=true), else taken as they are."""
    norm = torch.ones(32)
    norm[3:5] = value
    _change(hf, NORM, norm)
    arguments, origin = [f"mode={mode}", f"hf={hf}"], f"model.safetensors: {NORM}"
    if mode == "dist_to_hf":
        run("mode=hf_to_dist", f"hf={hf}", f"out={tmp_path / 'dist'}")
        arguments, origin = [*arguments, f"dist={tmp_path / 'dist'}"], ".distcp: decoder.layers.self_attention"
    for key in ("finite=true", "verify=true"):
        said = refused(capsys, *arguments, f"out={tmp_path / 'out'}", key)
        assert origin in said and ": 2 of 32 values are infinite or NaN" in said
        assert not (tmp_path / "out").exists()
    run(*arguments, f"out={tmp_path / 'out'}", "verify=true", "finite=false")


def test_fp8_folder_with_weights_in_bf16(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modules that its config.json names as not converted have no scales: the folder is complete, and stays as it is in fp8."""
    in_bf16(hf)
    plain = load_file(hf / "model.safetensors")
    left = sorted(name for name in plain if name.startswith("model.layers.1.mlp.experts.3.") or name.endswith(".2.self_attn.o_proj.weight"))
    run("mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'all'}")
    fp8 = Path(shutil.copytree(tmp_path / "all", tmp_path / "fp8"))
    for name in left:
        _change(fp8, name, plain[name])
        _change(fp8, f"{name}_scale_inv", None)
    assert "lacks 4 of its tensors" in refused(capsys, "mode=hf_to_dist", f"hf={fp8}", f"out={tmp_path / 'out'}")
    quantization = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    quantization["modules_to_not_convert"] += ["model.layers.1.mlp.experts.3", "2.self_attn.o_proj"]
    _config(fp8, quantization_config=quantization)
    assert main(["mode=check", f"hf={fp8}"]) == 0
    run("mode=hf_to_dist", f"hf={fp8}", f"out={tmp_path / 'dist'}")
    run("mode=dist_to_hf", f"dist={tmp_path / 'dist'}", f"hf={fp8}", f"out={tmp_path / 'back'}")
    run("mode=bf16_to_fp8", f"hf={fp8}", f"out={tmp_path / 'again'}")
    want = load_file(fp8 / "model.safetensors")
    for folder in ("back", "again"):
        got = load_file(tmp_path / folder / "model.safetensors")
        assert got.keys() == want.keys()
        assert [name for name in want if got[name].dtype != want[name].dtype] == []
        assert [name for name in want if not torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8))] == []


def test_nothing_in_fp8(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """mode=fp8_to_bf16 of a folder without fp8 says so: weights and config.json's dtype stay as they are."""
    assert main(["mode=fp8_to_bf16", f"hf={hf}", f"out={tmp_path / 'out'}"]) == 0
    assert f"hf={hf}: has no weights in fp8" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}


def test_fp8_of_fp32_is_that_of_bf16(hf: Path, tmp_path: Path) -> None:
    """Weights in fp32 are rounded to bf16 before they are quantised, from a folder and from torch_dist."""
    run("mode=hf_to_dist", f"hf={hf}", f"out={tmp_path / 'dist'}")
    run("mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'a'}")
    run("mode=dist_to_hf", f"dist={tmp_path / 'dist'}", f"hf={hf}", f"out={tmp_path / 'b'}", "export=fp8")
    in_bf16(hf)
    run("mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'want'}")
    want = load_file(tmp_path / "want" / "model.safetensors")
    scales = [name for name in want if name.endswith("_scale_inv")]
    assert scales
    for folder in ("a", "b"):
        got = load_file(tmp_path / folder / "model.safetensors")
        for name in [*scales, *(scale.removesuffix("_scale_inv") for scale in scales)]:
            assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name


def test_another_models_checkpoint(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A torch_dist folder that does not fit hf's config.json."""
    run("mode=hf_to_dist", f"hf={hf}", f"out={tmp_path / 'dist'}")
    for changes, message in (
        ({"num_hidden_layers": 3}, "has shape [4, "),
        ({"vocab_size": 99}, "embedding.word_embeddings.weight has shape"),
    ):
        other = Path(shutil.copytree(hf, tmp_path / next(iter(changes))))
        _config(other, **changes)
        said = refused(capsys, "mode=dist_to_hf", f"dist={tmp_path / 'dist'}", f"hf={other}", f"out={tmp_path / 'out'}")
        assert message in said
        assert "Is it this model's?" in said


def in_bf16(hf: Path) -> None:
    """Rounds a folder's weights."""
    save_file({name: tensor.bfloat16() for name, tensor in load_file(hf / "model.safetensors").items()}, hf / "model.safetensors")


def test_fp8_is_stable(hf: Path, tmp_path: Path) -> None:
    """bf16 -> fp8 -> bf16 -> fp8 gives the same bytes; config.json says what the weights are, and the files beside them come along."""
    in_bf16(hf)
    (hf / "additional_chat_templates").mkdir()
    for name in ("qwen.tiktoken", "additional_chat_templates/tool_use.jinja"):
        (hf / name).write_text(name)
    run("mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'a'}")
    run("mode=fp8_to_bf16", f"hf={tmp_path / 'a'}", f"out={tmp_path / 'b'}")
    run("mode=bf16_to_fp8", f"hf={tmp_path / 'b'}", f"out={tmp_path / 'c'}")
    first, again = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "c" / "model.safetensors")
    assert first.keys() == again.keys()
    quantised = [name for name in first if name.endswith("_scale_inv")]
    assert quantised
    for name in quantised:
        weight = name.removesuffix("_scale_inv")
        assert torch.equal(first[weight].view(torch.uint8), again[weight].view(torch.uint8))
        assert torch.equal(first[name], again[name])
    assert "quantization_config" in json.loads((tmp_path / "a" / "config.json").read_text())
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    for name in ("qwen.tiktoken", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "c" / name).read_text() == name


def test_links_that_lead_out_of_the_folder(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What they lead to is not for others to read: refused before anything is written."""
    (hf / "special.txt").symlink_to("/proc/self/environ")
    for mode in ("bf16_to_fp8", "fp8_to_bf16"):
        assert "special.txt: is a link to /proc/" in refused(capsys, f"mode={mode}", f"hf={hf}", f"out={tmp_path / 'out'}")
    assert list(tmp_path.iterdir()) == [hf]


@pytest.mark.parametrize("export", ["bf16", "fp8"])
def test_fp8_over_dist(export: str, hf: Path, tmp_path: Path) -> None:
    """A quantised folder -> torch_dist -> Hugging Face, in either form, is what the direct conversion gives."""
    in_bf16(hf)
    run("mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'fp8'}")
    run("mode=hf_to_dist", f"hf={tmp_path / 'fp8'}", f"out={tmp_path / 'dist'}", "layout.ep_size=4")
    run("mode=dist_to_hf", f"dist={tmp_path / 'dist'}", f"hf={tmp_path / 'fp8'}", f"out={tmp_path / 'out'}", f"export={export}")
    if export == "bf16":
        run("mode=fp8_to_bf16", f"hf={tmp_path / 'fp8'}", f"out={tmp_path / 'bf16'}")
    want = load_file(tmp_path / export / "model.safetensors")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys()
    assert [name for name in want if got[name].dtype != want[name].dtype or not torch.equal(got[name].float(), want[name].float())] == []


def test_carried_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that are not trained go from the model's folder to the export, in its form; a folder without them is told of."""
    hf = tiny_models.saved(tiny_models.deepseek_v3(), tmp_path / "hf")
    _config(hf, num_nextn_predict_layers=1)
    carried = {"model.layers.4.eh_proj.weight": torch.randn(32, 64), "model.layers.4.self_attn.o_proj.weight": torch.randn(32, 56)}
    in_bf16(hf)
    for name, tensor in carried.items():
        _change(hf, name, tensor.bfloat16())
    run("mode=hf_to_dist", f"hf={hf}", f"out={tmp_path / 'dist'}")
    run("mode=dist_to_hf", f"dist={tmp_path / 'dist'}", f"hf={hf}", f"out={tmp_path / 'same'}")
    want, got = load_file(hf / "model.safetensors"), load_file(tmp_path / "same" / "model.safetensors")
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []
    main(["mode=dist_to_hf", f"dist={tmp_path / 'dist'}", f"hf={hf}", f"out={tmp_path / 'fp8'}", "export=fp8"])
    assert f"hf={hf}: lacks " in capsys.readouterr().out
    fp8 = load_file(tmp_path / "fp8" / "model.safetensors")
    assert fp8["model.layers.4.eh_proj.weight"].dtype == torch.bfloat16
    assert fp8["model.layers.4.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert "model.layers.4.self_attn.o_proj.weight_scale_inv" in fp8
