#!/usr/bin/env bash
# Qwen3-30B-A3B, all 48 layers, TP1 PP1 EP8, on one node of 8 GPUs: random weights of the real shape, vLLM on the same GPUs, responses of
# 2,048 tokens. Three steps with the optimizer on the host, or on the GPUs; tables of both. It has not been run yet.
#
#     benchmarks/qwen3_30b_8gpu.sh host      # cpu_adam 1.0; needs some 440 GiB of host memory
#     benchmarks/qwen3_30b_8gpu.sh gpu       # the optimizer on the GPUs
#     benchmarks/qwen3_30b_8gpu.sh save      # two steps, a save, and the third step resumed under two layouts, with LAYERS layers
#     benchmarks/qwen3_30b_8gpu.sh table     # of what was run
#
# LAYERS (48; save: 16, a checkpoint takes 14 bytes a parameter of the disk), GPUS (8), FOLDER (/tmp/qwen3_30b), ENGINE (Python with vLLM),
# PYTHON. With fewer GPUs give fewer layers;
# behind the first word gpus=0 makes all of it tiny, on CPUs. Each call ends within ten minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
what="${1:?host, gpu, save or table}"
shift
python="${PYTHON:-python}" folder="${FOLDER:-/tmp/qwen3_30b}" gpus="${GPUS:-8}"
layers="${LAYERS:-$([ "$what" = save ] && echo 16 || echo 48)}"
keys=("layers=$layers" "ranks=$gpus" "folder=$folder" ${ENGINE:+"engine=$ENGINE"})
at_size=(
    rollout.max_response_tokens=2048 rollout.engine.max_model_len=2304 rollout.engine.enforce_eager=false
    rollout.engine.gpu_memory_utilization=0.5 train.prompts_per_step=64 algorithm.group_size=8
    train.max_tokens_per_gpu=16384 train.updates_per_step=1
)
[[ " $* " == *" gpus=0 "* ]] || keys+=("${at_size[@]}")
case "$what" in
    host) timeout 590 "$python" -m benchmarks.real_job steps "${keys[@]}" offload=cpu_adam offload.options.fraction=1.0 "$@" ;;
    gpu) timeout 590 "$python" -m benchmarks.real_job steps "${keys[@]}" offload=gradients "$@" ;;
    save) timeout 590 "$python" -m benchmarks.real_job resume "${keys[@]}" "$@" ;;
    table) exec "$python" -m benchmarks.step_table "$folder"/run_* "model=$folder/model_$layers" ;;
    *) echo "qwen3_30b_8gpu.sh $what: host, gpu, save or table." >&2; exit 2 ;;
esac
rm -rf "$folder/run_$what"
mv "$folder/run" "$folder/run_$what"
"$python" -m benchmarks.step_table "$folder/run_$what" "model=$folder/model_$layers"
