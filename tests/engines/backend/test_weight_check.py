"""The trainer's checksums beside those of an engine's workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlbatch.api import RolloutError, WeightBucket
from rlbatch.engines.backend.weight_check import Compared, HeldPart, TrainerSums, compare
from rlbatch.engines.transfer.checksums import Expected, Rectangle, came, held
from tests.plugins.vllm_cases import gathers_of_threads

GATE, DOWN, NORM, OTHER = (f"model.layers.1.{name}.weight" for name in ("mlp.gate_proj", "mlp.down_proj", "norm", "mlp.experts.5.up_proj"))
SENT = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    for name, shape in ((GATE, (8, 16)), (DOWN, (16, 8)), (NORM, (16,)), (OTHER, (8, 16)))
}


def trainer(blocks: int = 2) -> dict[str, Expected]:
    """What is sent but what is carried."""
    sums = TrainerSums(blocks, is_needed=True)
    buckets = [WeightBucket([name], [tensor], 1) for name, tensor in SENT.items()]
    assert len(list(sums.watch([*buckets, WeightBucket(["draft"], [torch.ones(1)], 1, is_carried=True)]))) == 5
    return sums.of_all(lambda own: [own], 0)


def piece(worker: int, name: str, part: Rectangle, wrong: float = 0.0) -> HeldPart:
    """What a worker says that has a part, of which one value is another."""
    values = SENT[name].reshape(-1, SENT[name].shape[-1])[part.row : part.row + part.rows, part.column : part.column + part.columns].clone()
    values[0, 0] += wrong
    return (worker, *held([(name, name.replace("gate_proj", "gate_up_proj"), values, part, values.dtype)])[0])


def workers(wrong: tuple[int, str] = (9, "")) -> list[HeldPart]:
    """Two that share matrices, the first by rows and the second by columns, and have the vector each; experts are on another node."""
    told = []
    for worker in range(2):
        parts = {GATE: Rectangle(4 * worker, 4, 0, 16), DOWN: Rectangle(0, 16, 4 * worker, 4), NORM: Rectangle(0, 1, 0, 16)}
        told += [piece(worker, name, part, float((worker, name) == wrong)) for name, part in parts.items()]
    return told


def test_right_weights() -> None:
    """Everything is compared in the modules; what no worker has is of another node."""
    assert compare(trainer(), workers(), "engine 0") == Compared(held=3, came=0, elsewhere=1)


@pytest.mark.parametrize("name", [GATE, DOWN, NORM])
@pytest.mark.parametrize("worker", [0, 1])
def test_the_worker_is_named(worker: int, name: str) -> None:
    """With engine, tensor and the module's parameter, whether it has rows, columns or all."""
    where = name.replace("gate_proj", "gate_up_proj")
    with pytest.raises(RolloutError, match=rf"engine 3 .* of 1 of 4 tensors: {name} \(in {where} of worker {worker}\)\."):
        compare(trainer(), workers((worker, name)), "engine 3")


def test_parts_that_end_within_bands() -> None:
    """Right ones are seen to be; of wrong ones the tensor is known, and who may have it. Two copies that differ cannot both be right."""
    cut = [Rectangle(0, 3, 0, 16), Rectangle(3, 5, 0, 16)]
    others = [part for part in workers() if part[1] != GATE]
    assert compare(trainer(), [*others, *(piece(n, GATE, part) for n, part in enumerate(cut))], "engine 0").held == 3
    with pytest.raises(RolloutError, match=rf"{GATE} \(in \S+ of worker 0, \S+ of worker 1\)"):
        compare(trainer(), [*others, *(piece(n, GATE, part, float(n)) for n, part in enumerate(cut))], "engine 0")
    copies = [piece(n + 2 * copy, GATE, part, float(n + copy == 2)) for copy in range(2) for n, part in enumerate(cut)]
    with pytest.raises(RolloutError, match=rf"{GATE} \("):
        compare(trainer(), [*others, *copies], "engine 0")


def test_what_cannot_be_read_back() -> None:
    """It is compared as it came, and counted apart."""
    as_it_came = [(worker, *came([(OTHER, SENT[OTHER])])[0]) for worker in range(2)]
    assert compare(trainer(), workers() + as_it_came, "engine 0") == Compared(held=3, came=1, elsewhere=0)
    wrong = (1, *came([(OTHER, SENT[OTHER] + 1)])[0])
    with pytest.raises(RolloutError, match=rf"{OTHER} \(in what came of worker 1\)"):
        compare(trainer(), [*workers(), as_it_came[0], wrong], "engine 0")


def test_a_part_that_is_missing() -> None:
    """It is not called compared: others of the tensor are, and what came."""
    told = [part for part in workers() if part[:2] != (1, GATE)]
    assert compare(trainer(), told, "engine 0") == Compared(held=2, came=0, elsewhere=2)
    with pytest.raises(RolloutError, match=rf"{GATE} \(in \S+ of worker 0\)"):
        compare(trainer(), [part for part in workers((0, GATE)) if part[:2] != (1, GATE)], "engine 0")


def test_an_engine_with_other_weights_than_were_sent() -> None:
    """It says so."""
    fewer = {name: own for name, own in trainer().items() if name != NORM}
    with pytest.raises(RolloutError, match=rf"engine 0 has {NORM} \(1 such\), which was not sent"):
        compare(fewer, workers(), "engine 0")


def gathered(*ranks: TrainerSums) -> list[dict[str, Expected] | str]:
    """What ``of_all`` gives on each rank, or its error."""
    gathers = gathers_of_threads(len(ranks))

    def one(place: int) -> dict[str, Expected] | str:
        try:
            return ranks[place].of_all(gathers[place], place)
        except RolloutError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def sums_of(**factors: float) -> TrainerSums:
    """Of a rank that sends these tensors (their last name before ``.weight``), times these factors."""
    sums = TrainerSums(2, is_needed=True)
    named = [(name, tensor * factors[name.split(".")[-2]]) for name, tensor in SENT.items() if name.split(".")[-2] in factors]
    list(sums.watch([WeightBucket([name], [tensor], 1) for name, tensor in named]))
    return sums


def test_ranks_with_experts_of_their_own() -> None:
    """All that any of them sends is known on all; one that sends nothing changes nothing."""
    told = gathered(sums_of(norm=1, gate_proj=1), sums_of(norm=1, gate_proj=1, up_proj=1), sums_of())
    assert all(isinstance(each, dict) and each.keys() == {NORM, GATE, OTHER} for each in told)
    assert all(each == told[0] for each in told)


@pytest.mark.parametrize("name", ["norm", "up_proj"])
def test_ranks_that_differ(name: str) -> None:
    """A tensor that two ranks send must be the same, an expert's or another: all of them name it."""
    told = gathered(sums_of(norm=1, gate_proj=1, up_proj=1), sums_of(**{"norm": 1, "gate_proj": 1, "up_proj": 1, name: 2}))
    whole = NORM if name == "norm" else OTHER
    assert told == [f"weight sync: {whole} is not the same on all ranks of the engine. Their parameters must be equal."] * 2
