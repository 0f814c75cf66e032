"""`rollout=transformers`: the oracle for other engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.api import Prompt, RolloutContext, RolloutError, SamplingParams
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_transformers import TransformersOptions, TransformersRollout, kept_tokens
from tests import tiny_models

PROMPTS = [Prompt(4, "", (3, 1, 4, 1, 5)), Prompt(11, "", (9,)), Prompt(2, "", (2, 6, 5))]
STOP = 7


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_models.qwen3_moe()


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(model, tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture
def engine(folder: Path) -> TransformersRollout:
    return synced(folder)


def synced(folder: Path, batch: int = 512) -> TransformersRollout:
    """An engine with the folder's weights, which arrived by a sync."""
    backend = TransformersRollout(RolloutContext(folder, "cpu", "float32"), TransformersOptions(max_batch_size=batch))
    backend.update_weights(buckets(tensors(folder), 1, 0))
    return backend


def tensors(folder: Path, scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    source = HfTensors(folder)
    for name in source.names():
        yield name, source.read(name) * scale


@pytest.mark.parametrize("build", [tiny_models.mixtral, tiny_models.deepseek_v3, tiny_models.qwen2, tiny_models.qwen3, tiny_models.llama])
def test_a_sync_reaches_every_tensor_of_every_family(build: Any, tmp_path: Path) -> None:
    """Experts that the model stacks, under the names of the checkpoint, and their biases: afterwards the engine saves what was sent."""
    tiny_models.saved(build(), tmp_path / "folder")
    backend = TransformersRollout(RolloutContext(tmp_path / "folder", "cpu", "float32"), TransformersOptions())
    backend.update_weights(buckets(tensors(tmp_path / "folder", scale=3.0), 1, 1))
    tiny_models.saved(backend._model, tmp_path / "again")
    again = HfTensors(tmp_path / "again")
    assert [name for name, sent in tensors(tmp_path / "folder", scale=3.0) if not again.read(name).equal(sent)] == []


def params(**changes: Any) -> SamplingParams:
    values = {"temperature": 1.0, "max_response_tokens": 12, "stop_token_ids": (STOP,), "samples_per_prompt": 6, "seed": (0, 1)}
    return SamplingParams(**{**values, **changes})


def tokens_of(answers: Iterable[Any]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in completions] for completions in answers]


def test_a_sample_does_not_depend_on_its_batch(folder: Path) -> None:
    """The same (seed, step, prompt, sample) gives the same tokens alone, among other prompts, in another order, in smaller batches."""
    together = tokens_of(synced(folder).generate(PROMPTS, params()))
    small = synced(folder, batch=4)
    assert tokens_of(small.generate(PROMPTS, params())) == together
    assert tokens_of(small.generate(PROMPTS[::-1], params())) == together[::-1]
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert tokens_of(small.generate([prompt], params())) == [expected]
        assert tokens_of(small.generate([prompt], params(samples_per_prompt=2))) == [expected[:2]]


def test_a_sample_depends_on_all_that_names_it(engine: TransformersRollout) -> None:
    """Another run seed, step, prompt id or sample index is another sample."""
    first = tokens_of(engine.generate(PROMPTS[:1], params()))[0]
    assert len({tuple(tokens) for tokens in first}) == len(first)
    renamed = [Prompt(5, "", PROMPTS[0].token_ids)]
    for other in (
        engine.generate(PROMPTS[:1], params(seed=(1, 1))),
        engine.generate(PROMPTS[:1], params(seed=(0, 2))),
        engine.generate(renamed, params()),
    ):
        assert tokens_of(other)[0] != first


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_the_models(temperature: float, model: torch.nn.Module, engine: TransformersRollout) -> None:
    """Of every sampled token at the temperature (1, for the most likely token), against a forward pass without cache or padding."""
    for prompt, completions in zip(PROMPTS, engine.generate(PROMPTS, params(temperature=temperature)), strict=True):
        for completion in completions:
            ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
            with torch.no_grad():
                logprobs = (model(ids[None]).logits[0, :-1] / (temperature or 1.0)).log_softmax(-1)
            expected = logprobs.gather(-1, ids[1:, None])[len(prompt.token_ids) - 1 :, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-5, rtol=0)
            if temperature == 0:
                assert logprobs.argmax(-1)[len(prompt.token_ids) - 1 :].tolist() == list(completion.token_ids)


