#!/usr/bin/env bash
# tests/gpu/pack.sh OUT [WHEEL ...]: what a GPU machine without network needs for the comparisons in this folder, in parts of 48 MiB at most.
#
# Packed are this checkout, the pure Python packages that it runs on (those of `python` here; torch and transformers must be there), and
# the given wheels, for that machine's Python. Transformer Engine: `pip download --no-deps --only-binary=:all: --python-version 3.12
# --platform manylinux_2_28_x86_64 transformer_engine==2.11.0 transformer_engine_cu13==2.11.0`, and transformer_engine_torch built there
# from its sdist (NVTE_FRAMEWORK=pytorch pip wheel --no-build-isolation, CPATH with the include folders of cuDNN, NCCL and CUDA).
# There: mkdir /tmp/rlbatch && cat part.* | tar xJ -C /tmp/rlbatch && . /tmp/rlbatch/env.sh && python3 -m tests.gpu.te_compare
set -euo pipefail
out=$(realpath -m "$1"); shift
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/site" "$work/checkout" "$work/link"
for wheel in "$@"; do python3 -m zipfile -e "$wheel" "$work/site"; done
rm -rf "$work/site/transformer_engine/jax"
site=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
for name in megatron hydra omegaconf antlr4 pluggy rich markdown_it mdurl pygments pytest _pytest iniconfig yaml; do
  cp -r "$site/$name" "$work/site/"
done
cp -r "$site"/{antlr4,hydra_core-,omegaconf-,pluggy-,rlbatch-,megatron_core-,pytest-}*.dist-info "$work/site/"
rm -f "$work"/site/yaml/*.so # of this machine's Python
cd "$(dirname "$0")/../.."
git ls-files -z -- rlbatch plugins configs tests benchmarks setup.cfg pyproject.toml README.md | xargs -0 cp --parents -t "$work/checkout"
ln -s ../checkout/plugins "$work/link/rlbatch_plugins"
ln -s ../checkout/configs "$work/link/rlbatch_configs"
find "$work" -name __pycache__ -prune -exec rm -rf {} +
cat > "$work/env.sh" <<'END'
cd "$(dirname "${BASH_SOURCE[0]}")/checkout"
export PYTHONPATH=$PWD:$PWD/../link:$PWD/../site HF_HUB_OFFLINE=1
END
rm -f "$out"/part.*
tar c -C "$work" . | xz -T0 -3 | split -b 48M - "$out/part."
ls -l "$out"
