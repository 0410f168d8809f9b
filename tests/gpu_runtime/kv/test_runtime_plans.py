"""A plan that says anything else than what happens is found out, whatever it is wrong about."""

import pytest
from msgspec.structs import replace
from runtime_mistakes import misled
from runtime_variants import STREAM, policy_of

from gpu_runtime.kv.block_ids import BlockIds, OutOfBlocks
from gpu_runtime.kv.replay.placement import Placement
from kvtwin.testing import live, requests
from kvtwin.testing.live import GROWING, ROWS, tight_limits
from sim.engine.changes import Move, Place, Release, Restore, Save, Streamed, Tier, Uncache
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from traces.request import Request


def mistaken(variant, mistake, rows=ROWS, **sizes):
    """Serve with a mistake in every plan that it fits; in how many."""
    policy = policy_of(variant)
    limit = tight_limits(policy, **sizes)
    return misled(lambda kind: live.serve(policy, requests(*rows), limit, kind=kind), *mistake)


def on(kind, **changed):
    """A part's items of a kind with fields that are functions of what they were."""

    def wrong(item):
        if not isinstance(item, kind):
            return item
        return replace(item, **{name: change(getattr(item, name)) for name, change in changed.items()})

    return wrong


def without(kind):
    """No items of a kind."""
    return lambda item: None if isinstance(item, kind) else item


def less(number):
    return number - 1


def fewer(groups):
    return groups[1:]


MISTAKES = {
    "a block too few goes out": ("vllm-swap", "changes", on(Move, num_blocks=less)),
    "a block too few comes back": ("vllm-swap", "changes", on(Restore, num_blocks=less)),
    "tokens too few go out": ("vllm-swap", "changes", on(Move, end_token=lambda end: end - 4)),
    "nothing comes back": ("vllm-swap", "changes", without(Restore)),
    "nothing goes out": ("vllm-swap", "changes", without(Move)),
    "a prompt has a block too many": ("vllm-recompute", "changes", on(Place, num_blocks=lambda blocks: blocks + 1)),
    "a reservation is too small": ("orca", "changes", on(Place, num_blocks=less)),
    "a prompt has no blocks": ("vllm-recompute", "changes", without(Place)),
    "nothing is given back": ("vllm-recompute", "changes", without(Release)),
    "a sequence decodes unplanned": ("vllm-recompute", "decodes", lambda seq: None),
    "a layer is elsewhere": ("layerkv", "changes", on(Place, gpu_groups=fewer)),
    "there is no send buffer": ("layerkv", "changes", on(Place, num_buffers=lambda _: 0)),
    "a block too few leaves behind a prefill": ("layerkv", "behind", on(Move, num_blocks=less)),
    "other layers leave behind a prefill": ("layerkv", "behind", on(Move, groups=fewer)),
    "nothing leaves behind a prefill": ("layerkv", "behind", without(Move)),
    "a block too few moves beside": ("layerkv", "beside", on(Move, num_blocks=less)),
    "a layer too few moves beside": ("layerkv", "beside", on(Move, groups=fewer)),
    "nothing moves beside": ("layerkv", "beside", without(Move)),
    "a block too many is read": (STREAM, "streamed", on(Streamed, num_read=lambda read: read + 1)),
    "a block too few is written": (STREAM, "streamed", on(Streamed, num_written=less)),
    "nothing streams": (STREAM, "streamed", without(Streamed)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_plan_is_found_out(mistake):
    variant, *wrong = MISTAKES[mistake]
    with pytest.raises((InvariantError, OutOfBlocks)):
        mistaken(variant, wrong)


def test_a_retained_layer_that_stays_is_missed():
    def stays(move):
        return move if move.target is Tier.GPU else replace(move, groups=move.groups[1:])

    with pytest.raises(InvariantError, match="copied before and beside the computation"):
        mistaken("layerkv", ("beside", stays), GROWING, gpu=20, seqs=4)


def test_what_a_chunk_reads_back_is_counted():
    with pytest.raises(InvariantError, match="read between the layers"):
        mistaken("layerkv", ("streamed", on(Streamed, num_read=less)), chunked=True)


# -- block ids alone -----------------------------------------------------------------------------------------------


class Ids:
    """A placement of two layer groups and one sequence of three blocks; four tokens a block."""

    def __init__(self, gpu=12, host=12):
        self.gpu, self.host = BlockIds(gpu), BlockIds(host)
        self.placement = Placement(self.gpu, self.host, num_groups=2, block_tokens=4)
        self.seq = Sequence(Request(0, 0.0, 10, 5))
        self.settled = []

    def replay(self, *changes):
        plan = IterationPlan()
        plan.changes = changes
        copies = self.placement.replay(plan, self.settled.append)
        self.placement.check()
        return copies

    def move(self, groups, target, *, reported=True):
        source = Tier.GPU if target is Tier.HOST else Tier.HOST
        return Move(self.seq, groups, 0, 12, source, target, 3 * len(groups), 0, reported)

    @property
    def used(self):
        return 12 - self.gpu.num_free, 12 - self.host.num_free


@pytest.fixture
def ids():
    return Ids()


def test_blocks_leave_in_pieces_and_come_back_in_their_order(ids):
    """A block, then two: each piece is free when its copy has ended."""
    ids.replay(Place(ids.seq, (0, 1), 3, 0))
    before = list(ids.placement.held[ids.seq].gpu[1])
    pieces = [replace(ids.move((1,), Tier.HOST), first_token=a, end_token=b) for a, b in ((0, 4), (4, 12))]
    begun = [ids.placement.begin(move) for move in pieces]
    assert [list(copy.source) for _, copy in begun] == [before[:1], before[1:]]
    assert ids.used == (6, 3)
    ids.placement.end(begun[0][0])
    assert ids.used == (5, 3)
    ids.placement.check()
    ids.placement.end(begun[1][0])
    assert ids.used == (3, 3)
    _, back = ids.placement.begin(ids.move((1,), Tier.GPU))
    assert back.source == begun[0][1].target + begun[1][1].target


@pytest.mark.parametrize(("first", "end"), [(4, 12), (0, 16), (0, 0)])
def test_a_piece_follows_what_has_gone_and_is_there(ids, first, end):
    ids.replay(Place(ids.seq, (0, 1), 3, 0))
    with pytest.raises(InvariantError, match="0 have gone and 3 are there"):
        ids.placement.begin(replace(ids.move((1,), Tier.HOST), first_token=first, end_token=end))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: Restore(ids.seq, 12, (0,), (1,), (), 3), "restores copied KV only"),
        (lambda ids: Restore(ids.seq, 12, (), (1,), (0,), 3), "restores copied KV only"),
        (lambda ids: Restore(ids.seq, 12, (), (0,), (), 3), "layer group 0 are to be moved, nothing is there"),
        (lambda ids: Place(ids.seq, (0, 1), 3, 0), "holds some already"),
        (lambda ids: ids.move((0,), Tier.HOST), "is not reported"),
        (lambda ids: replace(ids.move((0,), Tier.HOST, reported=False), end_token=8), "2 blocks .* 3 blocks is there"),
        (lambda ids: Release(Sequence(Request(7, 0.0, 1, 1))), "holds no blocks"),
        (lambda ids: Save(ids.seq), "this device keeps no states on the host"),
        (lambda ids: Uncache(ids.seq, 4, 1, (0,), 1), "this device keeps KV of all tokens"),
    ],
)
def test_what_cannot_be_done_is_refused(ids, change, message):
    ids.replay(Place(ids.seq, (0, 1), 3, 0))
    with pytest.raises(InvariantError, match=message):
        ids.replay(change(ids))
