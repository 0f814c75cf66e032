"""Weights in e4m3 blocks: bitwise the reference definition, stable, and whole or in parts the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlbatch.api import DataError
from rlbatch.weights import quantize as module
from rlbatch.weights.quantize import check_scales, dequantize, quantize, quantize_at_once, scales_shape

SHAPES = [(1, 1), (128, 128), (130, 257), (300, 40), (7, 1000), (256, 384)]


def reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Block by block, in plain torch: maximum / 448, divide, round."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(scales_shape(rows, columns))
    for i, j in torch.cartesian_prod(torch.arange(scales.shape[0]), torch.arange(scales.shape[1])).view(-1, 2).tolist():
        block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        scales[i, j] = weight[block].float().abs().max() / 448.0
        values[block] = (weight[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def plain(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    expanded = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
    return (values.float() * expanded).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """To compare NaN and the sign of 0 too."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def weights(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values over many orders of magnitude, so that blocks have subnormal values, zeros and ties."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    return (torch.randn(shape, generator=generator) * torch.logspace(-4, 3, shape[0])[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_scales_are_the_reference_s(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Scales are each block's maximum / 448 exactly, partial blocks too; values are rounded as torch rounds; the weight is left alone."""
    weight = weights(shape, dtype)
    before = weight.clone()
    values, scales = quantize(weight)
    wanted, wanted_scales = reference(weight)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(bits(values), bits(wanted))
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (600, 300)])
def test_what_gpus_compute_is_the_same(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks an operation, in one step or in several, also with NaN and infinity: bitwise the values and scales of `quantize`."""
    monkeypatch.setattr(module, "_AT_ONCE", 128 * 2 * 300)
    weight = weights(shape, dtype)
    for spoiled in (None, float("nan"), float("-inf")):
        if spoiled is not None:
            weight[-1, -1] = spoiled
        before = weight.clone()
        expected = quantize(weight)
        found = torch.empty_like(expected[0]), torch.empty_like(expected[1])
        quantize_at_once(weight, *found)
        assert all(torch.equal(bits(ours), bits(theirs)) for ours, theirs in zip(found, expected, strict=True))
        assert torch.equal(bits(weight), bits(before))


def test_every_quotient_is_rounded_to_the_nearest_even() -> None:
    """All 2^16 upper halves of a float32, each alone and next to a tie, against torch's conversion."""
    upper = torch.arange(65536, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        quotients = (upper | lower).view(torch.float32)
        quotients = quotients[quotients.abs() <= 448]
        rest = torch.cat([quotients, torch.zeros(-len(quotients) % 127)]).view(127, -1)
        matrix = torch.cat([torch.full_like(rest[:1], 448.0), rest])  # so every scale is 1
        assert torch.equal(bits(quantize(matrix)[0]), bits(matrix.to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantised_values_are_the_float32_formula_s(dtype: torch.dtype) -> None:
    """All 256 values, NaN and negative 0 among them, under small and large scales, rounded once."""
    values = torch.arange(256, dtype=torch.uint8).repeat(129, 1).view(torch.float8_e4m3fn)
    for scale in (1e-38, 3.7e-5, 0.0123, 1.0, 3e7):
        scales = torch.tensor([[scale, 1.7 * scale], [0.3 * scale, scale]])
        ours, wanted = dequantize(values, scales, dtype), plain(values, scales, dtype)
        assert torch.equal(ours.isnan(), wanted.isnan())
        assert torch.equal(bits(ours)[~ours.isnan()], bits(wanted)[~ours.isnan()])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_second_quantisation_changes_nothing(shape: tuple[int, int]) -> None:
    """bf16 -> fp8 -> bf16 -> fp8 -> bf16: values and scales stay, bit by bit."""
    values, scales = quantize(weights(shape))
    once = dequantize(values, scales)
    again, again_scales = quantize(once)
    assert torch.equal(bits(again), bits(values))
    assert torch.equal(again_scales, scales)
    assert torch.equal(dequantize(again, again_scales), once)


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 300), (0, 300)), ((5, 130), (100, 260)), ((127, 129), (255, 257)), ((128, 256), (7, 8))]
)
def test_a_part_is_what_the_whole_has_there(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    """Also where it cuts blocks."""
    values, scales = quantize(weights((300, 300)))
    part, blocks = (slice(*rows), slice(*columns)), tuple(slice(a // 128, -(-b // 128)) for a, b in (rows, columns))
    ours = dequantize(values[part], scales[blocks], first=(rows[0] % 128, columns[0] % 128))
    assert torch.equal(ours, dequantize(values, scales)[part])


def test_a_block_of_zeros_has_scale_one() -> None:
    """The reference divides 0 by 0 there."""
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    weight[3, 200] = -2.0
    values, scales = quantize(weight)
    assert scales.tolist() == [[1.0, torch.tensor(2.0).div(448).item()]]
    assert torch.equal(dequantize(values, scales), weight)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0, -1.0, 2.0**120])
def test_impossible_scales_are_refused(wrong: float) -> None:
    """With file, tensor, block and value."""
    scales = torch.ones(2, 3)
    scales[1, 2] = wrong
    with pytest.raises(DataError, match=r"model\.safetensors: a\.weight_scale_inv: scales must .* at block \[1, 2\] is .* \(1 of 6"):
        check_scales(scales, "model.safetensors: a.weight_scale_inv")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_show_in_their_scales(wrong: float) -> None:
    """So that nobody stores them unnoticed; other blocks are quantised, by the plain formula that GPUs take or in strips."""
    weight = weights((256, 256))
    weight[10, 200] = wrong
    values, scales = quantize(weight)
    with pytest.raises(DataError, match=r"block \[0, 1\]"):
        check_scales(scales, "a")
    assert torch.equal(bits(values[128:]), bits(quantize(weight[128:])[0]))
    assert torch.equal(bits(values[:128, :128]), bits(quantize(weight[:128, :128])[0]))


def test_threads_change_nothing() -> None:
    """A matrix that is worth several threads, which leave torch's number of threads as it was."""
    weight = weights((1100, 1000))
    before = torch.get_num_threads()
    alone = quantize(weight)
    torch.set_num_threads(3)
    try:
        values, scales = quantize(weight)
        whole = dequantize(values, scales)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(values), bits(alone[0])) and torch.equal(scales, alone[1])
    assert torch.equal(whole, dequantize(*alone))
