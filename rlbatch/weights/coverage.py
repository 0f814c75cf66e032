"""Tells which tensors of a checkpoint are used, carried or left out, by name alone: every one exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

from rlbatch.api import ModelError, ModelFamily, ParamMapping, Passthrough
from rlbatch.weights.codec import hf_patterns, is_expert
from rlbatch.weights.quantize import SCALE_SUFFIX

SHOWN = 3
"""Most names that a message lists."""
FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Audit:
    """Every name of a checkpoint in exactly one group, in the checkpoint's order; and names that it lacks.

    Attributes:
        trained: What mappings name: parameters and buffers.
        carried: Not trained, but exported with the rest.
        dropped: Left out on purpose.
        scales: Scales of block-quantised weights, trained or carried.
        unexpected: Named by nothing.
        missing: Tensors that mappings name, and scales of fp8 weights.
        missing_carried: Tensors to be carried.
        absent: Tensors to be carried of which the checkpoint has none in their layer, and need not.
    """

    trained: list[str]
    carried: list[str]
    dropped: list[str]
    scales: list[str]
    unexpected: list[str]
    missing: list[str]
    missing_carried: list[str]
    absent: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether no name is missing and none is unexpected."""
        return not (self.unexpected or self.missing or self.missing_carried)


def layers_of(family: ModelFamily, mapping: ParamMapping) -> Iterable[int | None]:
    """The layers of a mapping; (None,) outside the layers."""
    if "{layer}" not in mapping.megatron:
        return (None,)
    return range(family.num_layers) if mapping.layers is None else mapping.layers


def trained_names(family: ModelFamily) -> dict[str, str]:
    """Checkpoint name -> its pattern, of every tensor that the mappings make.

    Raises:
        ModelError: two mappings make one tensor.
    """
    experts = range(family.num_experts)
    pairs = [
        (pattern.format(layer=layer, expert=expert), pattern)
        for mapping in family.mappings
        for layer in layers_of(family, mapping)
        for expert in (experts if is_expert(mapping) else (None,))
        for pattern in hf_patterns(mapping)
    ]
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ModelError(f"model family {family.name}: {_list(twice)}: more than one mapping each. Correct them.")
    return dict(pairs)


def passthrough_names(family: ModelFamily, *, is_dropped: bool) -> dict[str, str]:
    """Checkpoint name -> its pattern, of what is carried or, with ``is_dropped``, left out."""
    return {
        name: passthrough.hf
        for passthrough in family.passthrough
        if passthrough.is_dropped == is_dropped
        for name in _expanded(family, passthrough)
    }


def fp8_names(family: ModelFamily) -> set[str]:
    """Names of the weights that are in fp8 where this model is block-quantised, trained or carried."""
    named = trained_names(family) | passthrough_names(family, is_dropped=False)
    return {name for name, pattern in named.items() if pattern in family.fp8 and not _is_left_out(family, name)}


def _is_left_out(family: ModelFamily, name: str) -> bool:
    """Whether a weight's module, one around it, or the end of its name (``o_proj``) is among those that stay as they are."""
    parts = name.removesuffix(".weight").split(".") if family.unquantised else []
    return any(
        ".".join(parts[:count]) in family.unquantised or ".".join(parts[-count:]) in family.unquantised
        for count in range(1, 1 + len(parts))
    )


def expert_names(family: ModelFamily) -> dict[str, int]:
    """Checkpoint name -> the routed expert that it is of, trained or carried."""
    trained = [
        (pattern, layer)
        for mapping in family.mappings
        if is_expert(mapping)
        for layer in layers_of(family, mapping)
        for pattern in hf_patterns(mapping)
    ]
    carried = [
        (passthrough.hf, layer)
        for passthrough in family.passthrough
        if "{expert}" in passthrough.hf
        for layer in passthrough.layers or (None,)
    ]
    return {
        pattern.format(layer=layer, expert=expert): expert for pattern, layer in trained + carried for expert in range(family.num_experts)
    }


