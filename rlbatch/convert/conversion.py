"""A conversion from its options to the finished folder: what is made (by mode), and how (the same for all)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlbatch.api import DataError, ModelFamily
from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.export_form import ExportForm
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.checkpoint.identity import model_identity
from rlbatch.checkpoint.model_files import model_files
from rlbatch.checkpoint.origin import METADATA, no_checkpoint
from rlbatch.checkpoint.reading import Reading
from rlbatch.checkpoint.torch_dist import TorchDist, small_files
from rlbatch.config.hf_config import read_config
from rlbatch.convert import hf_output, to_dist, to_hf
from rlbatch.convert.arguments import Options, layout_config
from rlbatch.convert.completeness import check, table_of
from rlbatch.convert.output import Draft, Output
from rlbatch.convert.sharing import to_be_made
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.metrics.progress import ByteProgress
from rlbatch.plan.layout import check_layout
from rlbatch.registry import load_plugins
from rlbatch.weights.coverage import check_names, passthrough_names

PLAN_FORMAT = 2
"""Version of what decides the bytes of an output; a draft of another one is not taken up."""


@dataclass(frozen=True)
class Work:
    """The files that a conversion makes.

    Attributes:
        outputs: Large files, made one by one.
        small: Small ones, made last.
        note: What the user should know of them; may be empty.
    """

    outputs: list[Output]
    small: Callable[[], Mapping[str, bytes]]
    note: str = ""


def convert(options: Options, info: RankInfo, say: Callable[[str], None]) -> None:
    """Runs a conversion, or this process's share of it.

    Args:
        options: The options, of any mode but ``check``.
        info: This process's place among the others.
        say: Told what is being done.

    Raises:
        RlbatchError: what was refused or failed; the source is untouched, and the output not there.
    """
    draft = Draft(Path(options.out), plan(options))
    if draft.is_complete():
        draft.tidy()
        say(f"{options.out}: is complete already.")
        return
    if info.rank == 0:
        draft.check_out()
    work = prepare(options)
    with draft.opened(work.outputs, info.rank, info.world_size):
        if work.note:
            say(work.note)
        if finished := draft.finished(verified=options.verify):
            say(f"{draft.folder}: going on, {len(finished)} of {len(work.outputs)} files are finished.")
        _make(draft, work.outputs, info, say, verified=False)
        if options.verify:
            _make(draft, work.outputs, info, say, verified=True)
        if info.rank == 0:
            draft.publish({"mode": options.mode, "model": model_identity(read_config(Path(options.hf)))}, work.small())
    say(f"{options.out}: {len(work.outputs)} files, {sum(output.nbytes for output in work.outputs) / 1e9:.3f} GB.")


def _make(draft: Draft, outputs: Sequence[Output], info: RankInfo, say: Callable[[str], None], *, verified: bool) -> None:
    """Writes files, or reads them again and compares, until this process and the others have done all."""
    sizes = {output.name: output.nbytes for output in outputs}

    def done() -> int:
        return sum(sizes.get(name, 0) for name in draft.finished(verified=verified))

    title, make = ("verifying", draft.verify) if verified else ("writing", draft.write)
    progress = ByteProgress(title, sum(sizes.values()), say, before=done())
    for output in to_be_made(draft, outputs, info, lambda: progress.reach(done()), verified=verified):
        make(output, progress.add)
        progress.reach(done())
    progress.close()


def plan(options: Options) -> dict[str, Any]:
    """All that decides an output's bytes: options, and the source as its files' names, sizes and times of change."""
    chosen = asdict(options)
    kept = {name: chosen[name] for name in ("mode", "export", "file_gb", "layout")}
    sources = {name: _files(Path(chosen[name])) for name in ("hf", "dist") if chosen[name]}
    writer = {"torch": str(torch.__version__)} if options.mode == "hf_to_dist" else {}  # whose archives they are
    return {"format": PLAN_FORMAT, **kept, **writer, **sources}


def _files(folder: Path) -> dict[str, list[int]]:
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder. Correct the path.")
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns] for path in found}


def family_of(options: Options) -> ModelFamily:
    """The model family of ``hf``.

    Raises:
        ModelError: no plugin knows its architecture, or a field of its config.
    """
    return load_plugins(options.plugins).resolve_model_family(read_config(Path(options.hf)))


def prepare(options: Options) -> Work:
    """Everything that can be found out before anything is written.

    Raises:
        RlbatchError: what was refused.
    """
    return {"hf_to_dist": _hf_to_dist, "dist_to_hf": _dist_to_hf, "fp8_to_bf16": _fp8_to_bf16, "bf16_to_fp8": _bf16_to_fp8}[options.mode](
        options
    )


def _hf_to_dist(options: Options) -> Work:
    family, layout = family_of(options), layout_config(options.layout)
    check_layout(layout, family, on_gpu=False)
    # Columns of a matrix lie between those of other ranks.
    hf = HfTensors(Path(options.hf), replace(_reading(options), once=layout.tp_size == layout.etp_size == 1))
    check_names(family, hf.names())
    outputs, chunks = to_dist.outputs(family, hf, layout, options.file_gb * 1e9)
    return Work(outputs, lambda: small_files(chunks, to_dist.empty_objects(chunks)))


def _dist_to_hf(options: Options) -> Work:
    family, folder = family_of(options), Path(options.dist)
    if run_folder.is_checkpoint(folder):
        folder /= run_folder.STATE
    elif not (folder / METADATA).exists():
        raise no_checkpoint("dist", folder, "a torch_dist folder (.metadata)")
    dist = TorchDist(folder, _reading(options))
    hf = Path(options.hf)
    source = HfTensors(hf, _reading(options)) if any(hf.glob("*.safetensors")) else None
    form = ExportForm(family, options.export, read_config(hf), source)
    work = _to_hf(options, to_hf.from_dist(family, dist, source, form), form.config())
    present = set(source.names() if source else ())
    lacking = [name for name in passthrough_names(family, is_dropped=False) if name not in present]
    note = (
        f"hf={hf}: lacks {len(lacking)} tensors that are carried, not trained, first {lacking[0]}: so does the output." if lacking else ""
    )
    return replace(work, note=note)


def _reading(options: Options) -> Reading:
    return Reading(once=True, finite=options.verify if options.finite is None else options.finite)


def _source(family: ModelFamily, options: Options) -> HfTensors:
    """A folder's tensors: those of the family, in its shapes.

    Raises:
        RlbatchError: one that is missing, unknown, or of another shape or type.
    """
    folder = Path(options.hf)
    hf = HfTensors(folder, _reading(options))
    check_names(family, hf.names())
    wrong = check(family, table_of(folder, hf)).wrong
    if wrong:
        raise DataError(f"hf={folder}: {wrong[0]} ({len(wrong)} tensors do not fit). Is config.json this model's?")
    return hf


def _fp8_to_bf16(options: Options) -> Work:
    hf = _source(family_of(options), options)
    config = {name: value for name, value in read_config(Path(options.hf)).items() if name != "quantization_config"}
    if not any(hf.stored(name).dtype == torch.float8_e4m3fn for name in hf.names()):
        note = f"hf={options.hf}: has no weights in fp8: the output has all of them as they are."
        return replace(_to_hf(options, to_hf.to_bf16(hf), config), note=note)
    config |= {name: str(torch.bfloat16).removeprefix("torch.") for name in ("dtype", "torch_dtype") if name in config}
    return _to_hf(options, to_hf.to_bf16(hf), config)


def _bf16_to_fp8(options: Options) -> Work:
    family = family_of(options)
    hf = _source(family, options)
    form = ExportForm(family, "fp8", read_config(Path(options.hf)), hf)
    return _to_hf(options, to_hf.to_fp8(family, hf), form.config())


def _to_hf(options: Options, tensors: Sequence[hf_output.HfTensor], config: Mapping[str, Any]) -> Work:
    outputs, index = hf_output.outputs(tensors, options.file_gb * 1e9)
    beside = model_files(Path(options.hf))
    return Work(outputs, lambda: hf_output.small_files(beside, config) | index)
