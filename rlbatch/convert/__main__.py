"""The command ``python -m rlbatch.convert``; see ``--help``."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 20)  # else a quarter of the imports' time goes into looking for garbage among what they make

from rlbatch.api import CheckpointError, RlbatchError
from rlbatch.api.exit_codes import FAILED, REFUSED
from rlbatch.convert.arguments import Options, help_text, parse
from rlbatch.launch.ranks.rank_info import RankInfo, check_trainer
from rlbatch.launch.records.streams import end_with_reader, exit_code_of_display, keep_output


def main(arguments: Sequence[str]) -> int:
    """Runs the command, with ``key=value`` or ``--help``, and returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        end_with_reader()
        print(help_text())
        return 0
    try:
        options, info = parse(arguments), RankInfo.from_environment()
        check_trainer(f"mode={options.mode}")
        _prepare_libraries(info)
        return _check(options) if options.mode == "check" else _convert(options, info)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return FAILED
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _convert(options: Options, info: RankInfo) -> int:
    from rlbatch.convert.conversion import convert

    def say(text: str) -> None:
        if info.rank == 0:
            print(text, flush=True)

    convert(options, info, say)
    return 0


def _check(options: Options) -> int:
    from rlbatch.config.hf_config import read_config
    from rlbatch.convert.completeness import check, read_table, wrong_values
    from rlbatch.convert.conversion import family_of

    table = read_table(Path(options.hf), Path(options.names) if options.names else None)
    report = check(family_of(options), table, is_fp8="quantization_config" in read_config(Path(options.hf)))
    if options.finite:
        report = replace(report, wrong=[*report.wrong, *wrong_values(Path(options.hf))], are_values_read=True)
    for line in report.lines():
        print(line)
    return 0 if report.is_complete else FAILED


def _prepare_libraries(info: RankInfo) -> None:
    """Tells libraries, before they are imported, that no GPU is used, that missing GPU libraries are no news, and how cores are shared."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // info.local_size)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads have little to do, and else spin until there is more
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("megatron").setLevel(logging.ERROR)


if __name__ == "__main__":
    keep_output()
    code = main(sys.argv[1:])
    code = exit_code_of_display(code) if "--help" in sys.argv or "mode=check" in sys.argv else code  # a conversion goes on without a reader
    gc.freeze()  # nor does the interpreter look there again before it ends
    sys.exit(code)
