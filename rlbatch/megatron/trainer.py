"""The trainer: one rank's share of the policy on Megatron-core, with three operations: score tokens, update, stream the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from rlbatch.algorithms.objective import SUMS, LossPart, Objective
from rlbatch.api import Microbatch, ModelError, ModelFamily, OffloadStrategy, PluginError
from rlbatch.config.schema import Config
from rlbatch.foreign_code import foreign_code
from rlbatch.megatron import parallel
from rlbatch.megatron.activation_offload import ActivationOffload
from rlbatch.megatron.dispatcher import longest_pack
from rlbatch.megatron.finite import MAX_GRADIENT_NORM, FiniteCheck, NotFinite, any_rank, find_token, norm_of_all
from rlbatch.megatron.gradients import GradientMemory
from rlbatch.megatron.host_memory import HostMemory
from rlbatch.megatron.microbatch_inputs import MicrobatchInputs, padded_to
from rlbatch.megatron.optimizer import build_optimizer, build_schedule, held_state, host_state_bytes, optimizer_spec, wrap_data_parallel
from rlbatch.megatron.policy import Policy
from rlbatch.megatron.rounding import rounded
from rlbatch.megatron.routing_replay import PackRouting, RoutedPack, RoutingReplay
from rlbatch.metrics.device_time import MODULE
from rlbatch.weights.params import NamedTensor

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Any]]


class Trainer(Policy):
    """Model, optimizer and schedules of this rank. Every method is a collective over all ranks.

    Args:
        config: Config of the job; model-parallel groups must exist.
        family: Family of the model.
        offload: Strategy that may change how the optimizer is built, moves its state and releases gradients.
    """

    def __init__(self, config: Config, family: ModelFamily, offload: OffloadStrategy) -> None:
        super().__init__(config, family)
        self._device = torch.cuda.current_device()
        self.megatron_config.finalize_model_grads_func = _finalize_without_scaling
        self._chunks = wrap_data_parallel(self.megatron_config, self.modules, overlap=config.layout.overlap_grad_reduce)
        self._offload, self._strategy = offload, f"offload={config.offload.name}"
        with foreign_code(self._strategy):
            spec = offload.configure_optimizer(optimizer_spec(config.optimizer, config.train.precision))
        self.optimizer = build_optimizer(spec, self._chunks)
        self.schedule = build_schedule(self.optimizer, config.optimizer, config.train.steps)
        self.replay = RoutingReplay(self.stages, self._device) if config.algorithm.routing_replay != "none" else None
        self._compared: PackRouting | None = None
        self._gradients = GradientMemory(self._chunks, self.optimizer)
        self._finite = FiniteCheck(self.params, self._map.origin, self.optimizer)
        self._reference: dict[str, Tensor] = {}
        self._is_reference = False
        self._host_memory = HostMemory(self._strategy)
        self._activations = ActivationOffload.of(self.modules, config.layout.offload_modules)
        with foreign_code(self._strategy):
            offload.attach(self)

    @property
    def routed_layers(self) -> list[list[int]]:
        """Indices of the layers of each pipeline stage whose routing is replayed or recorded."""
        return self.replay.stages if self.replay else []

    def weights_changed(self) -> None:
        """Updates the optimizer's main weights after the weights were replaced; see ``Policy``."""
        self.settle()
        self.optimizer.reload_model_params()

    def settle(self) -> None:
        """Waits for an offload strategy that is bringing optimizer state back; call it before reading or writing that state."""
        with foreign_code(self._strategy):
            self._offload.settle()

    def optimizer_state(self) -> Iterable[Tensor]:
        """This rank's fp32 main weights (where the model's are bf16) and moments that are on the accelerator (``MemoryHandles``)."""
        found = (value for value in held_state(self.optimizer) if value.is_cuda or not torch.cuda.is_available())
        return {value.untyped_storage()._cdata: value for value in found if value.dim()}.values()

    def weights(self) -> Iterable[Tensor]:
        """The buffers that hold all parameters (``MemoryHandles``)."""
        return [buffer.param_data for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def host_memory(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """Allocates host memory for an offload strategy; see ``MemoryHandles``."""
        return self._host_memory.take(num_bytes, is_pinned=is_pinned)

    def not_finite(self, *, with_optimizer: bool = False) -> str:
        """Text about the first value that is infinite or NaN; see ``Policy``."""
        self.settle()
        return super().not_finite(with_optimizer=with_optimizer)

    def release_gradients(self) -> None:
        """Frees the memory of this rank's gradients until the next ``backward`` (``MemoryHandles``)."""
        self._gradients.release()

    @property
    def gradient_bytes(self) -> int:
        """Size of this rank's gradients now, bytes."""
        return self._gradients.num_bytes

    @property
    def optimizer_host_bytes(self) -> int:
        """Size of the optimizer's part on the host, bytes, without what offload strategies move there."""
        return host_state_bytes(self.optimizer)

    @property
    def host_bytes(self) -> int:
        """Size of the host memory that this rank was given for what leaves its GPU, bytes."""
        return self._host_memory.num_bytes + (self._activations.host_bytes if self._activations else 0)

    def reference_weights(self) -> Iterable[Tensor]:
        """The weights of the reference model, on the host; none if there is no reference."""
        return self._reference.values()

    def keep_reference(self) -> None:
        """Copies the present weights to the host as the reference model."""
        self._reference = {name: param.detach().to("cpu", copy=True) for name, param in self.params.items()}

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Context in which the reference model's weights, and its routing, replace the policy's; no second model is on the accelerator."""
        if not self._reference:
            raise ModelError("algorithm.kl_loss: no reference model was loaded. Set kl_loss or kl_reward_coef before the run starts.")
        self._swap_reference()
        try:
            yield
        finally:
            self._swap_reference()

    def rounded(self, digits: int) -> contextlib.AbstractContextManager[None]:
        """Context in which about every second weight differs in the last of ``digits`` binary digits; see ``rlbatch.megatron.rounding``."""
        return rounded(self.params.values(), digits)

    def _swap_reference(self) -> None:
        self._is_reference = not self._is_reference
        with torch.no_grad():
            for name, param in self.params.items():
                kept = param.detach().to("cpu", copy=True)
                param.copy_(self._reference[name])
                self._reference[name].copy_(kept)

    def export_gradients(self) -> Iterator[NamedTensor]:
        """Streams the last ``backward``'s gradients under Hugging Face names, on every rank; zeros if they were released."""
        self._gradients.restore()
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for bucket in buffer.buckets:
                    group = buffer.data_parallel_group
                    shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()  # the rest was not reduced here
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
        gradients = {name: param.main_grad for name, param in self.params.items() if isinstance(param, torch.nn.Parameter)}
        return self._map.export(gradients, gradients=True)

    def logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probabilities of tokens under the model's current weights.

        Args:
            microbatches: Microbatches, equally many on every data-parallel rank, and the same on ranks that share the model.

        Returns:
            [T] float32 nats on the host for each microbatch, 0 where masked; on every rank.
        """
        packs = self._inputs(microbatches)
        return self._scored(microbatches, packs, self._replaying(packs, trains=False))

    def record(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """``logprobs``, with experts that the routers choose, which become the microbatches' routes."""
        assert self.replay is not None
        packs = self._inputs(microbatches)
        routings = [self.replay.recording() for _ in packs]
        logprobs = self._scored(microbatches, packs, routings)
        for microbatch, pack, routing in zip(microbatches, packs, routings, strict=True):
            microbatch.routes = self.replay.recorded(routing, pack, len(microbatch.token_ids))
        return logprobs

    def _scored(
        self, microbatches: Sequence[Microbatch], packs: Sequence[MicrobatchInputs], routings: Sequence[PackRouting | None]
    ) -> list[Tensor]:
        def keep(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            return output.sum(), torch.tensor(0, dtype=torch.int), output[0].float()

        return self._whole(microbatches, packs, self._run(packs, [keep] * len(packs), routings, forward_only=True))

    def _whole(self, microbatches: Sequence[Microbatch], packs: Sequence[MicrobatchInputs], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The result of ``logprobs``, from the [T_local] outputs of each pack on the last stage."""
        whole = [pack.restore(self._from_last_stage(outputs[i] if outputs else None, pack.local_tokens)) for i, pack in enumerate(packs)]
        return [values[: len(mb.token_ids)].where(mb.loss_mask.cpu() > 0, 0.0) for values, mb in zip(whole, microbatches, strict=True)]

    def update(
        self,
        microbatches: Sequence[Microbatch],
        objective: Objective,
        denominator: float,
        known: Callable[[list[Tensor]], None] | None = None,
    ) -> dict[str, float]:
        """Performs one optimizer step.

        Args:
            microbatches: Microbatches as in ``logprobs``.
            objective: Loss of a microbatch.
            denominator: Denominator of the loss of the whole update, over all microbatches of all data-parallel ranks.
            known: Called on every rank, before anything changes, with the log-probs of the update's forward pass, as of ``logprobs``. Its
                exceptions end the update.

        Returns:
            ``SUMS`` over all ranks (as sums), ``grad_norm`` and ``lr``.

        Raises:
            NotFinite: the loss or a gradient is not finite; raised on every rank, and nothing was changed.
            PluginError: tensor-parallel ranks got different policy losses; raised on every rank, and nothing was changed.
            ModelError: the optimizer made a weight that is not finite; raised on every rank.
        """
        sums, values = self._backward(microbatches, objective, denominator, known)
        norm = norm_of_all(self._gradients.shards())
        if any_rank(not norm < MAX_GRADIENT_NORM or not all(map(math.isfinite, sums.values()))):
            where = "" if norm < MAX_GRADIENT_NORM else f" (the backward pass came first to {self._finite.first_gradient()})"
            raise NotFinite(f"its loss is {sums['loss']:.6g}, its gradient norm {norm:.6g}{where}", find_token(values))
        if any_rank(self._losses_differ([of_pack for of_pack, _ in values])):
            raise PluginError(
                f"algorithm.loss={self._config.algorithm.loss}: tensor-parallel ranks got different losses for the same tokens. "
                "Seed what it draws, the same on every rank."
            )
        self.settle()
        with record_function(MODULE + "optimizer"):
            _, grad_norm, _ = self.optimizer.step()  # Megatron says that it failed only where it scales losses
        self.policy_version += 1
        lr = float(self.optimizer.param_groups[0]["lr"])
        if broken := self.not_finite():
            raise ModelError(
                f"optimizer.lr={self._config.optimizer.lr:g}: weights must stay finite, update {self.policy_version} at a learning rate of "
                f"{lr:g} made others: {broken}. None of them was saved or sent. Lower optimizer.lr, and go on from the last checkpoint."
            )
        return sums | {"grad_norm": float(grad_norm), "lr": lr}

    def backward(self, microbatches: Sequence[Microbatch], objective: Objective, denominator: float) -> dict[str, float]:
        """Runs forward and backward passes as ``update``, without the optimizer's step; returns ``SUMS`` over all ranks."""
        return self._backward(microbatches, objective, denominator)[0]

    def _backward(
        self,
        microbatches: Sequence[Microbatch],
        objective: Objective,
        denominator: float,
        known: Callable[[list[Tensor]], None] | None = None,
    ) -> tuple[dict[str, float], list[tuple[Mapping[str, Tensor], Tensor]]]:
        """The result of ``backward``, and for each microbatch the values behind this rank's losses, with their positions in the pack."""
        self._gradients.restore()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        packs = self._inputs(microbatches)

        def loss_of(pack: MicrobatchInputs, output: Tensor) -> tuple[Tensor, Tensor, Any]:
            part = objective(output[0], output[1], pack.microbatch, denominator, pack.over_ranks)
            return part.loss, torch.tensor(0, dtype=torch.int), part

        losses = [partial(loss_of, pack) for pack in packs]
        parts: list[LossPart] = self._run(packs, losses, self._replaying(packs, trains=True), forward_only=False)
        if known is not None:
            known(self._whole(microbatches, packs, [part.values["log-prob"] for part in parts]))
        sums = (
            torch.stack([part.sums for part in parts]).sum(0) if parts else torch.zeros(len(SUMS), dtype=torch.float64, device=self._device)
        )
        dist.all_reduce(sums, group=parallel.dp_cp_group())
        self._broadcast_from_last_stage(sums)
        values = [(part.values, pack.target_positions) for part, pack in zip(parts, packs, strict=bool(parts))]
        return dict(zip(SUMS, sums.tolist(), strict=True)), values

    def _losses_differ(self, packs: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether tensor-parallel ranks, which have the same tokens, got different losses for their parts of the model."""
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1:
            return False
        sizes = [[pack[name].abs().sum(dtype=torch.float64) for pack in packs] for name in ("loss", "derivative of the loss")]
        own = torch.tensor([sum(map(float, size)) for size in sizes], dtype=torch.float64, device=self._device)
        most = torch.cat([own, -own])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return bool((most[:2] + most[2:] > 1e-6 * most[:2]).any())

    def next_learning_rate(self) -> None:
        """Advances the schedule by one step, whose updates share the rate."""
        self.schedule.step(1)

    def _inputs(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchInputs]:
        group = parallel_state.get_context_parallel_group()
        if self._config.layout.vpp_size > 1:
            longest = max(len(microbatch.token_ids) for microbatch in microbatches)
            microbatches = [padded_to(microbatch, longest) for microbatch in microbatches]
        return [MicrobatchInputs.of(microbatch, self._device, group) for microbatch in microbatches]

    def _replaying(self, packs: Sequence[MicrobatchInputs], *, trains: bool) -> list[PackRouting | None]:
        """The routing of each pack; None where routers choose."""
        if self.replay is None or self._is_reference:
            return [None] * len(packs)
        given = [pack.microbatch.routes for pack in packs]
        routings = [
            None if routes is None else self.replay.replaying(routes, trains=trains, compares=number == 0)
            for number, routes in enumerate(given)
        ]
        self._compared = routings[0] if routings else None
        return routings

    def first_other_experts(self) -> dict[int, float]:
        """The result of ``RoutingReplay.first_others`` for the first pack of each rank in the last pass over the policy; a collective."""
        return {} if self.replay is None else self.replay.first_others(self._compared)

    def _run(
        self,
        packs: Sequence[MicrobatchInputs],
        losses: Sequence[LossFunction],
        routings: Sequence[PackRouting | None],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Runs Megatron's pipeline schedule over the packs; returns what the losses keep, which is empty except on the last stage."""

        def forward_step(iterator: Iterator[tuple[MicrobatchInputs, LossFunction, Any]], model: Any) -> tuple[Tensor, LossFunction]:
            pack, loss, routing = next(iterator)
            for stage in self.stages:
                stage.kept = pack.microbatch.kept
            return _forward(pack, model, routing), loss

        if self._dispatchers:
            rows = longest_pack([pack.local_tokens for pack in packs]) // self._config.layout.tp_size
            for dispatcher in self._dispatchers:
                dispatcher.rows = rows
        with torch.set_grad_enabled(not forward_only):
            outputs: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(list(zip(packs, losses, routings, strict=True))) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(packs),
                seq_length=max(pack.local_tokens for pack in packs) * self._config.layout.cp_size,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        for routing in routings:
            if routing is not None:
                routing.check()
        return outputs

    def _from_last_stage(self, values: Tensor | None, tokens: int) -> Tensor:
        filled = torch.empty(tokens, device=self._device) if values is None else values
        self._broadcast_from_last_stage(filled)
        return filled

    def _broadcast_from_last_stage(self, values: Tensor) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)


def _forward(pack: MicrobatchInputs, model: Any, routing: PackRouting | None) -> Tensor:
    packed = RoutedPack(
        qkv_format="thd",
        cu_seqlens_q=pack.cu_seqlens,
        cu_seqlens_kv=pack.cu_seqlens,
        max_seqlen_q=pack.longest,
        max_seqlen_kv=pack.longest,
        routing=routing,
    )
    output: Tensor = model(pack.token_ids[None], pack.position_ids[None], None, labels=pack.targets[None], packed_seq_params=packed)
    return output


def _finalize_without_scaling(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Runs Megatron's gradient reduction without the token count, because the loss has its denominator already."""
    finalize_model_grads(model, None, **options)
