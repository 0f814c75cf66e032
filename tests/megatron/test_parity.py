"""Megatron's models are Hugging Face's: the same logits, the same gradients, and the same tensors after a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.schema import LayoutConfig
from rlbatch.testing.gradients import gradients, worst
from rlbatch.testing.hugging_face import gradients_of
from rlbatch.testing.parity import forward_and_export, round_trip, sequences
from tests import tiny_models
from tests.megatron.parity import padded_vocabulary

TOLERANCE = 1e-4
VOCAB = tiny_models.COMMON["vocab_size"]
MODELS = {
    "qwen3_moe": lambda: tiny_models.qwen3_moe(),
    "qwen3_moe tied": lambda: tiny_models.qwen3_moe(tie_word_embeddings=True),
    "qwen3_moe unnormalised": lambda: tiny_models.qwen3_moe(
        norm_topk_prob=False, rope_parameters={"rope_type": "default", "rope_theta": 50.0}
    ),
    "qwen3_moe dense layers": lambda: tiny_models.qwen3_moe(decoder_sparse_step=2, num_hidden_layers=6, mlp_only_layers=[3]),
    "deepseek_v3": lambda: tiny_models.deepseek_v3(),
    "deepseek_v3 tied, unnormalised, no dense layer": lambda: tiny_models.deepseek_v3(
        tie_word_embeddings=True, norm_topk_prob=False, first_k_dense_replace=0, rope_parameters=tiny_models.PLAIN
    ),
    "deepseek_v3 yarn's other scales": lambda: tiny_models.deepseek_v3(
        rope_parameters={**tiny_models.YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 8, "beta_slow": 2}
    ),
    "deepseek_v3 yarn's factor": lambda: tiny_models.deepseek_v3(rope_parameters={**tiny_models.YARN, "attention_factor": 1.3}),
    "deepseek_v3 dense": lambda: tiny_models.deepseek_v3(first_k_dense_replace=4),
    "moonlight": lambda: tiny_models.moonlight(),
    "mixtral": lambda: tiny_models.mixtral(),
    "qwen2": lambda: tiny_models.qwen2(),
    "qwen2 tied": lambda: tiny_models.qwen2(tie_word_embeddings=True),
    "qwen3": lambda: tiny_models.qwen3(),
    "qwen3 tied": lambda: tiny_models.qwen3(tie_word_embeddings=True, head_dim=10),
    "llama": lambda: tiny_models.llama(),
    "llama tied": lambda: tiny_models.llama(tie_word_embeddings=True),
}
ONE = LayoutConfig(world_size=1)
TP2 = LayoutConfig(world_size=2, tp_size=2, etp_size=2)
TP2_DENSE = LayoutConfig(world_size=2, tp_size=2)
PP2 = LayoutConfig(world_size=2, pp_size=2, first_stage_layers=1)
EP2 = LayoutConfig(world_size=2, ep_size=2)
LAYOUTS = {"1 rank": ONE, "tp2": TP2, "tp2 dense": TP2_DENSE, "pp2": PP2, "ep2": EP2}
ON_TWO_RANKS = {
    "qwen3_moe": ("tp2", "pp2", "ep2"),
    "qwen3_moe tied": ("tp2", "pp2", "ep2"),
    "deepseek_v3": ("tp2", "pp2", "ep2"),
    "moonlight": ("tp2",),
    "mixtral": ("tp2", "ep2"),
    "qwen2": ("tp2 dense",),
    "qwen2 tied": ("pp2",),
    "llama": ("tp2 dense", "pp2"),
    "llama tied": ("tp2 dense", "pp2"),
}
OTHERS = {"qwen3_moe tied", "moonlight", "mixtral", "llama"}
"""On two ranks they differ in nothing from another family that is tried there."""
CASES = [
    pytest.param(model, layout, marks=pytest.mark.long("models") if layout != "1 rank" and model in OTHERS else ())
    for model in MODELS
    for layout in ("1 rank", *ON_TWO_RANKS.get(model, ()))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[torch.Tensor]]]:
    """Folder and transformers' own logits of each test sequence."""
    made = {}
    for name, build in MODELS.items():
        model = build()
        folder = tiny_models.saved(model, tmp_path_factory.mktemp("model"))
        with torch.no_grad():
            made[name] = (folder, [model(tokens[None]).logits[0] for tokens in sequences(VOCAB)])
    return made


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_logits_and_export_are_hugging_faces(model: str, layout: str, models, rank_pool) -> None:
    """fp32 logits within 1e-4 for every token of a ragged pack; the export has the checkpoint's names, each once, bitwise equal."""
    folder, expected = models[model]
    for logits, exported in rank_pool(LAYOUTS[layout].world_size).run(forward_and_export, str(folder), LAYOUTS[layout], VOCAB):
        assert [len(ours) for ours in logits] == [len(theirs) for theirs in expected]
        assert max(float((ours[:, :VOCAB] - theirs).abs().max()) for ours, theirs in zip(logits, expected, strict=True)) < TOLERANCE
        source = HfTensors(folder)
        assert sorted(name for name, _ in exported) == sorted(source.names())
        assert [name for name, tensor in exported if not torch.equal(tensor, source.read(name))] == []
    assert max(float(theirs.abs().max()) for theirs in expected) > 1.0, "logits of a size at which an error would show"


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_hugging_faces(model: str, models, rank_pool, tmp_path: Path) -> None:
    """fp32 gradient of a GRPO loss with KL and entropy terms: for every parameter within 1e-4 (relative L2) of transformers' autograd."""
    got = rank_pool(1).run(gradients, str(models[model][0]), ONE, 1000, "token_mean")[0]
    want = gradients_of(MODELS[model](), tmp_path, "token_mean")
    untrained = set(want) - set(got)
    assert all(name.endswith("e_score_correction_bias") for name in untrained)
    error, name = worst(got, {name: want[name] for name in got})
    assert error < TOLERANCE, f"{name}: {error:.2e}"
    assert min(float(want[name].norm()) for name in got) > 0.0


