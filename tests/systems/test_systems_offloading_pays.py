"""vLLM's connector at 25 GB/s: by price no hit on the host is slower than recomputing, and the result says so."""

import pytest

import kvtwin


def served(model, gpu, **options):
    scenario = kvtwin.Scenario(
        workload="sessions", num_prompts=150, request_rate=6.0, model=model, gpu=gpu, num_gpu_blocks_override=1500,
        max_model_len=4096, profile=f"{gpu}-imported:pcie_bytes_per_s=25e9", **options,
    )  # fmt: skip
    return kvtwin.simulate(scenario, "vllm-v1:kv-offloading-size=60").result


@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-8b", "a100-80g"), ("llama-3.1-8b", "h100")])
def test_no_hit_on_the_host_is_slower_than_recomputing(model, gpu):
    (host,) = served(model, gpu).tiers
    assert host.hit_tokens > 1000
    assert host.lost_s == 0.0 < host.saved_s


def test_where_it_does_not_pay_that_is_said():
    """A tiny model on a fast GPU computes its 114 kB a token sooner than the link brings them, if graphs launch it."""
    (host,) = served("qwen3-0.6b", "h100", max_cudagraph_capture_size=8192).tiers
    assert host.hit_tokens > 1000
    assert host.saved_s < host.lost_s
