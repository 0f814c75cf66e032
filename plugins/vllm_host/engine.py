"""vLLM behind the engine host's protocol: ``AsyncLLM``, which holds its scheduler and workers in processes of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
import traceback
from array import array
from collections.abc import Sequence
from typing import Any

from rlbatch.engines.host.generation import Sampled, SamplingEngine
from rlbatch.engines.host.inventory import refusal
from rlbatch.engines.host.server import Send, last_error, startup_log
from rlbatch.engines.protocol.frames import Refused

from . import engine_options, versions
from .answers_at_end import LOGPROBS
from .out_of_memory import too_small

FORGET_LIMIT_S, FORGET_POLL_S = 60.0, 0.01
"""vLLM does not forget while a request runs, also one that was given up, which ends with its next step."""


class VllmEngine(SamplingEngine):
    """One engine of this host process."""

    def __init__(self) -> None:
        """Nothing is started."""
        super().__init__()
        self._llm: Any = None
        self._audits, self._was_paused = False, False
        self._replays, self._checks, self._is_draft, self._is_open = False, False, False, False
        self._forgetting: asyncio.Future[None] | None = None
        self._is_quiet = True

    async def op_prepare(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Imports vLLM and lets it look at the model, which may take a minute, and which it remembers. Ports that it chooses are another's
        when the engine starts, so its configuration is made again then.
        """
        self._configured(header)
        return {}

    async def op_start(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Starts vLLM with ``defaults``, the user's ``options``, and what is ``decided`` by other keys."""
        arguments, config, version = self._configured(header)
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.v1.engine.async_llm import AsyncLLM

        _check_head_size(config.model_config)
        _start_processes(header["process_start"])
        try:
            self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
        except RuntimeError as error:
            log = startup_log()
            if told := too_small(log, arguments.kv_cache_memory_bytes):
                raise Refused(told) from None
            raise RuntimeError(last_error(log) or error) from error  # its own says that another process says why
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await versions.ask_workers(self._llm, "rlbatch_draw")
        self.workers = await versions.ask_workers(self._llm, "rlbatch_experts")
        processes = sorted({pid for worker in self.workers for pid in worker["processes"]})
        return {"version": version, "max_model_len": self._llm.model_config.max_model_len, "processes": processes}

    def _configured(self, header: dict[str, Any]) -> tuple[Any, Any, str]:
        """vLLM's arguments, its configuration, and its version."""
        distribution, version = versions.installed()
        decided: dict[str, Any] = header["decided"]
        refused = versions.version_refusal(distribution, version, sys.executable)
        if refused := refused or versions.without_routes(distribution, version, decided):  # before an import of ten seconds
            raise Refused(refused)
        _add_plugin()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.logger import init_logger
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401  # most of vLLM

        if refused := versions.without_invariance(version):
            raise Refused(refused)
        if told := versions.untried(distribution, version):
            init_logger("vllm.rlbatch").warning(told)
        known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
        if refused := refusal(header["options"], known, engine_options.DECIDED, f"vLLM {version}", engine_options.LISTED):
            raise Refused(refused)
        defaults = {name: value for name, value in header["defaults"].items() if name in known}
        try:
            arguments = AsyncEngineArgs(**{**defaults, **header["options"], **decided, **engine_options.FIXED})
            config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)  # without one its limits know no card
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            traceback.print_exc()
            raise Refused(engine_options.refused(error, header["options"], version)) from error
        return arguments, config, version

    async def op_ping(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """A sign of life of the scheduler's process, not only of this one."""
        await self._llm.check_health()
        await self._llm.is_sleeping()
        return {}

    async def op_generate(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Generates as ``SamplingEngine`` does; ends when no worker computes any more."""
        self._is_quiet = False
        answer = await super().op_generate(header, payload, send)
        await self._quieten()
        return answer

    async def draw(self, name: str, prompt: Sequence[int], header: dict[str, Any], seed: int) -> Sampled:
        """See ``SamplingEngine``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=header["temperature"],
            max_tokens=header["max_tokens"],
            min_tokens=header["min_tokens"],
            stop_token_ids=header["stop_token_ids"],
            seed=seed,
            top_p=header["top_p"],
            top_k=header["top_k"],
            ignore_eos=True,  # the stop tokens are the trainer's, whatever the model's configuration says
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output: Any = None
        began = time.monotonic()
        async for answer in self._llm.generate({"prompt_token_ids": prompt}, params, name):
            output = answer
        seconds = time.monotonic() - began
        if stats := output.metrics:
            seconds = max(stats.last_token_ts - stats.scheduled_ts, 0.0)
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"sample {name} ended with `{completion.finish_reason}`")
        tokens = list(completion.token_ids)
        values = array("f", output.kv_transfer_params[LOGPROBS])
        if len(values) != len(tokens):
            raise RuntimeError(f"sample {name} has {len(tokens)} tokens, and {len(values)} log-probs")
        routes = _routes(completion.routed_experts, len(prompt) + len(tokens) - 1) if header.get("with_routes") else None
        return Sampled(tokens, values, completion.finish_reason, seconds, routes)

    async def op_join(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Lets all workers join the group of ``size`` processes whose first one will send weights."""
        await versions.join_workers(self._llm, header["path"], header["size"], header["limit_s"])
        return {}

    async def op_start_update(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Prepares for weights.

        ``audit``: every write is counted; ``draft``: they are of the model that the engine speculates with; ``replay``: the update before
        was as it must be, and this one may do as it did; ``check``: ``held`` will be asked.
        """
        self._audits, self._is_draft, self._replays = header["audit"], header["draft"], header["replay"]
        self._checks = header["check"]
        # Data-parallel engines compute in lockstep for some steps after the last sample, on parameters that are about to be replaced.
        # All of them stop together, those of other nodes too; one that sleeps has stopped.
        self._was_paused = await versions.stop_lockstep(self._llm)
        self._is_open = False
        self._forgetting = asyncio.ensure_future(self._forget())
        return {}

    async def _forget(self) -> None:
        """What was computed with older weights is forgotten; there are no requests but those that were given up."""
        has_cache = self._llm.vllm_config.cache_config.enable_prefix_caching
        deadline = asyncio.get_running_loop().time() + FORGET_LIMIT_S
        while has_cache and not await self._llm.reset_prefix_cache():
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"weight sync: for {FORGET_LIMIT_S:g} s vLLM has not forgotten what older weights computed")
            await asyncio.sleep(FORGET_POLL_S)
        await self._quieten()

    async def _forgotten(self) -> None:
        """Waits until that is done; whoever waits may be cancelled, it goes on."""
        if self._forgetting is not None:
            await asyncio.shield(self._forgetting)

    async def _quieten(self) -> None:
        """Waits until no worker computes any more."""
        if not self._is_quiet:
            await versions.finish_steps(self._llm)
            self._is_quiet = True

    async def op_load_weights(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Loads one bucket on all workers; the first call starts the update there, and the one with ``last`` (a version) ends it.

        Returns:
            ``is_finished``: whether the update is over. One that is audited ends with ``finish_update``.
        """
        starts, self._is_open = not self._is_open, True
        ends = header.get("last") is not None and not self._audits
        update = {**json.loads(payload), "audit": self._audits, "replay": self._replays, "check": self._checks}
        how = {"starts": starts, "is_draft": self._is_draft, "ends": ends}
        load = self._llm.collective_rpc("rlbatch_load", kwargs={"update_info": update, **how})
        # The scheduler takes calls in this order, and does not wait between them.
        await asyncio.gather(load, *([versions.name_weights(self._llm, str(header["last"]))] if ends else []))
        if ends:
            await self._finish(header["last"])
        return {"is_finished": ends}

    async def op_finish_update(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Ends the update; from here on samples are of ``policy_version``."""
        if not self._is_open:
            await self._llm.start_weight_update()
        reports = await versions.ask_workers(self._llm, "rlbatch_written") if self._audits else []
        await self._llm.finish_weight_update()
        await versions.name_weights(self._llm, str(header["policy_version"]))
        await self._finish(header["policy_version"])
        if reports:  # other nodes, which may have nothing to complain of, do not go on alone
            _judge(reports, [worker["experts"] for worker in self.workers])
        return {}

    async def op_held(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Checksums of what the modules hold: ``parts``, see ``rlbatch.engines.backend.weight_check``."""
        told = await versions.ask_workers(self._llm, "rlbatch_held")
        return {"parts": [[number, *part] for number, parts in enumerate(told) for part in parts]}

    async def _finish(self, version: int) -> None:
        """Ends an update that all workers have ended."""
        await self._forgotten()
        if self._was_paused:
            await self._llm.resume_generation()
        self.version = version

    async def op_sleep(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Gives the GPU's memory back; ``level`` 2 forgets the weights too."""
        await self._llm.sleep(level=header["level"])
        return {}

    async def op_wake(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Takes memory back: ``tags`` are ``weights`` and ``kv_cache``."""
        await self._llm.wake_up(tags=header["tags"])
        return {}

    def is_lost(self) -> bool:
        """Whether vLLM's scheduler or one of its workers is gone."""
        return self._llm is not None and bool(self._llm.errored)

    async def stop(self) -> None:
        """Ends vLLM's processes."""
        if self._llm is not None:
            self._llm.shutdown()


def _routes(told: Any, tokens: int) -> tuple[Sequence[int], memoryview] | None:
    """What vLLM says of all tokens but the last, in all layers: a numpy array, of uint8 up to 256 experts; None where it kept nothing."""
    if told is None:
        return None
    if len(told) != tokens:
        raise RuntimeError(f"vLLM told the experts of {len(told)} tokens, and read {tokens}")
    return told.shape, (told if told.dtype == "uint8" else told.astype("int16")).data


def _check_head_size(model: Any) -> None:
    """vLLM's CPU attention says so only at the first token."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or model.use_mla:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.get_head_size() not in sizes:
        listed = ", ".join(map(str, sizes))
        size = model.get_head_size()
        raise Refused(f"model.hf: attention heads have size {size}, vLLM's CPU backend has kernels for {listed}. Use another.")


def _start_processes(method: str) -> None:
    """How vLLM starts its processes; empty: as it likes. (Its CPU backend sets the variable, whatever it was.)"""
    if method:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method


def _add_plugin() -> None:
    """A user's choice of vLLM plugins must not leave ours out."""
    chosen = os.environ.get("VLLM_PLUGINS", "")
    if chosen and "rlbatch" not in chosen.split(","):
        os.environ["VLLM_PLUGINS"] = f"{chosen},rlbatch"


def _judge(reports: Sequence[dict[str, list[str]]], held: Sequence[list[int] | None]) -> None:
    """Raises Refused with a name, if the workers, who hold these experts (None: all), were not written as they must; see
    ``WriteAudit.report``.
    """
    said = {key: sorted({name for report in reports for name in report[key]}) for key in ("unwritten", "overwritten")}
    said["empty"] = _in_all([set(report["empty"]) for report in reports])
    # Other workers' experts are used by these, which may be on another node.
    unused = [{name for name in report["unused"] if is_held(name, own)} for report, own in zip(reports, held, strict=True)]
    said["unused"] = _in_all(unused)
    for key, problem in (
        ("unwritten", "is not written"),
        ("empty", "is not written"),
        ("overwritten", "is written twice"),
        ("unused", "is no parameter of the engine"),
    ):
        if names := said[key]:
            raise Refused(
                f"weight sync: {names[0]} {problem} ({len(names)} such). The model family's mappings must cover the engine's parameters."
            )


def _in_all(names: Sequence[set[str]]) -> list[str]:
    return sorted(set.intersection(*names))


def is_held(name: str, experts: Sequence[int] | None) -> bool:
    """Whether a checkpoint's tensor is for a worker with these experts (see ``held_experts``): any that is not of an expert that it may not
    have. A number follows the part ``experts`` in an expert's name.
    """
    parts = name.split(".")
    number = parts[parts.index("experts") + 1] if "experts" in parts[:-1] else ""
    return not number.isdecimal() or (experts is not None and int(number) in experts)
