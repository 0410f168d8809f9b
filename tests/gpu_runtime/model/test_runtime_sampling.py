"""Tokens are drawn as a request asks, and are the same in whatever batch it is computed."""

import asyncio
import math
import random

import msgspec
import pytest
import torch
from runtime_server import serving

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model import sampling
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decoder import scored
from gpu_runtime.model.sampling import GREEDY, Sampling, choose, uniforms
from gpu_runtime.serve.run import default_sampling
from kvtwin.testing.live import small_decoder
from sim.errors import UserError


def drawn_plainly(logits, asked, position):
    """One token, by the definition of each filter in turn, on lists of Python's."""
    if asked.temperature < 1e-5:
        return max(range(len(logits)), key=lambda token: logits[token])
    scaled = [x / max(asked.temperature, 0.01) for x in logits]
    weight = [math.exp(x - max(scaled)) for x in scaled]
    left = [token for token in range(len(logits)) if weight[token] >= asked.min_p]
    ranked = sorted(left, key=lambda token: -weight[token])
    if asked.top_k > 0:
        ranked = ranked[: asked.top_k]
    total, reached, kept = sum(weight[token] for token in ranked), 0.0, []
    for token in ranked:
        if kept and reached >= asked.top_p * total and asked.top_p < 1:
            break
        kept.append(token)
        reached += weight[token]
    aim, reached = float(uniforms([asked.seed], [position])[0]) * sum(weight[token] for token in kept), 0.0
    for token in sorted(kept):
        reached += weight[token]
        if reached > aim:
            return token
    return max(kept)


def any_sampling(dice):
    return Sampling(
        temperature=dice.choice([0.0, 0.001, 0.7, 1.0, 2.0]),
        top_p=dice.choice([0.0, 0.3, 0.9, 1.0]),
        top_k=dice.choice([-1, 0, 1, 3, 50, 1000]),
        min_p=dice.choice([0.0, 0.05, 0.5, 1.0]),
        seed=dice.randrange(-(1 << 63), 1 << 63),
    )


def test_each_row_is_drawn_by_the_definition_whatever_is_beside_it(monkeypatch):
    """Filters in vLLM's order, and a draw that no other row of the batch and no share of the work moves."""
    dice = random.Random(11)
    logits = 2 * torch.randn(120, 61, generator=torch.Generator().manual_seed(11))
    asked = [any_sampling(dice) for _ in logits]
    positions = [dice.randrange(4000) for _ in logits]
    chosen = choose(scored(logits), asked, positions).tolist()
    assert chosen == [drawn_plainly(*row) for row in zip(logits.tolist(), asked, positions, strict=True)]
    monkeypatch.setattr(sampling, "WORK_BYTES", 1)
    assert choose(scored(logits.flip(0)), asked[::-1], positions[::-1]).tolist() == chosen[::-1]


def test_tokens_come_as_often_as_their_probability_says():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    count = 40_000
    found = choose(scored(logits.expand(count, -1)), [Sampling(temperature=0.8, seed=3)] * count, range(count))
    share = torch.bincount(found, minlength=4) / count
    torch.testing.assert_close(share, (logits / 0.8).softmax(0), atol=4 * (0.25 / count) ** 0.5, rtol=0)


def drawn_alone(prompt, count, asked):
    """A request's tokens with no other there."""
    decoder, tokens = small_decoder(), list(prompt)
    blocks = -(-(len(prompt) + count) // 4)
    pool = KVPool(decoder.config, blocks, 4, decoder.config.num_layers, decoder.device, decoder.dtype)
    table, cached = pool.ids.allocate(blocks), 0
    while len(tokens) < len(prompt) + count:
        batch = AttentionBatch.build([len(tokens) - cached], [cached], [[table]], 4, pool.device)
        logits = decoder.forward(torch.tensor(tokens[cached:]), batch, pool)
        cached = len(tokens)
        tokens += choose(scored(logits), [asked], [cached]).tolist()
    return tokens[len(prompt) :]


def test_a_seed_gives_the_same_tokens_in_a_crowd_that_is_preempted():
    prompts = [[(7 * i + j) % 101 for j in range(5 + 3 * i)] for i in range(6)]
    asked = Sampling(temperature=1.3, top_p=0.9, top_k=40, seed=5)

    async def run():
        async with serving("vllm-recompute", sizes={"gpu": 20}) as service:
            body = {"max_tokens": 24, "return_token_ids": True, **msgspec.to_builtins(asked)}
            answers = await asyncio.gather(*(service.post({**body, "prompt": p, "n": 2}) for p in prompts))
            unseeded = {"prompt": prompts[0], "max_tokens": 24, "temperature": 1, "return_token_ids": True}
            one, two = [await service.post(unseeded) for _ in range(2)]
            assert service.scheduler.counters.preemptions
        return answers, one[1]["choices"], two[1]["choices"]

    answers, one, two = asyncio.run(run())
    with torch.inference_mode():
        for prompt, (status, answer, _) in zip(prompts, answers, strict=True):
            assert status == 200
            for index, choice in enumerate(answer["choices"]):
                alone = drawn_alone(prompt, 24, msgspec.structs.replace(asked, seed=5 + index))
                assert choice["token_ids"] == alone
    # Without a seed, requests differ.
    assert one[0]["token_ids"] != two[0]["token_ids"]


def test_a_checkpoint_says_how_tokens_are_drawn_by_default(tmp_path, capsys):
    assert default_sampling(None) == default_sampling(tmp_path) == Sampling(temperature=1.0)
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true, "repetition_penalty": 1.05}')
    assert default_sampling(tmp_path) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert "repetition_penalty is not computed" in capsys.readouterr().err
    path.write_text('{"temperature": "warm"}')
    with pytest.raises(UserError, match="temperature: 'warm' is not a number; correct it"):
        default_sampling(tmp_path)
    assert GREEDY.is_greedy
