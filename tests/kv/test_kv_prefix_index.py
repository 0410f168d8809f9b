"""`PrefixIndex` against vLLM's block pool written out block by block: same hits, same free blocks, same evictions."""

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.sequence import Sequence
from sim.kv.block_pool import BlockPool
from sim.kv.index.block_keys import BlockKeys
from sim.kv.index.prefix_index import Holding, PrefixIndex
from traces.request import Image, Request


class BlockByBlock:
    """vLLM v1's rules with one object a block: chained hashes, the oldest duplicate is hit, LRU with tails first."""

    def __init__(self, num_blocks):
        self.queue = OrderedDict((block, None) for block in range(num_blocks))
        self.prefix_of = {}
        self.cached = {}
        self.users = dict.fromkeys(range(num_blocks), 0)
        self.num_evicted = 0

    def hits(self, keys, limit):
        found = []
        for end in range(1, limit + 1):
            blocks = self.cached.get(tuple(keys[:end]))
            if not blocks:
                break
            found.append(next(iter(blocks)))
        return found

    def take(self, blocks):
        for block in blocks:
            self.queue.pop(block, None)
            self.users[block] += 1

    def allocate(self, count):
        taken = []
        for _ in range(count):
            block, _ = self.queue.popitem(last=False)
            if (prefix := self.prefix_of.pop(block, None)) is not None:
                del self.cached[prefix][block]
                self.num_evicted += 1
            self.users[block] += 1
            taken.append(block)
        return taken

    def publish(self, blocks, keys, num_blocks):
        for i in range(min(num_blocks, len(keys))):
            if blocks[i] not in self.prefix_of:
                prefix = tuple(keys[: i + 1])
                self.prefix_of[blocks[i]] = prefix
                self.cached.setdefault(prefix, {})[blocks[i]] = None

    def release(self, blocks):
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.queue[block] = None
                if block not in self.prefix_of:
                    self.queue.move_to_end(block, last=False)


class Both:
    """One history in both; every question is asked of both."""

    def __init__(self, num_blocks, lazy):
        self.full = {}
        self.index = PrefixIndex(lambda seq: (self.full[seq], self.full[seq]))
        self.pool = BlockPool("GPU", num_blocks, self.index)
        self.plain = BlockByBlock(num_blocks)
        self.running = []
        self.lazy = lazy

    def admit(self, keys, limit, num_new, publish):
        """A prompt of `keys` that hits at most `limit` blocks and takes `num_new` more, `publish` of them full."""
        match = self.index.publish_and_match(keys, limit)
        hits = self.plain.hits(keys, limit)
        assert match.num_blocks == len(hits)
        assert match.num_idle == sum(not self.plain.users[block] for block in hits)
        if match.num_idle + num_new > self.pool.free:
            return
        seq = Sequence(Request(0, 0.0, 1, 1))
        holding = Holding(seq, keys)
        self.full[seq] = 0
        self.index.take(holding, match)
        self.pool.allocate(match.num_idle)
        self.pool.allocate(num_new)
        self.plain.take(hits)
        blocks = hits + self.plain.allocate(num_new)
        self.running.append((holding, blocks))
        seq.prefilling = True
        self.publish(len(self.running) - 1, len(hits) + min(publish, num_new))
        seq.prefilling = not self.lazy

    def publish(self, i, num_blocks):
        holding, blocks = self.running[i]
        self.full[holding.seq] = num_blocks
        self.index.publish(holding, num_blocks)
        self.plain.publish(blocks, holding.keys, num_blocks)

    def grow(self, i, num_new):
        """What it had is full; `num_new` blocks more."""
        holding, blocks = self.running[i]
        if num_new > self.pool.free:
            return
        self.full[holding.seq] = len(blocks)
        if not self.lazy:
            self.index.publish(holding, len(blocks))
        self.plain.publish(blocks, holding.keys, len(blocks))
        self.pool.allocate(num_new)
        blocks += self.plain.allocate(num_new)

    def end(self, i):
        holding, blocks = self.running.pop(i)
        full = max(self.full[holding.seq], holding.num_blocks)
        self.index.publish(holding, full, (-full, holding.number) if self.lazy else None)
        held = holding.num_blocks
        # What has no keys cannot be hit: hashed in vLLM, and so evicted in its turn.
        private = max(0, full - held)
        for at in range(held, held + private):
            self.plain.prefix_of[blocks[at]] = (object(),)
            self.plain.cached[self.plain.prefix_of[blocks[at]]] = {blocks[at]: None}
        self.index.rest(private) if private else None
        self.pool.release(len(blocks) - held + self.index.release(holding))
        self.plain.release(blocks)

    def check(self):
        assert self.pool.free == len(self.plain.queue)
        assert self.index.num_evicted == self.plain.num_evicted
        idle = sum(block in self.plain.prefix_of for block in self.plain.queue)
        assert self.index.num_idle == idle


