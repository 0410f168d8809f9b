"""Blocks are given out once, come back once, and lie in one piece of memory each."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_small import SMALL

from gpu_runtime.kv import page_locked
from gpu_runtime.kv.block_ids import BlockIds, OutOfBlocks
from gpu_runtime.kv.pool import KVPool
from sim.errors import InvariantError, UserError


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.randoms()), max_size=40))
def test_blocks_are_conserved(num_blocks, steps):
    ids, held = BlockIds(num_blocks), []
    for takes, count, dice in steps:
        if takes and count > num_blocks - len(held):
            with pytest.raises(
                OutOfBlocks, match=f"{count} blocks asked for, {num_blocks - len(held)} of {num_blocks}"
            ):
                ids.allocate(count)
        elif takes:
            got = ids.allocate(count)
            assert len(got) == count and not set(got) & set(held)
            held += got
        else:
            dice.shuffle(held)
            gone, held = held[:count], held[count:]
            ids.free(gone)
        ids.check()
        assert ids.num_free == num_blocks - len(held)
        assert all(0 <= block < num_blocks for block in held)
        assert len(set(held)) == len(held)


@pytest.mark.parametrize("wrong", [[3], [0, 0], [-1], [4]])
def test_a_block_that_is_not_allocated_cannot_be_freed(wrong):
    ids = BlockIds(4)
    ids.allocate(2)
    with pytest.raises(InvariantError, match="is not allocated"):
        ids.free(wrong)


@pytest.mark.parametrize(("layer_group", "groups"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_a_block_is_one_piece_of_memory(layer_group, groups):
    pool = KVPool(SMALL, 5, 8, layer_group, "cpu", torch.float16)
    assert pool.num_groups == groups
    assert pool.block_bytes == layer_group * 2 * SMALL.num_kv_heads * 8 * SMALL.head_dim * 2
    assert pool.data[3].is_contiguous()
    assert pool.key_value(0).shape == (5, 2, SMALL.num_kv_heads, 8, SMALL.head_dim)
    group, view = pool.layer(3)
    assert group == 3 // layer_group
    view[2, 1] = 7.0
    assert (pool.data[2, 3 % layer_group, 1] == 7.0).all()
    assert pool.data.count_nonzero() == SMALL.num_kv_heads * 8 * SMALL.head_dim
    with pytest.raises(IndexError):
        pool.layer(groups * layer_group)


@pytest.fixture
def locks(monkeypatch):
    """Bytes that a pretended driver has locked, by address; it refuses more than a million."""
    locked = {}

    def register(pointer, num_bytes, flags):
        assert flags == 0
        if num_bytes > 1_000_000:
            return 2
        locked[pointer] = num_bytes
        return 0

    def unregister(pointer):
        del locked[pointer]
        return 0

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(page_locked, "_runtime", lambda: driver)
    return locked


def test_a_pinned_pool_locks_its_own_bytes_and_no_more(locks):
    pool = KVPool(SMALL, 9, 4, 2, "cpu", torch.float16, pin=True)
    # 17 GiB of blocks shall not take 32: no power of two.
    assert locks == {pool.data.data_ptr(): 9 * 4 * 2 * 2 * 2 * 16 * 2}
    assert not pool.data.any()
    pool.release()
    assert not locks and not pool.data.numel()
    pool.release()


def test_memory_that_the_driver_does_not_lock_is_an_error(locks):
    with pytest.raises(UserError, match=r"2457600 bytes cannot be page-locked .*CUDA error 2\): lower --swap-space"):
        KVPool(SMALL, 1200, 4, 4, "cpu", torch.float16, pin=True)
    assert not locks
