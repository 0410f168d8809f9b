"""`RadixTree` against a tree written out token by token: same hits, same idle tokens, same evictions."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.kv.index.radix_tree import RadixTree


class TokenByToken:
    """Every cached prefix with the time of its last use. `ends` are prefixes where a match or content ended:
    what is between two of them is one node."""

    def __init__(self):
        self.last_use = {}
        self.ends = set()
        self.held = []
        self.clock = 0

    def match(self, keys, limit):
        found = ()
        while len(found) < limit and keys[: len(found) + 1] in self.last_use:
            found = keys[: len(found) + 1]
        self.ends.add(found)
        return found

    def use(self, prefix):
        self.clock += 1
        for end in range(1, len(prefix) + 1):
            self.last_use[prefix[:end]] = self.clock

    def is_held(self, prefix):
        return any(held[: len(prefix)] == prefix for held in self.held)

    def num_idle(self):
        return sum(not self.is_held(prefix) for prefix in self.last_use)

    def insert(self, keys):
        """How many of the tokens others hold already."""
        known = self.match(keys, len(keys))
        self.ends.add(keys)
        used = sum(self.is_held(keys[:end]) for end in range(1, len(known) + 1))
        self.use(keys)
        return used

    def evict(self, count):
        while count > 0:
            parents = {prefix[:-1] for prefix in self.last_use}
            leaves = [prefix for prefix in self.last_use if prefix not in parents and not self.is_held(prefix)]
            if not leaves:
                return
            leaf = min(leaves, key=self.last_use.__getitem__)
            while leaf:
                del self.last_use[leaf]
                self.ends.discard(leaf)
                count -= 1
                leaf = leaf[:-1]
                if leaf in self.ends:
                    break


class Both:
    """One history in both."""

    def __init__(self):
        self.tree, self.plain = RadixTree(), TokenByToken()
        self.running = []

    def look_up(self, keys, limit):
        node, depth = self.tree.advance(keys, self.tree.root, 0, limit)
        found = self.plain.match(keys, limit)
        assert depth == len(found)
        idle = sum(not self.plain.is_held(found[:end]) for end in range(1, depth + 1))
        assert self.tree.num_idle_until(node) == idle
        return node, depth

    def start(self, keys, limit):
        node, depth = self.look_up(keys, limit)
        self.tree.touch(node)
        self.plain.use(keys[:depth])
        self.tree.lock(node)
        self.plain.held.append(keys[:depth])
        self.running.append([keys, node, depth])

    def compute(self, i, end):
        entry = self.running[i]
        keys, node, depth = entry
        if end <= depth:
            return
        self.plain.held.remove(keys[:depth])
        # What it holds itself is not another's.
        used = self.plain.insert(keys[:end]) - sum(self.plain.is_held(keys[:n]) for n in range(1, depth + 1))
        self.plain.held.append(keys[:end])
        entry[1], found = self.tree.insert(keys, node, depth, end)
        entry[2] = end
        assert found == used

    def end(self, i):
        keys, node, depth = self.running.pop(i)
        self.plain.held.remove(keys[:depth])
        self.tree.unlock(node)

    def check(self):
        assert self.tree.num_idle == self.plain.num_idle()
        assert sum(len(node.keys) for node in self.tree.nodes()) == len(self.plain.last_use)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_hits_and_evictions_are_those_of_single_tokens(seed):
    dice, both = Random(seed), Both()
    stems = [tuple(dice.randrange(3) for _ in range(dice.randrange(4, 12))) for _ in range(4)]
    for _ in range(80):
        stem = dice.choice(stems)
        keys = stem[: dice.randrange(len(stem) + 1)] + tuple(dice.randrange(3) for _ in range(dice.randrange(4)))
        step = dice.random()
        if step < 0.35 and len(both.running) < 5:
            both.start(keys, dice.randint(0, len(keys)))
        elif step < 0.5:
            node, depth = both.look_up(keys, len(keys))
            both.tree.touch(node)
            both.plain.use(keys[:depth])
        elif step < 0.6:
            count = dice.randrange(8)
            both.tree.evict(count)
            both.plain.evict(count)
        elif both.running:
            i = dice.randrange(len(both.running))
            if step < 0.8:
                both.compute(i, dice.randint(0, len(both.running[i][0])))
            else:
                both.end(i)
        both.check()
    while both.running:
        both.end(0)
    both.tree.evict(1 << 30)
    assert both.tree.num_idle == 0 and not both.tree.nodes()


def cached(tree, *prompts):
    """Tokens of each prompt that a tree has."""
    return [tree.advance(keys, tree.root, 0, len(keys))[1] for keys in prompts]


def test_leaves_go_whole_and_the_longest_unused_first():
    """Three prompts of six tokens; the first two share three, the third is alone. 3 + 3 + 3 + 6 tokens are cached."""
    tree = RadixTree()
    one, two, three = (1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 8, 9), (20, 21, 22, 23, 24, 25)
    ends = [tree.insert(keys, tree.root, 0, 6)[0] for keys in (one, two, three)]
    assert tree.num_idle == 0
    for node in ends[:2]:
        tree.unlock(node)
    assert tree.num_idle == 9
    # One token is wanted, and the whole leaf goes: the first prompt's end is the longest unused.
    tree.evict(1)
    assert (cached(tree, one, two, three), tree.num_evicted) == ([3, 6, 6], 3)
    # The second's end next, then what both began with, a leaf by then; the third is in use.
    tree.evict(4)
    assert (cached(tree, one, two, three), tree.num_evicted) == ([0, 0, 6], 9)
    tree.evict(1)
    assert tree.num_evicted == 9
    tree.unlock(ends[2])
    tree.evict(1)
    assert (tree.num_idle, tree.num_evicted) == (0, 15)


def test_what_is_looked_at_stays():
    tree = RadixTree()
    one, two = (1, 2), (3, 4)
    for keys in (one, two):
        tree.unlock(tree.insert(keys, tree.root, 0, 2)[0])
    tree.touch(tree.advance(one, tree.root, 0, 2)[0])
    tree.evict(1)
    assert cached(tree, one, two) == [2, 0]


def test_a_match_goes_on_from_where_it_was():
    """What was found before may have been evicted, split or prolonged since."""
    tree = RadixTree()
    keys = (1, 2, 3, 4, 5, 6)
    holder = tree.insert(keys, tree.root, 0, 3)[0]
    node, depth = tree.advance(keys, tree.root, 0, 6)
    assert depth == 3
    whole = tree.insert(keys, holder, 3, 6)[0]
    node, depth = tree.advance(keys, node, depth, 6)
    assert (node, depth) == (whole, 6)
    tree.advance((1, 2, 9), tree.root, 0, 3)
    tree.unlock(whole)
    tree.evict(3)
    assert tree.advance(keys, node, depth, 6)[1] == 3