def history(seed, both):
    """150 random steps over a few prompts that share, part and repeat; after each, what would be hit is asked anew."""
    dice = Random(seed)
    stems = [tuple(dice.randrange(3) for _ in range(dice.randrange(4, 12))) for _ in range(4)]

    def keys():
        stem = dice.choice(stems)
        return stem[: dice.randrange(len(stem) + 1)] + tuple(dice.randrange(3) for _ in range(dice.randrange(3)))

    for _ in range(150):
        step = dice.random()
        if step < 0.35 and len(both.running) < 6:
            found = keys()
            num_new = dice.randrange(1, 6)
            publish = num_new if both.lazy else dice.randrange(num_new + 1)
            both.admit(found, dice.choice([len(found), max(0, len(found) - 1)]), num_new, publish)
        elif both.running:
            i = dice.randrange(len(both.running))
            holding, blocks = both.running[i]
            if step < 0.5 and not both.lazy:
                both.publish(i, dice.randint(both.full[holding.seq], len(blocks)))
            elif step < 0.8 and not both.lazy:
                both.grow(i, dice.randrange(1, 3))
            elif step < 0.8:
                # Sequences decode in step: the longer had each block first.
                for each in range(len(both.running) if both.pool.free >= len(both.running) else 0):
                    both.grow(each, 1)
            else:
                both.end(i)
        both.check()
        if dice.random() < 0.5:
            probe = keys()
            assert both.index.publish_and_match(probe, len(probe)).num_blocks == len(both.plain.hits(probe, len(probe)))
    while both.running:
        both.end(dice.randrange(len(both.running)))
        both.check()


@pytest.mark.parametrize("lazy", [False, True], ids=["published at once", "published when looked up"])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), num_blocks=st.integers(8, 48))
def test_hits_and_evictions_are_those_of_single_blocks(lazy, seed, num_blocks):
    both = Both(num_blocks, lazy)
    history(seed, both)
    assert both.pool.free == num_blocks


def test_a_look_up_stays_true_while_only_private_blocks_give_way():
    """Two blocks with keys and then five private ones are given back; the private ones were so first."""
    both = Both(8, lazy=False)
    both.admit((), 0, 5, 0)
    both.admit((1, 2), 1, 2, 2)
    both.full[both.running[0][0].seq] = 5
    both.end(0)
    both.end(0)
    looked_up = both.index.version
    both.admit((), 0, 4, 0)
    both.check()
    # The one change is that a sequence was admitted.
    assert both.index.num_evicted == 3 and both.index.version == looked_up + 1
    both.admit((), 0, 4, 0)
    both.check()
    assert both.index.publish_and_match((1, 2), 2).num_blocks == 0


@pytest.mark.parametrize(
    ("named", "size", "ids", "keys"),
    [
        (16, 16, (7, 8), (7, 8)),
        (32, 16, (7, 8), (14, 15, 16, 17)),
        (8, 16, (7, 8, 9, 4, 5), (0, 1)),
        (24, 16, (7, 8), (0, 1, 2)),
        (5, 15, (1, 2, 3, 1, 2, 3, 4), (0, 0)),
        (5, 16, (1, 2, 3), ()),
    ],
    ids=["as long", "twice", "half", "crosswise", "a third", "one token short"],
)
def test_keys_of_blocks_of_any_size(named, size, ids, keys):
    """24-token ids and 16-token blocks: the first block is in 7, the second in 7 and 8, the third in 8."""
    prompt = len(ids) * named
    assert BlockKeys(size).of(Request(0, 0.0, prompt, 1, "", ids, named)) == keys


def test_a_block_is_all_that_its_first_and_last_token_are_in():
    """16 tokens of ids of 5: the last one alone is in the fourth, the first one of the second block too."""
    keys = BlockKeys(16)
    found = [
        keys.of(Request(0, 0.0, 5 * len(ids), 1, "", ids, 5)) for ids in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4))
    ]
    assert found == [(0,), (1,), (0,)]
    assert keys.of(Request(0, 0.0, 35, 1, "", (1, 2, 3, 4, 6, 7, 8), 5)) == (0, 2)
    assert keys.of(Request(0, 0.0, 35, 1, "", (1, 2, 3, 5, 6, 7, 8), 5)) == (1, 3)


def test_blocks_are_apart_by_the_parts_of_images_in_them() -> None:
    """16-token blocks, images of 20 tokens from 8 on: in the first two blocks, the text of the third is the same."""
    keys = BlockKeys(16)

    def of(*images: Image) -> tuple[int, ...]:
        return keys.of(Request(0, 0.0, 48, 1, "", (1, 2, 3), 16, images=images))

    plain, cat, dog = of(), of(Image(8, 20, 7)), of(Image(8, 20, 8))
    assert plain == (1, 2, 3) and cat == of(Image(8, 20, 7))
    assert [len({one, two, three}) for one, two, three in zip(plain, cat, dog, strict=True)] == [3, 3, 1]
    # From another place on, of another length, or with one behind it.
    assert of(Image(9, 20, 7))[0] != cat[0] != of(Image(8, 19, 7))[0]
    assert of(Image(8, 20, 7), Image(28, 4, 8))[:2] == (cat[0], of(Image(8, 20, 7), Image(28, 4, 8))[1]) != cat[:2]


def test_ids_of_the_output_count_where_the_prompt_is_named_to_its_end():
    keys = BlockKeys(16)
    assert keys.of(Request(0, 0.0, 40, 20, "", (1, 2, 3), 16, (4,))) == (1, 2, 3, 4)
    assert keys.of(Request(0, 0.0, 48, 20, "", (1, 2, 3), 16, (4,))) == (1, 2, 3, 4)
    assert keys.of(Request(0, 0.0, 40, 20, "", (1, 2), 16, (4,))) == (1, 2)
