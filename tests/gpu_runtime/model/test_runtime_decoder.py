"""What a driver does around and between layers: random decoders, hooks, moved blocks, restored KV."""

import msgspec
import pytest
import torch
from runtime_small import SMALL, Runner

from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.decoder import Decoder, greedy
from gpu_runtime.model.rope_scaling import Llama3Scaling
from kvtwin.testing.live import continuation, small_decoder
from sim.specs.models import load_model

VARIANTS = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
}


@pytest.fixture(params=VARIANTS)
def decoder(request):
    config = msgspec.structs.replace(SMALL, **VARIANTS[request.param])
    return Decoder.random(config, device="cpu", dtype=torch.float32, seed=5)


def prompts(*lengths):
    generators = (torch.Generator().manual_seed(seq) for seq in range(len(lengths)))
    drawn = [torch.randint(0, 101, (n,), generator=g).tolist() for n, g in zip(lengths, generators, strict=True)]
    return dict(enumerate(drawn))


def test_a_seed_gives_the_same_decoder_and_fewer_layers_are_its_first():
    config = msgspec.structs.replace(SMALL, qkv_bias=True, qk_norm=True)
    one, two, cut, other = (
        Decoder.random(config, device="cpu", dtype=torch.float32, seed=seed, num_layers=layers)
        for seed, layers in ((1, None), (1, None), (1, 2), (2, None))
    )
    assert (one.config.num_layers, cut.config.num_layers, len(cut.layers)) == (4, 2, 2)
    for a, b, c in zip(one.layers[:2], two.layers, cut.layers, strict=False):
        assert torch.equal(a.weights.down, b.weights.down) and torch.equal(a.weights.qkv, c.weights.qkv)
    assert torch.equal(one.ends.head, cut.ends.head)
    assert not torch.equal(one.ends.head, other.ends.head)
    assert not torch.equal(one.layers[0].weights.qkv, one.layers[1].weights.qkv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_a_random_decoder_stay_sane_in_half_precision(dtype):
    config = msgspec.structs.replace(DecoderConfig.from_spec(load_model("qwen3-0.6b")), vocab_size=101)
    decoder = Decoder.random(config, device="cpu", dtype=dtype, seed=0, num_layers=2)
    runner = Runner(decoder, num_blocks=6)
    batch = runner.batch(prompts(12))
    hidden = torch.randn(12, config.hidden_size, dtype=dtype)
    for _ in range(4):
        for index, layer in enumerate(decoder.layers):
            hidden = layer.forward(hidden, batch, runner.pool, index)
    assert 0.5 < hidden.float().std() < 2.0


def test_hooks_see_layers_in_order_and_their_inputs(decoder):
    runner, seen = Runner(decoder), []
    batch, ids = runner.batch(prompts(7)), torch.tensor(prompts(7)[0])
    logits = decoder.forward(
        ids,
        batch,
        runner.pool,
        before_layer=lambda layer: seen.append(layer),
        after_layer=lambda layer, hidden: seen.append((layer, hidden.clone())),
    )
    assert [entry if isinstance(entry, int) else entry[0] for entry in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    inputs = [entry[1] for entry in seen[1::2]]
    assert torch.equal(inputs[0], decoder.embed(ids))
    for index, layer in enumerate(decoder.layers):
        out = layer.forward(inputs[index], batch, runner.pool, index)
        assert torch.equal(out, inputs[index + 1] if index < 3 else out)
    assert torch.equal(decoder.logits(out[-1:]), logits)


def test_logits_are_given_for_the_rows_asked_for_or_the_last_ones(decoder):
    every = Runner(decoder).step(prompts(5, 1, 8))
    runner = Runner(decoder)
    ids = torch.tensor([token for tokens in prompts(5, 1, 8).values() for token in tokens])
    batch = runner.batch(prompts(5, 1, 8))
    last = decoder.forward(ids, batch, runner.pool)
    torch.testing.assert_close(last, torch.stack([rows[-1] for rows in every.values()]))
    torch.testing.assert_close(decoder.forward(ids, batch, runner.pool, torch.tensor([6])), every[2][:1])
    assert greedy(last).tolist() == [int(rows[-1].argmax()) for rows in every.values()]


def test_kv_is_restored_from_saved_layer_inputs(decoder):
    runner = Runner(decoder, layer_group=2)
    runner.step(prompts(9, 30))
    first = dict(runner.hidden)
    runner.step({0: [1, 2, 3], 1: [4]})
    second = runner.hidden
    kept = runner.pool.data.clone()
    runner.pool.data.zero_()
    again = Runner(decoder, layer_group=2)
    again.pool, again.tables = runner.pool, runner.tables
    for hidden, new in ((first, prompts(9, 30)), (second, {0: [1, 2, 3], 1: [4]})):
        batch = again.batch(new)
        for index, layer in enumerate(decoder.layers):
            layer.restore_kv(hidden[index], batch, again.pool, index)
    torch.testing.assert_close(again.pool.data, kept, atol=1e-6, rtol=1e-6)
    assert torch.equal(again.pool.data == 0, kept == 0)


def test_a_sequence_past_the_positions_of_the_model_is_refused(decoder):
    runner = Runner(decoder, layer_group=4)
    runner.step(prompts(511))
    runner.step({0: [1]})
    with pytest.raises(ValueError, match="513 tokens, the model has 512 positions"):
        runner.step({0: [1]})


def test_a_continuation_is_what_tokens_one_by_one_give_whatever_was_guessed():
    prompt, runner, found, new = tuple(range(9)), Runner(small_decoder()), [], list(range(9))
    for _ in range(7):
        new = [int(greedy(runner.step({0: new})[0][-1:])[0])]
        found += new
    for place in range(8):
        guess = (*found[:place], *((token + 1) % 101 for token in found[place:]))
        assert continuation(prompt, 7, guess=guess) == tuple(found)