@pytest.mark.parametrize(
    ("model", "layout"),
    [("qwen3_moe", "ep2"), ("qwen3_moe", "tp2"), ("qwen3_moe tied", "pp2"), ("llama tied", "tp2 dense"), ("deepseek_v3", "tp2")],
)
def test_round_trip_is_bitwise(model: str, layout: str, models, tmp_path: Path, rank_pool) -> None:
    """Megatron -> Hugging Face folder of several files -> Megatron changes no parameter; transformers reads the folder too."""
    from transformers import AutoModelForCausalLM

    folder, expected = models[model]
    assert rank_pool(2).run(round_trip, str(folder), str(tmp_path / "again"), LAYOUTS[layout]) == [[], []]
    assert len(list((tmp_path / "again").glob("model-*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for tokens, theirs in zip(sequences(VOCAB), expected, strict=True):
            torch.testing.assert_close(again(tokens[None]).logits[0], theirs)


def test_padding_of_the_vocabulary_takes_no_probability(models, rank_pool) -> None:
    """61 tokens over 2 ranks: whatever the 62nd row holds, log-probs are those over 61 tokens, and it is not exported."""
    assert VOCAB % 2
    folder, expected = models["qwen3_moe"]
    for logprobs, exported in rank_pool(2).run(padded_vocabulary, str(folder), TP2, VOCAB):
        for ours, logits, tokens in zip(logprobs, expected, sequences(VOCAB), strict=True):
            theirs = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(ours[1:], theirs, atol=TOLERANCE, rtol=0)
        assert {name: len(tensor) for name, tensor in exported.items()} == dict.fromkeys(
            ("model.embed_tokens.weight", "lm_head.weight"), VOCAB
        )
        assert all(torch.equal(tensor, HfTensors(folder).read(name)) for name, tensor in exported.items())
