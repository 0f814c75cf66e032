"""One rank of ``tests.gpu.te_compare``: cases of one model, ``<spec> <precision> <layout>``, one after the other."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.fields import tried
from tests.gpu.layouts import LAYOUTS
from tests.gpu.models import LENGTHS, VOCAB
from tests.gpu.torchrun import process_group

MAX_TOKENS = 1024


def main() -> None:
    """Computes log-probs and gradients of each case; rank 0 writes them."""
    folder, results, fields, *cases = sys.argv[1:]

    with process_group():
        for case in cases:
            started = time.perf_counter()
            with tried(fields.split(",") if fields and case.startswith("transformer_engine") else []):
                computed = _hugging_face(folder) if case == "hf" else _checkpoints(folder) if case == "checkpoint" else _case(folder, case)
            if dist.get_rank() == 0:
                torch.save(computed, Path(results) / f"{case}.pt")
                print(f"{Path(folder).name} {case}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
            gc.collect()
            torch.cuda.empty_cache()


def _case(folder: str, case: str) -> dict[str, torch.Tensor]:
    from rlbatch.megatron import parallel
    from rlbatch.pipeline.packing import assign_to_ranks, split_by_sample
    from rlbatch.testing.gradients import build_trainer, gradients_of, my_packs

    spec, precision, name = case.split(" ", 2)
    trainer = build_trainer(Path(folder), LAYOUTS[name], spec=spec, precision=precision)
    is_fused = any(key.endswith("layer_norm_weight") for stage in trainer.stages for key, _ in stage.named_parameters())
    if is_fused != (spec == "transformer_engine"):
        raise SystemExit(f"{case}: fused norms {is_fused}")
    packs = my_packs(LAYOUTS[name], MAX_TOKENS, LENGTHS, VOCAB)
    scored = split_by_sample(packs, trainer.logprobs([pack.microbatch for pack in packs]))
    mine = dict(zip(assign_to_ranks(LENGTHS, parallel.dp_size())[parallel.dp_rank()], scored, strict=True))
    everybody: list[dict[int, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, mine)
    by_sample = {index: values for found in everybody for index, values in found.items()}
    named = {key: tensor.float().cpu() for key, tensor in gradients_of(trainer, packs, "token_mean").items()}
    return named | {"logprobs": torch.cat([by_sample[index] for index in range(len(LENGTHS))])}


def _hugging_face(folder: str) -> dict[str, torch.Tensor]:
    """transformers in fp32, a sequence at a time; 0 where the batch is masked."""
    from transformers import AutoModelForCausalLM

    from rlbatch.testing.gradients import samples

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device)
    tokens, masks, _ = samples(LENGTHS, VOCAB)
    scored = []
    with torch.no_grad():
        for ids, mask in zip(tokens, masks, strict=True):
            logprobs = model(ids[None].to(device)).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(-1, ids[1:, None].to(device)).squeeze(-1).cpu()
            scored.append(torch.cat([torch.zeros(1), chosen]) * mask)
    return {"logprobs": torch.cat(scored)}


def _checkpoints(folder: str) -> dict[str, torch.Tensor]:
    """Weights after an update under each spec, after loading what it saved under the other one, and after one more update there."""
    import tempfile

    from rlbatch.megatron.checkpoint import TrainerState, load_state
    from rlbatch.testing.gradients import build_trainer
    from tests.megatron.checkpoint import exported, update

    size = dist.get_world_size()
    writing, reading = (LAYOUTS["TP2 EP2"], LAYOUTS["PP2"]) if size == 2 else (LAYOUTS["1 GPU"], LAYOUTS["1 GPU"])
    found: dict[str, torch.Tensor] = {}
    for writer, reader in (("transformer_engine", "local"), ("local", "transformer_engine")):
        place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(place, 0)
        trainer = build_trainer(Path(folder), writing, spec=writer, precision="bf16")
        update(trainer, writing)
        TrainerState(trainer).write(Path(place[0]))
        found |= {f"{writer} saved {name}": tensor.cpu() for name, tensor in exported(trainer).items()}
        trainer = build_trainer(Path(folder), reading, spec=reader, precision="bf16")
        load_state(trainer, Path(place[0]))
        found |= {f"{writer} loaded {name}": tensor.cpu() for name, tensor in exported(trainer).items()}
        update(trainer, reading)
    return found


if __name__ == "__main__":
    main()
