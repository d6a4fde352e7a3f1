#!/usr/bin/env bash
# Wheels of the transformers that scripts/bench/trainer.py is tested with, for a machine without network, into .carry/trainer (12 MB):
#
#   scripts/bench/carry_transformers.sh [--all]
#
# There, before the benchmark: python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/trainer .carry/trainer/*.whl
# and PYTHONPATH=/tmp/trainer:. for it. The other machine must have what transformers needs (huggingface-hub >= 1.31, tokenizers >= 0.23.1, safetensors,
# regex, pyyaml, numpy, tqdm, typer); with --all these come too (24 MB), but for numpy. For Python 3.12 on Linux x86_64, or PYTHON_VERSION.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

packages=(transformers==5.24.0)
if [[ ${1:-} == --all ]]; then
  packages+=(huggingface-hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 idna==3.20 certifi hf-xet==1.8.0 fsspec filelock
    tokenizers==0.23.3 safetensors==0.8.0 regex==2026.11.19 PyYAML==6.0.4 packaging tqdm typer==0.29.2 annotated-doc click==8.5.1 shellingham rich pygments
    markdown-it-py mdurl typing-extensions)
elif (($#)); then
  echo "usage: scripts/bench/carry_transformers.sh [--all]" >&2
  exit 2
fi
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux_2_5 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
rm -rf .carry/trainer
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" \
  --dest .carry/trainer "${packages[@]}"
du -sh .carry/trainer
