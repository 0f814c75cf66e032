"""Groups on disk: what comes back is what was sampled, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlbatch.api import Completion, Prompt, SamplingParams
from rlbatch.pipeline.finished_groups import FinishedGroups, WeightsProbe, delete_other_steps

PARAMS = SamplingParams(0.7, 4, (1, 2), 3, (5, 12))
PROMPT = Prompt(345, "a b", (7, 8))
ANSWER = [
    Completion([5, 6, 1], [-0.1, -1e-30, -3.0000002384185791], "stop"),
    Completion([5], [-0.25], "length"),
    Completion([2**30, 0], [-0.0, -7.5], "stop"),
]


def groups(
    run_dir: Path, told: list[str], step: int = 12, weights: str = "w", params: SamplingParams = PARAMS, sampler: str = "s"
) -> FinishedGroups:
    return FinishedGroups(run_dir, step, weights, params, sampler, told.append)


def float32(answer: list[Completion]) -> list[Completion]:
    return [replace(c, logprobs=torch.tensor(c.logprobs).tolist()) for c in answer]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a group that was saved in ``tmp_path``."""
    groups(tmp_path, []).save(PROMPT, ANSWER)
    [path] = (tmp_path / "groups" / "step_000012").iterdir()
    return path


def test_a_group_comes_back_exactly(path: Path, tmp_path: Path) -> None:
    """Tokens, log-probs as float32, reasons; the file is whole when it appears, and says whose it is by its name."""
    told: list[str] = []
    assert path.name == "prompt_000345.safetensors"
    assert groups(tmp_path, told).load(PROMPT) == float32(ANSWER)
    assert groups(tmp_path, told).load(replace(PROMPT, prompt_id=3)) is None
    assert told == []


def test_what_tokens_were_chosen_from_comes_back(tmp_path: Path) -> None:
    """Token by token, of every sample."""
    kept = [[[5], [0, 6, 9], [1, 2]], [[5, 7]], [[2**30], [0, 1]]]
    answer = [replace(completion, kept=ids) for completion, ids in zip(float32(ANSWER), kept, strict=True)]
    groups(tmp_path, []).save(PROMPT, answer)
    assert groups(tmp_path, []).load(PROMPT) == answer


def test_routes_come_back(tmp_path: Path) -> None:
    """Of the samples that have some, as the engine gave them."""
    routes = [torch.arange(12, dtype=torch.int16).view(3, 2, 2) - 4, None, torch.ones(0, 2, 2, dtype=torch.int16)]
    groups(tmp_path, []).save(PROMPT, [replace(completion, routes=of) for completion, of in zip(ANSWER, routes, strict=True)])
    again = groups(tmp_path, []).load(PROMPT)
    assert again == float32(ANSWER)
    for completion, of in zip(again, routes, strict=True):
        assert completion.routes is None if of is None else completion.routes.equal(of)


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "others"},
        {"params": replace(PARAMS, temperature=1.0)},
        {"params": replace(PARAMS, seed=(6, 12))},
        {"params": replace(PARAMS, samples_per_prompt=4)},
        {"params": replace(PARAMS, max_response_tokens=5)},
        {"params": replace(PARAMS, top_p=0.9)},
        {"params": replace(PARAMS, with_routes=True)},
        {"sampler": "other"},
    ],
)
def test_a_group_of_another_policy_is_ignored(other: dict, path: Path, tmp_path: Path) -> None:
    """Other weights, sampling settings, seed or engine: generated again, with a note that names the file; the new group takes its place."""
    told: list[str] = []
    mine = groups(tmp_path, told, **other)
    assert mine.load(PROMPT) is None
    assert told == [f"{path}: ignored, the group is generated again (it is of other weights, another engine, other settings or prompts)"]
    mine.save(PROMPT, ANSWER[:1])
    assert groups(tmp_path, told, **other).load(PROMPT) == float32(ANSWER[:1])


def test_a_group_of_another_prompt_is_ignored(path: Path, tmp_path: Path) -> None:
    """The same place in a prompt file that was changed is another prompt."""
    told: list[str] = []
    assert groups(tmp_path, told).load(replace(PROMPT, token_ids=(7, 9))) is None
    assert len(told) == 1


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


def flipped(position: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:position] + bytes([content[position] ^ 1]) + content[position:][1:]


DAMAGES = {
    "empty": cut(0),
    "cut in the header": cut(100),
    "cut in the values": cut(-3),
    "a bit in the values": flipped(-1),
    "a bit in the size of the header": flipped(0),
    "a huge header": lambda content: b"\xff" * 8 + content[8:],
    "a reason": lambda content: content.replace(b"length", b"lenght"),
    "no metadata": lambda content: content.replace(b"__metadata__", b"__metadaty__"),
    "text": lambda content: b"not a file of tensors",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_group_is_ignored(damage: str, path: Path, tmp_path: Path) -> None:
    """Whatever happened to the file, the group is generated again, and a note says so."""
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    told: list[str] = []
    assert groups(tmp_path, told).load(PROMPT) is None
    [note] = told
    assert note.startswith(f"{path}: ignored, the group is generated again (")


def test_a_disk_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    """What cannot be kept is noted; the run goes on."""
    (tmp_path / "groups").write_text("no folder")
    told: list[str] = []
    groups(tmp_path, told).save(PROMPT, ANSWER)
    [note] = told
    assert "not written, a resumed run generates the group again" in note


def test_only_the_step_that_runs_is_kept(tmp_path: Path) -> None:
    """The other steps' groups are deleted; no folder at all is fine too."""
    delete_other_steps(tmp_path, 1)
    for step in (11, 12, 13):
        groups(tmp_path, [], step=step).save(PROMPT, ANSWER)
    delete_other_steps(tmp_path, 12)
    assert [folder.name for folder in (tmp_path / "groups").iterdir()] == ["step_000012"]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 40, generator=generator),
        "norm": torch.randn(4, generator=generator),
        "stacked": torch.randn(3, 4, 20, generator=generator),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            lent = tensor.clone()
            yield name, lent
            lent.zero_()  # what went by is somebody else's memory

    probe = WeightsProbe()
    assert [name for name, _ in probe.watch(reused())] == list(tensors)
    return probe.digest()


def test_weights_are_told_apart() -> None:
    """A step of an optimizer, in any one tensor, shows; how a tensor lies in memory does not."""
    before = digest(weights())
    assert digest(weights()) == before
    assert digest({name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in weights().items()}) == before
    for name, tensor in weights().items():
        assert digest(weights() | {name: tensor + 1e-6}) != before
    assert digest({f"other {name}": tensor for name, tensor in weights().items()}) != before


def test_what_not_every_rank_gets_tells_nothing() -> None:
    """Digests of one policy are the same, whichever experts a rank is sent, with or without their scales; other tensors still count."""

    def digest(*names: str) -> str:
        probe = WeightsProbe({"experts.0", "experts.1"})
        list(probe.watch((name, torch.ones(3, device="meta" if not name else "cpu")) for name in names))
        return probe.digest()

    assert digest("a", "experts.0", "experts.0_scale_inv", "b") == digest("a", "experts.1", "", "b") == digest("a", "b")
    assert digest("a", "b", "c") != digest("a", "b")
