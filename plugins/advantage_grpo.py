"""``grpo`` and ``dr_grpo``: a sample is compared with the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rlbatch.api import AdvantageEstimator, AdvantageInputs, AdvantageSpec, always, hookimpl
from rlbatch.api.values import Range, option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GrpoOptions:
    """``algorithm.advantage_options.*`` of ``grpo``."""

    eps: Annotated[float, Range(least=0, most=1e6)] = option(1e-6, "Added to the std (verl, slime 1e-6; TRL 1e-4; OpenRLHF 1e-9).")
    std: Literal["group", "batch"] = option("group", "Whose standard deviation: of the sample's group, or of all rewards of the step.")


def build_grpo(options: GrpoOptions) -> AdvantageEstimator:
    """``A_i = (r_i - mean(group)) / (std + eps)``, std with ddof 1 (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

    A group of one sample has mean 0 and std 1, as in verl; with ``std=batch`` the step's std. A group of equal rewards gets exactly
    0. Returns [N] float64.
    """

    def grpo(inputs: AdvantageInputs) -> Tensor:
        import torch

        centred, group, sizes = _centred(inputs)
        if options.std == "batch":
            shifted = inputs.rewards - inputs.rewards[0]
            squares, degrees = (shifted - shifted.mean()).square().sum()[None], sizes.sum()[None] - 1
            of_sample = torch.zeros_like(group)
        else:
            squares, degrees, of_sample = centred.new_zeros(len(sizes)).index_add(0, group, centred.square()), sizes - 1, group
        std = (squares / degrees.clamp(min=1)).sqrt().where(degrees > 0, 0.0)
        # Of equal rewards, and of one alone.
        return centred / (std.where(std > 0, 1.0)[of_sample] + options.eps)

    return grpo


def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """``A_i = r_i - mean(group)``, without the std (Liu et al. 2025, arXiv 2503.20783).

    Dividing by the std gives more weight to prompts that are almost always or almost never solved. A group of one sample keeps its raw
    reward. Its loss is ``algorithm.loss_aggregation=sequence_sum_norm``.

    Returns:
        [N] float64.
    """
    return _centred(inputs)[0]


def _centred(inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean [N] float64, the group of each sample [N], and the size of each group."""
    rewards, group, sizes = inputs.in_groups()
    means = rewards.new_zeros(len(sizes)).index_add(0, group, rewards) / sizes
    return rewards - means.where(sizes > 1, 0.0)[group], group, sizes


@hookimpl
def rlbatch_register_advantage_estimators() -> Mapping[str, AdvantageSpec]:
    """Names of this module."""
    return {
        "grpo": AdvantageSpec(build_grpo, GrpoOptions, min_group_size=2),
        "dr_grpo": AdvantageSpec(always(dr_grpo), min_group_size=2),
    }
