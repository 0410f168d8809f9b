"""A planted server: our own simulation with hidden constants, unsteady iterations and a client that hears late."""

import json
from dataclasses import replace
from itertools import pairwise
from math import exp
from random import Random

from calib.server.constants import with_constants
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.served import as_served
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic

HIDDEN = {"step_overhead_s": 0.0031, "hbm_bytes_per_s": 1.32e12, "flops_per_s": 2.05e14}
"""All three far from the profile that a fit starts from."""
LOADS = {"light": 1.0, "medium": 4.0, "near saturation": 8.0}
"""Requests/s of ShareGPT's lengths that an A100 with Llama-2-7B bears easily, well and hardly."""
UNSTEADY, LATE_S = 0.02, 2e-4


def setup(policy="vllm-v1", rate=4.0, **changes):
    """Llama-2-7B on an A100, as the server has it but for the constants."""
    scenario = Scenario(workload="sharegpt", num_prompts=100, request_rate=rate, max_model_len=4096, seed=3)
    return prepare(as_served(replace(scenario, **changes)), *parse_policy(policy, {}))


def serve(described, path, hidden=HIDDEN, *, unsteady=UNSTEADY, late_s=LATE_S, seed=1):
    """Serve the traffic with hidden constants, and write what `vllm bench serve` would; returns the requests."""
    random, real = Random(seed), with_constants(described, hidden)
    price = real.cost.iteration_s
    real.cost.iteration_s = lambda plan: price(plan) * exp(unsteady * random.gauss(0, 1))
    requests = list(traffic(described.scenario))
    front_end_s = real.engine_profile.value("front_end_s")
    run = execute(build_run(real, requests, keep=Recording(detailed=True), jump=False))
    result = {"completed": len(requests), "failed": 0, "request_throughput": run.log.rate(len(requests)), "itls": []}
    result |= {"input_lens": [], "output_lens": [], "start_times": [], "ttfts": [], "errors": [""] * len(requests)}
    for request in requests:
        heard_s = sorted(at_s + front_end_s + random.uniform(0, late_s) for at_s in run.detailed[request.request_id])
        result["input_lens"].append(request.prompt_tokens)
        result["output_lens"].append(request.output_tokens)
        result["start_times"].append(1000.0 + request.arrival_s)
        result["ttfts"].append(heard_s[0] - request.arrival_s)
        result["itls"].append([after - before for before, after in pairwise(heard_s)])
    path.write_text(json.dumps(result))
    return requests
