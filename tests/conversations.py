"""Random conversations in pools that cannot hold them, for memory that keeps what turns have computed.

`conformance.check` has prompts that begin alike; seldom does one of them outlive its blocks on the GPU. Here it does.
"""

from collections import Counter

from hypothesis import strategies as st

from kvtwin.testing import limits, linear_machine
from kvtwin.testing.conformance import DECODES, Workload, limits_of
from sim.systems.base import Policy
from traces.request import Request

BLOCK = 16


def draw_conversations(draw: st.DrawFn, policy: Policy) -> Workload:
    """Turns of a few conversations, each beginning with all that was said before, in blocks that the trace names."""
    turns = draw(
        st.lists(
            st.tuples(
                st.integers(0, 4), st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]), st.integers(1, 60), st.integers(1, 50)
            ),
            min_size=6,
            max_size=40,
        )
    )
    length, now_s = 512, 0.0
    said: Counter[int] = Counter()
    found: list[Request] = []
    for speaker, gap_s, asked, answered in turns:
        now_s += gap_s
        prompt = said[speaker] + asked
        if prompt + answered > length:
            prompt = asked
        said[speaker] = prompt + answered
        # All begin with the same block.
        ids = tuple((speaker + 1) * 1000 + place if place else 7 for place in range(-(-said[speaker] // BLOCK)))
        named = -(-prompt // BLOCK)
        found.append(Request(len(found), now_s, prompt, answered, f"talk {speaker}", ids[:named], BLOCK, ids[named:]))
    limit = limits(
        gpu=draw(st.integers(34, 60)),
        host=draw(st.sampled_from([0, 8, 25, 60, 1000])),
        block_size=BLOCK,
        max_model_len=length,
    )
    limit = limits_of(policy, limit, draw(st.sampled_from([1, 3, 256])), draw(st.sampled_from([None, 64, 256])))
    machine = linear_machine(
        limit.block_bytes,
        prefill=(0.001, draw(st.sampled_from([1e-3, 2e-4])), 0.0),
        decode=draw(st.sampled_from(DECODES)),
        swap_s_per_block=draw(st.sampled_from([1e-4, 3e-3, 0.05])),
    )
    return Workload(found, limit, machine)


conversations = st.composite(draw_conversations)
