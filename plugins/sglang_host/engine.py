"""SGLang behind the engine host's protocol: its ``Engine``, which holds its schedulers in processes of their own."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

from rlbatch.engines.host.generation import Sampled, SamplingEngine
from rlbatch.engines.host.inventory import refusal
from rlbatch.engines.host.server import IGNORED, Send, last_error, startup_log
from rlbatch.engines.protocol.frames import Refused

from . import engine_options
from .out_of_memory import too_small
from .plugin import CALL

IDLE_LIMIT_S = 60.0
"""Most seconds to wait for samples that were given up."""


class SglangEngine(SamplingEngine):
    """One engine of this host process."""

    def __init__(self) -> None:
        """Makes the engine without starting anything."""
        super().__init__()
        self._engine: Any = None
        self._has_weights = False

    async def op_prepare(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Imports SGLang."""
        if not engine_options.version_refusal(engine_options.installed_version(), sys.executable):
            _add_plugin()
            from sglang.srt.entrypoints.engine import Engine  # noqa: F401  # most of it
        return {}

    async def op_start(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Starts SGLang with ``defaults``, the user's ``options``, and what is ``decided`` by other keys."""
        version = engine_options.installed_version()
        if refused := engine_options.version_refusal(version, sys.executable):
            raise Refused(refused)
        _add_plugin()
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs

        known = [field.name for field in dataclasses.fields(ServerArgs)]
        asked = header["options"]
        if refused := refusal(asked, known, engine_options.DECIDED, f"SGLang {version}", engine_options.LISTED) or engine_options.unsafe(
            asked
        ):
            raise Refused(refused)
        _start_processes(header["process_start"])
        arguments = {**header["defaults"], **asked, **header["decided"], **engine_options.FIXED}
        try:
            self._engine = Engine(**arguments)
        except RuntimeError as error:
            log = startup_log()
            if told := too_small(log):
                raise Refused(told) from None
            raise RuntimeError(last_error(log) or error) from error  # its own says that another process says why
        self._take_signals()
        self._check_choices()
        self.workers = await self._ask_workers("identify")
        self._has_weights = arguments["load_format"] != "dummy"
        processes = [process.pid for process in multiprocessing.active_children()]
        return {"version": version, "max_model_len": self._longest(), "processes": processes}

    def _take_signals(self) -> None:
        """Treats signals as the host does: SGLang would end at SIGTERM, and wait for core dumps after a failure, which SIGQUIT tells it."""
        self._engine.tokenizer_manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        for number in IGNORED:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGQUIT, _end)

    def _check_choices(self) -> None:
        """Refuses what SGLang chose by itself, for this model and these GPUs, if it would make samples wrong; raises Refused."""
        if refused := engine_options.unsafe(vars(self._engine.server_args)):
            raise Refused(f"{refused} SGLang chose it itself.")
        if method := self._engine.tokenizer_manager.model_config.quantization:
            changes = self._engine.server_args.json_model_override_args
            raise Refused(
                f"rollout.engine.json_model_override_args={changes}: weights are synced as they are trained, and these would be {method}. "
                "Leave `quantization_config` out."
            )

    def _longest(self) -> int:
        """Prompt and response together, such that SGLang's scheduler does not shorten the response."""
        cache = self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        context = self._engine.tokenizer_manager.model_config.context_len
        return int(min(context - engine_options.CONTEXT_SPARE, cache - 2 * max(1, self._engine.server_args.page_size)))

    async def op_ping(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """A sign of life of the scheduler's process, not only of this one."""
        await self._engine.tokenizer_manager.get_internal_state()
        return {}

    async def op_generate(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Generates as ``SamplingEngine`` does, once the engine has weights."""
        if not self._has_weights:
            raise RuntimeError("the engine has no weights: they are random until the first sync, and after sleep level 2. Sync them first.")
        return await super().op_generate(header, payload, send)

    async def draw(self, name: str, prompt: Sequence[int], header: dict[str, Any], seed: int) -> Sampled:
        """See ``SamplingEngine``. (SGLang aborts all requests whose name begins like that of an aborted one.)"""
        params = {
            "temperature": header["temperature"],
            "top_p": header["top_p"],
            "top_k": header["top_k"] or -1,
            "max_new_tokens": header["max_tokens"],
            "min_new_tokens": header["min_tokens"],
            "stop_token_ids": header["stop_token_ids"],
            "sampling_seed": seed,
        }
        began = time.monotonic()
        try:
            output = await self._engine.async_generate(
                input_ids=prompt,
                sampling_params=params,
                return_logprob=True,
                rid=name,
                return_routed_experts=header.get("with_routes", False),
            )
        except asyncio.CancelledError:
            self._engine.tokenizer_manager.abort_request(name)
            raise
        details, tokens = output["meta_info"], output["output_ids"]
        seconds = max(time.monotonic() - began - max(details.get("queue_time") or 0.0, 0.0), 0.0)
        reason = details["finish_reason"]
        if reason["type"] not in ("stop", "length"):
            raise RuntimeError(f"sample {name} ended with `{reason['type']}`: {reason.get('message', '')}")
        values = [value for value, token, _ in details["output_token_logprobs"]]
        if [token for _, token, _ in details["output_token_logprobs"]] != tokens:
            raise RuntimeError(f"sample {name}: SGLang's log-probs are of other tokens than its output")
        routes = _routes(details.get("routed_experts"), len(prompt) + len(tokens) - 1, self._layers())
        # SGLang looks at the length first.
        return Sampled(tokens, values, "stop" if tokens[-1] in header["stop_token_ids"] else reason["type"], seconds, routes)

    def _layers(self) -> int:
        return int(self._engine.tokenizer_manager.model_config.hf_text_config.num_hidden_layers)

    async def op_join(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """All workers join the group over which weights come: ``path``, ``size`` and ``limit_s`` of ``WeightGroup``."""
        await self._ask_workers("join", path=header["path"], size=header["size"], limit_s=header["limit_s"])
        return {}

    async def op_start_update(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Prepares for weights; ``audit``: every write is counted; ``check``: ``held`` will be asked."""
        await self._idle()
        self._has_weights = False
        await self._ask_workers("start", audit=header["audit"], check=header["check"])
        return {}

    async def op_load_weights(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Loads what a call brings, on all workers."""
        await self._ask_workers("load", devices=json.loads(payload)["devices"])
        return {}

    async def op_finish_update(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Ends the update; from here on samples are of ``policy_version``. What was computed with older weights is forgotten."""
        reports = await self._ask_workers("finish", version=str(header["policy_version"]))
        _judge([report for report in reports if report])
        self.version, self._has_weights = header["policy_version"], True
        return {}

    async def op_held(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Checksums of what the modules hold: ``parts``, see ``rlbatch.engines.backend.weight_check``."""
        told = await self._ask_workers("held")
        return {"parts": [[number, *part] for number, parts in enumerate(told) for part in parts]}

    async def op_sleep(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Gives the GPU's memory back; ``level`` 2 forgets the weights too."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._idle()
        request = ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"])
        await self._engine.tokenizer_manager.release_memory_occupation(request, None)
        self._has_weights = self._has_weights and header["level"] < 2
        return {}

    async def op_wake(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Takes memory back: ``tags`` are ``weights`` and ``kv_cache``."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=header["tags"]), None)
        return {}

    async def _idle(self) -> None:
        """Waits for samples that were given up, and empties the cache. (While there are samples SGLang kills this process instead.)"""
        done = await self._engine.tokenizer_manager.flush_cache(timeout_s=IDLE_LIMIT_S)
        if not done.success:
            raise RuntimeError(f"SGLang still works on samples after {IDLE_LIMIT_S:g} s ({done.message})")

    async def _ask_workers(self, operation: str, *, version: str | None = None, **details: Any) -> list[dict[str, Any]]:
        """What ``WorkerWeights.<operation>`` returns in every worker. With a ``version``, that is the weights' from here on, and what was
        computed with older ones is forgotten.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

        text = json.dumps({"operation": operation, **details})
        request = UpdateWeightsFromIPCReqInput(zmq_handles={CALL: text}, flush_cache=version is not None, weight_version=version)
        success, message = await self._engine.tokenizer_manager.update_weights_from_ipc(request, None)
        if not success:
            raise RuntimeError(message)
        answers: list[dict[str, Any]] = json.JSONDecoder().raw_decode(message)[0]  # SGLang adds a sentence about the version
        return answers

    async def stop(self) -> None:
        """Ends SGLang's processes."""
        if self._engine is not None:
            self._engine.shutdown()


def _routes(told: str | None, tokens: int, layers: int) -> tuple[Sequence[int], bytes] | None:
    """The routes that SGLang tells of all tokens but the last, in all layers; it gives them as text of int32."""
    if told is None:
        return None
    values = array("i", base64.b64decode(told))
    return (tokens, layers, len(values) // (tokens * layers)), array("h", values).tobytes()


def _end() -> None:
    """Ends all of SGLang's processes after one of them failed."""
    print("rlbatch: a process of SGLang failed, which ends the engine.", flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the host leads it


def _tell(number: int, frame: Any) -> None:
    """One of SGLang's processes failed while it starts: SGLang would kill this one, which then could not say why. Others may follow."""
    signal.signal(number, signal.SIG_IGN)
    raise RuntimeError("a process of SGLang failed while it started")


def _start_processes(method: str) -> None:
    """How SGLang starts its processes; empty: as it likes. (It sets the method itself, just before, and what their failure does.)"""
    from sglang.srt.entrypoints import engine

    prepare = engine._set_envs_and_config

    def prepare_and_set(arguments: Any) -> None:
        prepare(arguments)
        signal.signal(signal.SIGQUIT, _tell)
        if method:
            multiprocessing.set_start_method(method, force=True)

    engine._set_envs_and_config = prepare_and_set


def _add_plugin() -> None:
    """Adds our plugin to a user's choice of SGLang plugins, which must not leave it out."""
    chosen = os.environ.get("SGLANG_PLUGINS", "")
    if chosen and "rlbatch" not in chosen.split(","):
        os.environ["SGLANG_PLUGINS"] = f"{chosen},rlbatch"


def _judge(reports: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError with a name, if the workers were not written as they must; see ``WriteAudit.report``."""
    if not reports:
        return
    said = {key: sorted({name for report in reports for name in report[key]}) for key in ("unwritten", "overwritten")}
    used = {name for report in reports for name in report["used"]}
    said["unused"] = sorted({name for report in reports for name in report["unused"]} - used)
    said["partial"] = _partial([report["parts"] for report in reports])
    for key, problem in (
        ("unwritten", "is not written, or not finite"),
        ("overwritten", "is written twice"),
        ("unused", "is no parameter of the engine"),
        ("partial", "is larger than what the engine takes of it"),
    ):
        if names := said[key]:
            raise ValueError(
                f"weight sync: {names[0]} {problem} ({len(names)} such). The model family's mappings must cover the engine's parameters."
            )


def _partial(parts_of_all: Sequence[dict[str, Any]]) -> list[str]:
    """Names of tensors of which all workers together leave values out; a part that several of them have counts once."""
    sizes: dict[str, int] = {}
    taken: dict[str, dict[str, int]] = {}
    for parts_of_one in parts_of_all:
        for name, (size, parts) in parts_of_one.items():
            sizes[name] = size
            taken.setdefault(name, {}).update({str(part): math.prod(part[1]) for part in parts})
    return sorted(name for name, parts in taken.items() if sum(parts.values()) < sizes[name])
