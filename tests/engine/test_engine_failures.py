"""Events that end a request early, and pools that notice what should not be asked of them."""

import pytest

from kvtwin.testing import conformance, limits, linear_machine, requests
from kvtwin.testing.conformance import Workload
from kvtwin.testing.engines import build_engine
from sim.engine.plan import StepTimes
from sim.engine.sequence import Status
from sim.errors import InvariantError
from sim.kv.block_pool import BlockPool
from sim.options.policies import parse_policy


def started(*rows):
    """An engine with these requests, and those that have ended."""
    ended = []
    engine = build_engine(parse_policy("vllm-recompute", {})[1], limits(gpu=20), linear_machine(), ended.append)
    return engine, [engine.add_request(request) for request in requests(*rows)], ended


def step(engine, now_s):
    plan = engine.schedule(now_s)
    engine.commit(plan, StepTimes(1, now_s + 1.0, 0.0, 0.0, now_s + 1.0, 1))
    return now_s + 1.0


def test_what_fails_while_waiting_ends_at_once_in_error():
    engine, (seq,), ended = started((0.0, 10, 5))
    engine.fail(seq, "copy lost")
    assert ended == [seq]
    assert (seq.status, seq.error) == (Status.IGNORED, "failed: copy lost")
    assert engine.scheduler.counters.ignored["failed: copy lost"] == 1
    assert not engine.has_unfinished


def test_what_fails_while_running_ends_with_the_next_token_and_gives_its_blocks_back():
    engine, (seq, other), ended = started((0.0, 10, 50), (0.0, 10, 50))
    now_s = step(engine, step(engine, 0.0))
    engine.fail(seq, "kernel")
    engine.fail(seq, "again")
    assert ended == []
    step(engine, now_s)
    assert ended == [seq]
    assert (seq.num_generated, seq.error) == (3, "failed: kernel")
    assert engine.scheduler.counters.ignored == {"failed: kernel": 1}
    assert engine.scheduler.gpu.num_blocks - engine.scheduler.gpu.free == 1
    assert other.error == ""


def test_what_has_ended_cannot_fail():
    engine, (seq,), ended = started((0.0, 10, 1))
    step(engine, 0.0)
    assert ended == [seq]
    engine.fail(seq, "late")
    assert (seq.status, seq.error, ended) == (Status.FINISHED, "", [seq])
    assert engine.scheduler.counters.ignored == {}


def test_a_prompt_that_fills_the_pool_in_small_chunks_does_not_stand_still():
    """vLLM 0.5.5's admission asks for the whole prompt and the watermark: no request may wait for ever."""
    for prompt, outputs in ((64, (1, 2)), (63, (1, 2)), (48, (1, 20))):
        policy = parse_policy("vllm-recompute", {})[1]
        limit = limits(gpu=4, host=0, max_model_len=256, seqs=16, tokens=16, chunked=True)
        arrivals = requests(*((0.0, prompt, output) for output in outputs), (0.1, 5, 3))
        workload = Workload(arrivals, limit, linear_machine())
        outcome = conformance.run(policy, workload)
        conformance.check_ends(outcome, workload)
        conformance.check_jumps(policy, workload)
        assert outcome.by_id()[2].status is Status.FINISHED


def test_a_pool_counts_and_refuses_what_it_does_not_have():
    pool = BlockPool("GPU", 5)
    pool.allocate(3)
    pool.release(1)
    assert (pool.free, pool.num_allocated, pool.num_released) == (3, 3, 1)
    for count in (-1, 4):
        with pytest.raises(InvariantError, match=rf"GPU: {count} blocks asked for, 3 of 5 free"):
            pool.allocate(count)
    assert (pool.free, pool.num_allocated) == (3, 3)
    pool.allocate(3)
    assert pool.free == 0
    for count in (-1, 6):
        with pytest.raises(InvariantError, match=rf"GPU: {count} blocks given back"):
            BlockPool.release(fresh := BlockPool("GPU", 5), count)
        assert fresh.num_blocks == 5
