"""Requests that would outgrow the model's positions are refused before anything is served, or stopped by the policy."""

from dataclasses import replace

import pytest

from gpu_runtime.live import LiveOptions, check_lengths, perform
from kvtwin.testing.live import small_decoder
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.traffic import traffic
from sim.systems import POLICIES

SCENARIO = Scenario(
    model="qwen3-0.6b", gpu="cpu", dtype="float32", workload="fixed", input_len=9, output_len=504, num_prompts=2,
    num_gpu_blocks_override=80, num_cpu_blocks_override=40, max_model_len=512,
)  # fmt: skip


def run(name, scenario=SCENARIO):
    setup = prepare(scenario, "", POLICIES[name]())
    check_lengths(setup, small_decoder().config)
    return perform(setup, traffic(scenario), None, Recording(), small_decoder(), LiveOptions("cpu"))


@pytest.mark.parametrize("name", ["vllm-recompute", "layerkv"])
def test_a_request_beyond_the_last_position_is_refused_where_the_policy_does_not_stop(name):
    message = r"request 0: 9 \+ 504 tokens, small has 512 positions and the policy does not stop there: give --clip 512"
    with pytest.raises(UserError, match=message):
        run(name)


def test_clipped_as_the_message_says_it_is_served_to_the_last_position():
    served = run("vllm-recompute", replace(SCENARIO, clip=512, num_prompts=1))
    assert served.log.completed == 1


def test_a_policy_that_stops_at_the_context_length_stops_there():
    served = run("vllm-v1", replace(SCENARIO, num_prompts=1, max_model_len=40))
    assert (served.log.completed, served.error) == (1, None)
