#!/usr/bin/env bash
# What a GPU can tell in ten minutes, the most important first. docs/runtime.md says how to read it.
#
#   benchmarks/gpu_session.sh OUT                       # an H200, A100 or L20 with an idle host
#   benchmarks/gpu_session.sh OUT --device cpu          # rehearsal: a small model, minutes
#   [--model NAME] [--minutes 9.5] [--only "copies decode"] [--stretch 1: times what each part may take]
#
# OUT/summary.md gets a line when a part ends; its output is in OUT/session.log, its figures in files of its own. A part
# that fails or takes too long does not stop the others. Runs with `python3`, or what PYTHON names.
set -uo pipefail

usage() { sed -n '2,9p' "$0" | cut -c3- >&2; exit 2; }
[[ $# -ge 1 && $1 != -* ]] || usage
out=$1; shift
device=cuda model=llama-2-7b minutes=9.5 only="" stretch=1
while (($#)); do
    [[ $# -ge 2 ]] || usage
    case $1 in
        --device) device=$2 ;;
        --model) model=$2 ;;
        --minutes) minutes=$2 ;;
        --only) only=" $2 " ;;
        --stretch) stretch=$2 ;;
        *) usage ;;
    esac
    shift 2
done

[[ $stretch =~ ^[1-9][0-9]*$ ]] || usage
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$out/session.log summary=$out/summary.md
# Status of a validation that came to its end and found the twin off by more than its tolerance.
inaccurate=64
deadline=$(awk -v now="$(date +%s)" -v minutes="$minutes" 'BEGIN { printf "%d", now + 60 * minutes }')
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

small=$work/small/config.json
mkdir -p "$work/small"
cat >"$small" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
 "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 2048,
 "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32"}
JSON
quick=() workload=(--input-len 512 --output-len 64 --request-rate 8 --num-prompts 40) processes=(-n 6)
if [[ $device == cpu ]]; then
    model=$small quick=(--quick) processes=()
    workload=(--input-len 60 --output-len 20 --request-rate 8 --num-prompts 15)
fi

# part NAME SECONDS COMMAND...: run it, no longer than it and the session may take, and say how it ended.
part() {
    local name=$1 limit=$(($2 * stretch)) begun=$SECONDS left status word
    shift 2
    [[ -z $only || $only == *" $name "* ]] || return 0
    left=$((deadline - $(date +%s)))
    if ((left < 5)); then
        echo "| $name | not run: no time is left | 0 |" >>"$summary"
        return 0
    fi
    ((limit > left)) && limit=$left
    printf '\n==== %s (at most %s s)\n' "$name" "$limit" >>"$log"
    timeout --kill-after=10 "$limit" "$@" >>"$log" 2>&1
    status=$?
    case $status in
        0) word=done ;;
        "$inaccurate") word="done, **inaccurate**" ;;
        124 | 137) word="**failed**: ended after $limit s" ;;
        *) word="**failed** (status $status)" ;;
    esac
    echo "| $name | $word | $((SECONDS - begun)) |" >>"$summary"
}

machine() {
    "$python" - "$device" <<'PY'
import importlib.metadata, importlib.util, pathlib, shutil, sys, sysconfig
needed = {"msgspec", "simpy", "numpy", "scipy", "rich", "matplotlib", "torch", "psutil", "safetensors", "pytest", "hypothesis"}
for name in sorted(needed | {"triton", "transformers", "flashinfer-python", "cuda-bindings", "nvidia-ml-py"}):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "MISSING" if name in needed else "absent")
import torch
# Triton compiles what launches its kernels with them.
tools = {
    "a C compiler": shutil.which("gcc") or shutil.which("cc") or shutil.which("clang"),
    "Python.h": pathlib.Path(sysconfig.get_path("include"), "Python.h").exists(),
}
for name, found in tools.items():
    print(name, "found" if found else "MISSING: install gcc and the headers of this Python")
if sys.argv[1] == "cuda":
    print(torch.version.cuda, torch.cuda.get_device_properties(0), torch.cuda.mem_get_info())
    import time, psutil
    # A virtual machine's memory may grow with its use, and what is free decides what is measured and what is refused.
    held, waited, available = [], 0, lambda: psutil.virtual_memory().available >> 20
    before = available()
    while available() < 40 << 10 and len(held) < 40 and waited < 20:
        if available() > 2 << 10:
            held.append(b"1" * (1 << 30))
        else:
            waited += 1
            time.sleep(0.1)
    grown = len(held)
    held.clear()
    print(f"host memory, MiB: {before} free at first, {available()} after {grown} GiB were used")