def test_samples_follow_the_distribution(model: torch.nn.Module, engine: TransformersRollout) -> None:
    """Frequencies of 4000 first tokens are the model's probabilities at temperature 0.6, within 5 standard errors."""
    count, temperature = 4000, 0.6
    answers = list(engine.generate(PROMPTS[:1], params(temperature=temperature, max_response_tokens=1, samples_per_prompt=count)))
    drawn = torch.tensor([completion.token_ids[0] for completion in answers[0]])
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1]
    expected = (logits / temperature).softmax(-1)
    frequency = torch.bincount(drawn, minlength=len(expected)) / count
    assert ((frequency - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1 / count).all()


@pytest.mark.parametrize(
    ("top_p", "top_k", "want"), [(0.5, 0, [0, 1]), (0.4, 0, [1]), (1.0, 3, [0, 1, 3]), (0.7, 3, [0, 1]), (1e-9, 0, [1])]
)
def test_kept_tokens(top_p: float, top_k: int, want: list[int]) -> None:
    """The fewest whose probabilities reach top_p, at least one; of the top_k, whose probabilities then sum to 1; lower ids first."""
    probabilities = torch.tensor([[0.15, 0.45, 0.1, 0.15, 0.15]])
    assert kept_tokens(probabilities.log(), top_p, top_k)[0].nonzero().flatten().tolist() == want


def test_samples_say_what_they_were_chosen_from(model: torch.nn.Module, engine: TransformersRollout) -> None:
    """Log-probs are of the distribution over the kept tokens, which are those of the model's."""
    for prompt, completions in zip(PROMPTS, engine.generate(PROMPTS, params(temperature=0.8, top_p=0.7, top_k=9)), strict=True):
        for completion in completions:
            ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1] / 0.8
            is_kept = kept_tokens(logits, 0.7, 9)
            assert completion.kept == [row.nonzero().flatten().tolist() for row in is_kept]
            expected = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1).gather(-1, ids[len(prompt.token_ids) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-5, rtol=0)


def test_the_stop_token_ends_a_sample_and_is_kept(engine: TransformersRollout) -> None:
    """Nothing follows it, and the sample's reason is `stop`; the others have the full length and `length`."""
    completions = [c for answers in engine.generate(PROMPTS, params(samples_per_prompt=60)) for c in answers]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert 0 < len(stopped) < len(completions)
    for completion in completions:
        ids = list(completion.token_ids)
        assert len(ids) == len(completion.logprobs)
        if completion.finish_reason == "stop":
            assert ids.index(STOP) == len(ids) - 1
        else:
            assert STOP not in ids
            assert len(ids) == 12


def test_a_sync_replaces_all_weights(folder: Path, engine: TransformersRollout) -> None:
    """Two syncs in a row: the engine answers with the second weights, then again with the first."""
    before = list(engine.generate(PROMPTS, params()))
    engine.update_weights(buckets(tensors(folder, scale=0.5), 1, 1))
    halved = list(engine.generate(PROMPTS, params()))
    assert [c.logprobs for a in halved for c in a] != [c.logprobs for a in before for c in a]
    engine.update_weights(buckets(tensors(folder), 1, 2))
    assert list(engine.generate(PROMPTS, params())) == before


def test_engines_start_without_the_policys_weights(folder: Path) -> None:
    """Whatever the caller's seed: an engine that no sync reached must not look as if one had."""
    answers = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        engine = TransformersRollout(RolloutContext(folder, "cpu", "float32"), TransformersOptions())
        answers.append(list(engine.generate(PROMPTS, params())))
        assert torch.initial_seed() == seed
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named[:-1], r"weight sync: 1 parameters of the engine were not written, first {last}"),
        (
            lambda named: [*named, ("model.extra.weight", torch.zeros(1))],
            r"weight sync: model\.extra\.weight is no parameter of the engine",
        ),
        (lambda named: [*named, named[0]], r"weight sync: {first} is written twice"),
        (lambda named: [], r"weight sync: \d+ parameters of the engine were not written"),
    ],
    ids=["missing", "unknown", "twice", "nothing"],
)
def test_a_sync_must_be_complete(change: Any, message: str, folder: Path, engine: TransformersRollout) -> None:
    """Missing, unknown and doubled names are errors with the name."""
    named = list(tensors(folder))
    with pytest.raises(RolloutError, match=message.format(first=named[0][0], last=named[-1][0]) if "{" in message else message):
        engine.update_weights(buckets(change(named), 1, 0))


def test_a_sync_never_broadcasts(folder: Path, engine: TransformersRollout) -> None:
    """A tensor of another shape is an error: torch would fill a matrix with a single row."""
    named = [(name, tensor[:1] if name == "lm_head.weight" else tensor) for name, tensor in tensors(folder)]
    with pytest.raises(RolloutError, match=r"weight sync: lm_head\.weight has shape \[1, 32\], the engine's has \[61, 32\]"):
        engine.update_weights(buckets(named, 1, 0))


def test_tied_models(tmp_path: Path) -> None:
    """A checkpoint without lm_head fills a model that shares it with the embedding, dense models too."""
    model = tiny_models.llama(tie_word_embeddings=True)
    engine = synced(tiny_models.saved(model, tmp_path))
    [[completion]] = engine.generate(PROMPTS[:1], params(samples_per_prompt=1, temperature=0.0, max_response_tokens=1))
    with torch.no_grad():
        assert completion.token_ids[0] == int(model(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1].argmax())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_of_the_checkpoint_are_taken(dtype: str, tmp_path: Path) -> None:
    """A router's score correction arrives like any weight, is kept in float32, and must not be left out; the folder may be an fp8 one."""
    model = tiny_models.deepseek_v3()
    folder = tiny_models.saved(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    backend = TransformersRollout(RolloutContext(folder, "cpu", dtype), TransformersOptions())
    backend.update_weights(buckets(tensors(folder), 1, 0))
    ours, theirs = backend._model.state_dict(), model.state_dict()
    biases = [name for name in theirs if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name in biases:
        assert theirs[name].abs().min() > 0
        assert torch.equal(ours[name], theirs[name])
    assert ours["model.embed_tokens.weight"].dtype == getattr(torch, dtype)
    with pytest.raises(RolloutError, match=r"1 parameters of the engine were not written, first .*e_score_correction_bias"):
        backend.update_weights(buckets(((name, tensor) for name, tensor in tensors(folder) if name != biases[0]), 1, 0))
