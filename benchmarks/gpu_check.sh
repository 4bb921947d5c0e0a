#!/usr/bin/env bash
# What Paceline does on one CUDA device, in under six minutes: correctness against the CPU, CUDA
# graphs, NCCL, two processes on one device, tokens per second of random 1B and 8B models. No
# network, no Ray, no files but the JSON report. It was never run on a GPU when it was written.
#
#   benchmarks/gpu_check.sh [report.json]     on a GPU
#   benchmarks/gpu_check.sh --cpu             dry run with tiny shapes, under a minute
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-}"
if [ -z "$python" ]; then
  python=python3
  [ -x .venv/bin/python ] && python=.venv/bin/python
fi
exec "$python" -m benchmarks.gpu_check "$@"
