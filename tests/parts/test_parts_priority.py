"""vLLM's priority scheduling: the most urgent first, then in order of arrival; any can leave the queue."""

from hypothesis import given
from hypothesis import strategies as st

from sim.engine.sequence import Sequence
from sim.parts.order.priority import Priority
from traces.request import Request

ROWS = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=12)


@given(ROWS, st.data())
def test_the_queue_is_sorted_and_says_what_was_in_it(rows, data):
    seqs = [Sequence(Request(i, float(at), 5, 5, priority=priority)) for i, (priority, at) in enumerate(rows)]
    order = Priority()
    order.put_back(seqs[::2])
    for seq in seqs[1::2]:
        order.add(seq)
    gone = data.draw(st.sets(st.sampled_from(seqs))) if seqs else set()
    assert [order.remove(seq) for seq in gone] == [True] * len(gone)
    assert [order.remove(seq) for seq in gone] == [False] * len(gone)
    left = sorted(
        (seq for seq in seqs if seq not in gone),
        key=lambda seq: (seq.request.priority, seq.request.arrival_s, seq.request.request_id),
    )
    assert list(order) == left and len(order) == len(left)
    for seq in left:
        assert order.head() is seq and order.pop() is seq
    assert not order
