#!/bin/sh
# vLLM 0.33 with kvtwin's adaptive scheduler. From the repository's root: sh examples/vllm_adaptive.sh [GPU [MODEL]]
#
# GPU and the name of the model are kvtwin's (`kvtwin run --gpu`, `--model`): adaptive predicts with their prices.
# docs/vllm-scheduler.md says what else `--additional-config` may hold.
set -e
gpu=${1:-l20}
model=${2:-meta-llama/Llama-3.1-8B-Instruct}
ttft_ms=2000
tpot_ms=100
exec vllm serve "$model" --scheduler-cls kvtwin.vllm.Adaptive --additional-config "{\"kvtwin\": {
  \"gpu\": \"$gpu\", \"model\": \"${KVTWIN_MODEL:-llama-3.1-8b}\",
  \"policy\": \"adaptive:ttft-slo-ms=$ttft_ms,tpot-slo-ms=$tpot_ms\"}}"