def audit(family: ModelFamily, names: Iterable[str], *, is_quantised: bool = False) -> Audit:
    """Sorts the names of a checkpoint, each once. It is taken for a block-quantised one if it has any scales, or is said to be; each of
    ``fp8_names`` must then have them.
    """
    trained, carried = trained_names(family), passthrough_names(family, is_dropped=False)
    dropped = passthrough_names(family, is_dropped=True)
    named = trained | carried
    quantised = {name + SCALE_SUFFIX: name for name, pattern in named.items() if pattern in family.fp8}
    present = dict.fromkeys(names)
    found: dict[str, list[str]] = {group: [] for group in ("trained", "carried", "dropped", "scales", "unexpected")}
    modules = _modules(named) if any(map(_is_frequencies, present)) else frozenset()
    for name in present:
        is_left_out = name in dropped or _is_redundant(family, name, modules)
        groups = {"trained": name in trained, "carried": name in carried, "scales": name in quantised, "dropped": is_left_out}
        found[next((group for group, belongs in groups.items() if belongs), "unexpected")].append(name)
    in_fp8 = fp8_names(family) if found["scales"] or is_quantised else set()
    wanted = {scale: name for scale, name in quantised.items() if name in in_fp8}
    missing = [name for name in trained if name not in present] + [s for s, name in wanted.items() if name in trained and s not in present]
    absent = _absent(family, present)
    without = [name for name in carried if name not in present and name not in absent]
    without += [s for s, name in wanted.items() if name in carried and s not in present and name not in absent]
    return Audit(**found, missing=missing, missing_carried=without, absent=list(absent))


def check_names(family: ModelFamily, names: Iterable[str]) -> None:
    """Refuses a checkpoint with tensors that the family does not use (computing without them would be another model), or that lacks some.

    Tensors to be carried may be missing: exports then lack them too.

    Raises:
        ModelError: tensors that nothing names, or that are not there.
    """
    found = audit(family, names)
    if found.unexpected:
        unused = sorted(found.unexpected)
        raise ModelError(
            f"model family {family.name}: does not use {len(unused)} tensors of the checkpoint, first {_list(unused)}. "
            "Use a family that implements them."
        )
    if found.missing:
        raise ModelError(
            f"model family {family.name}: the checkpoint lacks {len(found.missing)} of its tensors, first {_list(found.missing)}. "
            "Complete the folder, or correct config.json."
        )


def _absent(family: ModelFamily, present: Container[str]) -> dict[str, None]:
    """Optional names of the layers that have none of them."""
    by_layer: dict[int | None, list[str]] = {}
    for passthrough in family.passthrough:
        if passthrough.is_optional:
            for layer in passthrough.layers or (None,):
                by_layer.setdefault(layer, []).extend(_expanded(family, replace(passthrough, layers=None if layer is None else (layer,))))
    return dict.fromkeys(name for names in by_layer.values() if not any(name in present for name in names) for name in names)


def _expanded(family: ModelFamily, passthrough: Passthrough) -> Iterator[str]:
    layers: Iterable[int | None] = (None,)
    if "{layer}" in passthrough.hf:
        layers = range(family.num_layers) if passthrough.layers is None else passthrough.layers
    experts = range(family.num_experts) if "{expert}" in passthrough.hf else (None,)
    return (passthrough.hf.format(layer=layer, expert=expert) for layer in layers for expert in experts)


def _is_redundant(family: ModelFamily, name: str, modules: Container[str]) -> bool:
    """RoPE frequencies of the model's modules, which follow from the config, and a tied output layer's copy of the embedding."""
    is_tied = family.tie_embeddings and name == "lm_head.weight"
    return is_tied or (_is_frequencies(name) and name.removesuffix(FREQUENCIES) in modules)


def _is_frequencies(name: str) -> bool:
    return name.endswith(FREQUENCIES)


def _modules(names: Iterable[str]) -> frozenset[str]:
    """All modules around tensors: of ``model.norm.weight`` they are ``model`` and ``model.norm``."""
    paths = (name.split(".") for name in names)
    return frozenset(".".join(path[:count]) for path in paths for count in range(1, len(path)))


def _list(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:SHOWN])
