"""Runs that cannot be: one line on standard error that names option, value and remedy, and exit status 2.

A row a run: its policy, the words that follow `kvtwin run`, and what is told, in parts.
"""

import re
import shlex

import pytest

import kvtwin

USUAL = {
    "--workload": "fixed", "--num-prompts": "3", "--input-len": "40", "--output-len": "5", "--model": "llama-2-7b",
    "--gpu": "l20",
}  # fmt: skip
POOLS = "--prefill-replicas 2 --decode-replicas 1 --link-gbps 200"
RUNS = f"""
layerk || --policy: unknown policy 'layerk' | did you mean 'layerkv'? | vllm-recompute
layerkv:slo-aware || 'slo-aware' is not option=value
layerkv:batching=sarati || batching=sarati: no such part | did you mean 'sarathi'?
layerkv:predictor-accuracy=0.5 || predictor-accuracy=0.5 does nothing without predictor=bucket
vllm-recompute:eviction=layer-offload || eviction=layer-offload | memory=layers
fastserve:order=fcfs || batching=quanta | order=mlfq
sarathi:admission=slack,tpot-slo=3 || 'tpot_slo' is no option of sarathi | tpot_slo_ms
vllm-v1:cpu-chunks=5,batching=sarathi || batching=unified
vllm-v1:cpu-chunks=5,storage-space=1,store-threshold=2 || store-threshold: with files behind the host
vllm-v1:memory=tiered,cpu-chunks=5 || memory=paged
ragcache:disk-space=1 || replacement=pgdsf: beside a disk
vllm-swap:slo-aware=true || 'slo_aware' is no option of vllm-swap | its options: none
ellm:layers-per-block=3 || ellm layers-per-block: 3 does not divide the model's 32 layers
vattention | --block-size 16 | --block-size: 16 where a page
vattention:page-kib=4 || page-kib: 4 is less than the keys of a token
vllm-v1:enable-lora=on,stage=tool-calls || return from a tool
vllm-v1 | --async-scheduling --engine-profile vllm-v1 | --engine-profile vllm-v1: its host time is added to each
vllm-v1 | --request-rate inf --burstiness 2 | --burstiness: shapes arrivals, and with
vllm-v1 | --gpu v100 --quantization fp8 | --gpu v100: vLLM has no kernels for FP8 weights
vllm-swap | --swap-space 4 --num-cpu-blocks-override 9 | --swap-space: 4.0 does nothing beside --num-cpu-blocks
vllm-swap | --gpu-memory-utilization 0.8 --num-gpu-blocks-override 9 | does nothing beside --num-gpu-blocks-override 9
layerkv | --enable-prefix-caching | --enable-prefix-caching:  | memory=paged
vllm-swap | --enable-prefix-caching | --enable-prefix-caching:  | memory=paged
orca | --enable-prefix-caching | --enable-prefix-caching:  | memory=paged
vllm-recompute | --max-concurrency 0 | --max-concurrency: 0 | give more
vllm-recompute | --max-concurrency x | --max-concurrency | 'x' | whole number
vllm-recompute | --closed-sessions | --closed-sessions | fixed | give one that has
sglang:page-size=16,max-total-tokens=3 || sglang max-total-tokens: 3 is less than a page of 16
sglang:prefill-decode-interval=2,enable-dp-attention=true || prefill-decode-interval: ranks of enable-dp-attention agree
sglang:schedule-policy=shortest-prefill-first,disable-radix-cache=true || shortest-prefill-first needs the radix cache
sglang:radix-eviction-policy=tlru || tlru needs a threshold above next_prompt_estimate
sglang:page-size=100 || --max-num-batched-tokens: SGLang's chunks are whole pages | no multiple of 100
sglang:page-size=16 | --block-size 32 | --block-size: 32 where options of sglang say 16

# Several engines
vllm-recompute | --router least-loaded --replicas 1 | --router | --replicas of 2 or more
vllm-recompute | --replicas 0 | --replicas: 0 | give more
vllm-recompute | --replicas 2 --router prefix-affinity | vllm-recompute keep no prefixes | --enable-prefix-caching
vllm-recompute | --replicas 2 --router prefix-affinity --enable-prefix-caching | request 0 | no hash_ids | --router
vllm-recompute | --autoscale hpa:target=10,max=4 --replicas 5 | 5 at first is not min=1 to max=4
vllm-v1 | --autoscale hpa:target=10,max=4 --router prefix-affinity | remembers engines by number
vllm-v1 | --autoscale hpa:target=10,max=4 --pipeline-parallel-size 2 | leave out --pipeline-parallel-size 2
vllm-recompute | --link-gbps 100 | --link-gbps: 100 | --prefill-replicas
distserve || --policy distserve | --prefill-replicas | --link-gbps
distserve | --prefill-replicas 2 | --prefill-replicas | 2 | --decode-replicas
distserve | --prefill-replicas 2 --decode-replicas 1 | --link-gbps | missing | Gbit/s
distserve | --prefill-replicas 2 --decode-replicas 1 --link-gbps inf | --link-gbps: inf | 1e9
distserve | --prefill-replicas 2 --decode-replicas 1 --link-gbps 1e-320 | Gbit/s is no link; give 0.001 to 1e9
distserve | --prefill-replicas 2 --decode-replicas 1 --link-gbps 1e23 | Gbit/s is no link; give 0.001 to 1e9
distserve | {POOLS} --replicas 2 | --replicas: 2 | leave it out
distserve | {POOLS} --prefill-pipeline-parallel-size 3 | --prefill-pipeline-parallel-size: 3
layerkv | {POOLS} | --prefill-replicas 2 | layerkv | stage=promote | distserve
layerkv:stage=hand-over | {POOLS} | memory=layers | stage=promote
splitwise:mixed-pool=true | {POOLS} --router round-robin | --router round-robin | mixed pools
splitwise:mixed-pool=true | {POOLS} --pipeline-parallel-size 2 | --pipeline-parallel-size: 2
splitwise:mixed-pool=true,eviction=swap | {POOLS} | eviction=recompute
mooncake | {POOLS} --router least-loaded | --router least-loaded | conductor
layerkv | --pipeline-parallel-size 2 | 2 stages and layerkv | take vllm-v1 or vllm-recompute
vllm-recompute | --pipeline-parallel-size 3 | 3 stages do not have as many of the 32 layers | give a divisor
vllm-recompute | --pipeline-parallel-size 1 --decode-pipeline-parallel-size 2 | goes with --prefill-replicas
vllm-recompute | --pipeline-parallel-size 2 --engine-profile vllm-v1-async | vllm-v1-async: its host time is hidden
vllm-v1 | --pipeline-parallel-size 2 --kv-offloading-size 8 | not simulated where batches pass through stages
vllm-v1:stage=tool-calls | --pipeline-parallel-size 2 | stage=tool-calls: not simulated where batches pass
vllm-v1:max-tokens-per-image=100 | --pipeline-parallel-size 2 | max-tokens-per-image: not simulated where batches
vllm-recompute | --data-parallel-size 2 --pipeline-parallel-size 2 | 2 ranks of virtual engines are not modelled

# Models
vllm-v1 | --model deepseek-v3.2 --tp 8 --gpu a100-80g | no kernels for the indexer of deepseek-v3.2 | below 9.0
vllm-v1 | --model deepseek-v3.2 --tp 8 --gpu h200 --kv-cache-dtype fp8 | no price with 16 heads a GPU: below 32
vllm-v1 | --model deepseek-v3.2 --tp 8 --gpu h200 --cost-form paper | form paper are those of the whole context
vllm-v1 | --model deepseek-v3.2 --tp 8 --gpu h200 --sparse-attention quest:budget=9 | keep latents
sarathi | --model qwen3.5-35b-a3b --gpu h200 | whose memory is vLLM v1's
vllm-v1:memory=radix | --model qwen3.5-35b-a3b --gpu h200 | whose memory is vLLM v1's
vllm-v1:kv-offloading-size=20 | --model qwen3.5-35b-a3b --gpu h200 | qwen3.5-35b-a3b has layers that keep a state
vllm-v1 | --model qwen3.5-35b-a3b --gpu h200 --disable-hybrid-kv-cache-manager | --disable-hybrid-kv-cache-manager
vllm-v1 | --model qwen3.5-35b-a3b --gpu l40s --tp 4 | has no constants of Gated DeltaNet
sglang:max-mamba-cache-size=4 | --model qwen3.5-35b-a3b --gpu h200 | max-mamba-cache-size: of 4 states of | may take 5
sglang:max-total-tokens=150 | --model gpt-oss-20b --gpu h100 | swa-full-tokens-ratio | 120 tokens, and no request
hcache | --model gemma-2-9b --gpu h100 | memory=saved-states: layers of gemma-2-9b share their KV or attend to a part
vllm-v1:kv-offloading-size=4 | --model gemma-2-9b --gpu h100 | gemma-2-9b has layers that keep a window only
layerkv | --model llama-3.1-8b --kv-cache-dtype kivi2 | --kv-cache-dtype kivi2 | memory=layers | may move or share KV
vllm-swap | --model llama-3.1-8b --kv-cache-dtype kivi2 | --kv-cache-dtype kivi2 | eviction=swap | may move or share
vllm-v1:cpu-chunks=10 | --model llama-3.1-8b --kv-cache-dtype kivi2 | --kv-offloading-size | may move or share KV

# A part of the context
vllm-v1 | --sparse-attention tova:budget=9 | 'tova' is no method; give one of streaming-llm, h2o, snapkv
vllm-v1 | --sparse-attention kvpress | kvpress needs compression-ratio=X (of a prompt's tokens, those dropped): give it
layerkv | --sparse-attention snapkv:budget=9 | eviction=layer-offload keeps the whole context
vllm-v1 | --sparse-attention snapkv:budget=9 --enable-prefix-caching | depends on what follows; leave it out
vllm-v1 | --sparse-attention streaming-llm:window=9 --enable-prefix-caching | depends on what follows; leave it out
vllm-v1:kv-offloading-size=1 | --sparse-attention snapkv:budget=9 | kv-offloading-size:  | and whole ones move
vllm-v1:spec-method=ngram,spec-tokens=2,acceptance-rate=0.5 | --sparse-attention snapkv:budget=9 | a part of a prompt
vllm-v1 | --sparse-attention quest | quest needs budget=N (tokens attended to): give it
vllm-v1 | --sparse-attention quest:budgte=9 | has no option 'budgte'; it has budget, page, dense-layers
vllm-v1 | --sparse-attention quest:budget=0 | budget=0 is no whole number from 1 to
vllm-v1 | --sparse-attention double-sparsity:share=nan | share=nan is no number above 0 and at most 1
vllm-v1 | --sparse-attention quest:budget=9,dense-layers=32 | are all 32 layers of llama-2-7b: give fewer
vllm-v1 | --sparse-attention h2o:budget=9 | vllm-v1 splits prompts; give --no-enable-chunked-prefill
layerkv | --sparse-attention h2o:budget=9 | eviction=layer-offload keeps the whole context; take vllm-recompute
hcache | --sparse-attention double-sparsity | share their KV or attend to a part of the context
kvpr | --sparse-attention quest:budget=9 | share their KV or attend to a part of the context
kvpr:stage=stream | --sparse-attention infinigen | share their KV or attend to a part of the context
kvpr | --sparse-attention infinigen | give kvpr:partial-recompute=false
vllm-v1 | --sparse-attention quest:budget=9 --model gemma-3-27b --gpu h100 | keep a window, or share KV
vllm-v1 | --sparse-attention quest:budget=9 --cost-form paper | prices of form paper are those of the whole context

# Drafts
vllm-v1:spec-method=ngram,acceptance-rate=0.5 || spec-tokens: is missing
vllm-v1:spec-method=ngram,spec-tokens=0,acceptance-rate=0.5 || spec-tokens: 0; with
vllm-v1:spec-method=ngram,spec-tokens=2,acceptance-rate=1.5 || acceptance-rate: 1.5 is not between 0 and 1
vllm-v1:spec-method=ngram,spec-tokens=1,synthetic-acceptance-rates=x || synthetic-acceptance-rates: 'x' is not a number
vllm-v1:spec-method=ngram,spec-tokens=2,synthetic-acceptance-rates=0.5 || 1 given; give one for each of 2
vllm-v1:PLENTY,spec-method=draft_model || spec-model: is missing
vllm-v1:PLENTY,spec-method=draft_model,spec-model=qwen3-0.6b || words in its vocabulary
vllm-v1:PLENTY,spec-method=eagle,spec-model=llama-2-7b || no other takes one
vllm-v1:PLENTY,spec-method=sparse_kv || spec-kv-budget: is missing
vllm-v1:PLENTY,spec-method=ngram,spec-kv-budget=9 || no other takes one (spec-method=ngram)
vllm-v1:PLENTY,spec-method=ngram,async-scheduling=true || --async-scheduling: drafted tokens
vllm-v1:PLENTY,spec-method=ngram,cpu-chunks=10 || --kv-offloading-size: what a connector
vllm-v1:PLENTY,spec-method=ngram,memory=radix || goes with memory=paged, not memory=radix
sarathi:PLENTY,stage=speculative,spec-method=ngram || goes with batching=unified, not batching=sarathi
vllm-v1:stage=speculative || stage=speculative: spec-method is missing
vllm-v1:PLENTY,max-tokens-per-image=24,spec-method=ngram || not simulated beside drafts
vllm-v1:max-tokens-per-image=24,kv-offloading-size=1 || not simulated beside drafts
vllm-v1:max-tokens-per-image=24,enable-lora=true || not simulated beside drafts
vllm-v1:max-tokens-per-image=33,disable-chunked-mm-input=on | --max-num-batched-tokens 32 --max-num-seqs 8 | more than
"""


@pytest.mark.parametrize("row", [row for row in RUNS.split("\n") if row and not row.startswith("#")])
def test_a_run_that_cannot_be_is_told_in_one_line(tmp_path, capsys, row):
    policy, words, *parts = re.split(r" ?\| ?", row.replace("PLENTY", "spec-tokens=2,acceptance-rate=0.5"))
    usual = [word for flag, value in USUAL.items() if flag not in words.split() for word in (flag, value)]
    given = ["run", *usual, "--policy", policy, *shlex.split(words), "--out", str(tmp_path / "out"), "--quiet"]
    try:
        status = kvtwin.main(given)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and error.startswith("kvtwin") and error.count("\n") == 1
    assert [part for part in parts if part not in error] == [], error
