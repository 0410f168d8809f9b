"""Which requests waited longest for a first token, and what did the engine do meanwhile? Tables of a run for pandas.

python examples/slowest_requests.py [DIR]     DIR: what `kvtwin run --out DIR --figures` left; without it a run is made
"""

import sys

import kvtwin

if len(sys.argv) > 1:
    run = kvtwin.load_result(sys.argv[1])
else:
    crowd = kvtwin.Scenario(workload="burst", num_prompts=200, request_rate=4.0, gpu="l20", clip=4096)
    run = kvtwin.simulate(crowd, "vllm-v1")

slowest = run.requests.nlargest(5, "ttft_s")
print(slowest[["request_id", "arrival_s", "prompt_tokens", "queue_s", "ttft_s"]].to_string(index=False))
if not run.series.empty:
    during = run.series[run.series["time_s"].between(slowest["arrival_s"].min(), slowest["arrival_s"].max())]
    print(
        f"\nmeanwhile at most {during['num_waiting'].max():.0f} waited and {during['num_decoding'].max():.0f} decoded"
    )