lacks = sys.argv[1] == "cuda" and not all(tools.values())
sys.exit(lacks or any(importlib.util.find_spec(name) is None for name in needed))
PY
    local status=$?
    [[ $device == cpu ]] || nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE
    free -g; nproc; uptime
    return $status
}

smoke() {
    local status=0 can
    serve_few() {
        "$python" -m kvtwin live --device "$device" --workload fixed --input-len 60 --output-len 20 --num-prompts 12 \
            --num-gpu-blocks-override 24 --num-cpu-blocks-override 60 --request-rate 50 --max-num-seqs 16 \
            --out "$work/smoke" "$@" || status=1
    }
    for policy in vllm-recompute vllm-swap layerkv; do serve_few --model "$small" --policy "$policy"; done
    # What not every machine has: a second GPU, and tensor cores for FP8. A CPU has both, in its way.
    can=$("$python" - "$device" <<'PY'
import sys, torch
on_cpu = sys.argv[1] == "cpu"
print("two" * (on_cpu or torch.cuda.device_count() > 1), "fp8" * (on_cpu or torch.cuda.get_device_capability() >= (8, 9)))
PY
    )
    [[ $can != *two* ]] || serve_few --model "$small" --policy vllm-v1 --tp 2
    mkdir -p "$work/fp8"
    sed 's/^{/{"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}, /' "$small" >"$work/fp8/config.json"
    [[ $can != *fp8* ]] || serve_few --model "$work/fp8/config.json" --policy vllm-v1
    return $status
}

cuda_tests() {
    # Kernels are compiled: several processes share that.
    "$python" -c 'import xdist' 2>/dev/null || processes=()
    "$python" -m pytest -q -m gpu "${processes[@]}" -rfE tests/gpu_runtime tests/calib/test_calib_measure_cuda.py
}

figures() {
    "$python" benchmarks/runtime_cuda.py --device "$device" --model "$model" "${quick[@]}" --only "$1" --out "$out/$1"
}

calibrate() {
    # Without --lock-clocks: the device may be borrowed, and its settings are not ours.
    "$python" -m kvtwin calibrate --device "$device" --model "$model" --quick --name session --out "$work/calibration"
}

validate() {
    local profile=$work/calibration/session.json gpu given=()
    if [[ -f $profile ]]; then
        gpu=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["gpu"])' "$profile") || return 1
        given=(--profile "$profile")
    else
        echo "calibration left no profile: the GPU's default one stands in"
        gpu=cpu
        [[ $device == cpu ]] || gpu=$("$python" -c 'import torch; from sim.specs.hardware import gpu_called
print(gpu_called(torch.cuda.get_device_name()))') || return 1
    fi
    "$python" -m kvtwin validate --device "$device" --model "$model" --gpu "$gpu" "${given[@]}" --runs 1 \
        --policy vllm-recompute layerkv --workload fixed "${workload[@]}" --swap-space 4 --out "$work/validate" \
        | tee "$work/validate.txt"
    local status=${PIPESTATUS[0]}
    # It says so when it has come to its end; an error does not.
    [[ $status == 1 ]] && grep -q '^wrote .*validation.md' "$work/validate.txt" && return "$inaccurate"
    return "$status"
}

export -f machine smoke cuda_tests figures calibrate validate
export out work device model python small inaccurate
# Arrays are not exported: each part that uses them is told them anew.
# A part that is ended waits for its program, which writes what it has: the next one has the machine to itself.
in_bash() { echo "trap 'exit 143' TERM"; declare -p quick workload processes; echo "$@"; }
# Also of a part that did not come to its end.
keep() { [[ ! -d $work/$1 ]] || tar -C "$work" -czf "$out/$1.tar.gz" "$1"; }

printf '# A session on %s, %s\n\n| part | how it ended | s |\n|---|---|--:|\n' "$device" "$(date -u +%FT%TZ)" >"$summary"
: >"$log"
part machine 30 bash -c "$(in_bash machine)"
part smoke 90 bash -c "$(in_bash smoke)"
part tests 150 bash -c "$(in_bash cuda_tests)"
part copies 60 bash -c "$(in_bash figures copies)"
part decode 60 bash -c "$(in_bash figures decode)"
part prefill 60 bash -c "$(in_bash figures prefill)"
part calibrate 120 bash -c "$(in_bash calibrate)"
keep calibration
part validate 150 bash -c "$(in_bash validate)"
keep validate
part overlap 30 bash -c "$(in_bash figures overlap)"
printf '\n```\n%s\n```\n' "$(grep '^|' "$log")" >>"$summary"
cat "$summary"
! grep -q '\*\*failed' "$summary"
