"""Every tensor of a checkpoint is accounted for exactly once."""

from __future__ import annotations

import dataclasses

import pytest

from rlbatch.api import Buffer, Direct, ExpertDown, ModelError, ModelFamily, Passthrough, Vocab
from rlbatch.weights.coverage import audit, check_names, expert_names, fp8_names

FAMILY = ModelFamily(
    name="toy",
    transformer={"num_layers": 2, "num_attention_heads": 2, "num_moe_experts": 2},
    vocab_size=5,
    rotary_base=1.0,
    tie_embeddings=False,
    max_sequence_length=8,
    mappings=(
        Vocab("embedding", "embed"),
        Direct("layers.{layer}.norm", "model.{layer}.norm"),
        Buffer("layers.{layer}.bias", "model.{layer}.bias", layers=[1]),
        ExpertDown("layers.{layer}.down", "model.{layer}.{expert}.down", layers=range(1, 2)),
    ),
    passthrough=(
        Passthrough("model.{layer}.{expert}.down", range(2, 3)),
        Passthrough("model.{layer}.eh_proj", range(2, 3)),
        Passthrough("model.{layer}.inv_freq", is_dropped=True),
    ),
    fp8=frozenset({"model.{layer}.{expert}.down"}),
)
TRAINED = ["embed", "model.0.norm", "model.1.norm", "model.1.bias", "model.1.0.down", "model.1.1.down"]
CARRIED = ["model.2.0.down", "model.2.1.down", "model.2.eh_proj"]
SCALES = [f"model.{layer}.{expert}.down_scale_inv" for layer in (1, 2) for expert in (0, 1)]


def test_a_complete_checkpoint() -> None:
    """Each name is in the group that it belongs to, in a bf16 and in a block-quantised checkpoint."""
    for scales in ([], SCALES):
        found = audit(FAMILY, [*TRAINED, *CARRIED, "model.0.inv_freq", *scales])
        assert found.is_complete
        assert (found.trained, found.carried, found.dropped, found.scales) == (TRAINED, CARRIED, ["model.0.inv_freq"], scales)


def test_what_is_missing_is_named() -> None:
    """Trained tensors, carried ones, and single scales of a quantised checkpoint; what is dropped need not be there."""
    found = audit(FAMILY, [*TRAINED[:-1], *CARRIED[1:], *SCALES[1:3]])
    assert found.missing == ["model.1.1.down", SCALES[0]]
    assert found.missing_carried == ["model.2.0.down", SCALES[3]]
    assert not found.is_complete and not found.unexpected


def test_what_may_be_absent() -> None:
    """Optional tensors: none of a layer is complete and told, some are not."""
    optional = tuple(dataclasses.replace(carried, is_optional=not carried.is_dropped) for carried in FAMILY.passthrough)
    family = dataclasses.replace(FAMILY, passthrough=optional)
    found = audit(family, [*TRAINED, *SCALES[:2]])
    assert found.is_complete and found.absent == CARRIED
    found = audit(family, [*TRAINED, CARRIED[0], *SCALES[:2]])
    assert (found.missing_carried, found.absent) == ([*CARRIED[1:], *SCALES[2:]], [])


def test_what_is_unexpected_is_named() -> None:
    """Layers too many, mappings of other layers, and scales of weights that are not fp8."""
    extra = ["model.3.norm", "model.0.bias", "model.0.0.down", "model.1.norm_scale_inv", "model.2.eh_proj_scale_inv"]
    assert audit(FAMILY, [*TRAINED, *CARRIED, *extra]).unexpected == extra
    with pytest.raises(ModelError, match=r"toy: does not use 5 tensors of the checkpoint, first model\.0\.0\.down, model\.0\.bias, "):
        check_names(FAMILY, [*TRAINED, *CARRIED, *extra])


def test_a_run_may_begin_without_what_is_carried() -> None:
    """But not without what is trained."""
    check_names(FAMILY, TRAINED)
    with pytest.raises(ModelError, match=r"toy: the checkpoint lacks 2 of its tensors, first embed, model\.0\.norm\."):
        check_names(FAMILY, TRAINED[2:])


def test_two_mappings_of_one_tensor_are_refused() -> None:
    """It would be loaded into both, and exported twice."""
    twice = dataclasses.replace(FAMILY, mappings=(*FAMILY.mappings, Direct("layers.{layer}.other", "model.{layer}.norm", layers=[1])))
    with pytest.raises(ModelError, match=r"toy: model\.1\.norm: more than one mapping each"):
        audit(twice, TRAINED)


def test_fp8_names() -> None:
    """Trained and carried weights with a listed pattern."""
    assert fp8_names(FAMILY) == {name.removesuffix("_scale_inv") for name in SCALES}


@pytest.mark.parametrize("module", ["model.1", "model.1.0", "model.1.0.down", "0.down"])
def test_weights_that_a_checkpoint_leaves_as_they_are(module: str) -> None:
    """By module, by one around it or by the end of its name: such a weight needs no scales, and is not quantised; it may have some."""
    family = dataclasses.replace(FAMILY, unquantised=frozenset({module, "model.1.0.dow", "odel.1", "n"}))
    left = {"model.1": {SCALES[0], SCALES[1]}, "0.down": {SCALES[0], SCALES[2]}}.get(module, {SCALES[0]})
    scales = [name for name in SCALES if name not in left]
    assert fp8_names(family) == {name.removesuffix("_scale_inv") for name in scales}
    assert audit(family, [*TRAINED, *CARRIED, *scales]).is_complete
    assert audit(family, [*TRAINED, *CARRIED, *SCALES]).is_complete
    assert not audit(FAMILY, [*TRAINED, *CARRIED, *scales]).is_complete
    assert audit(family, [*TRAINED, *CARRIED, *SCALES[:-1]]).missing_carried == [SCALES[-1]]


def test_experts_are_known_by_name() -> None:
    """Trained and carried ones, in their layers; nothing else is an expert's."""
    assert expert_names(FAMILY) == {f"model.{layer}.{expert}.down": expert for layer in (1, 2) for expert in (0, 1)}
