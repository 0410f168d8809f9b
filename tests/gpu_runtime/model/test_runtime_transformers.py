"""Logits and tokens are those of Hugging Face transformers, however prompts are cut and blocks scattered."""

import random

import pytest
import torch
import transformers
from runtime_small import Runner

from gpu_runtime.model.decoder import Decoder, greedy

SHAPE = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256, "initializer_range": 0.15,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 8}
MODELS = {
    "llama": ("Llama", {}),
    "llama-3.1": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "mistral-window": ("Mistral", {"sliding_window": 12, "head_dim": 10}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "qwen3-moe-plain": ("Qwen3Moe", MOE | {"norm_topk_prob": False, "num_key_value_heads": 3}),
    "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """The model of transformers, and ours from its checkpoint."""
    family, fields = MODELS[request.param]
    torch.manual_seed(7)
    config = getattr(transformers, family + "Config")(**SHAPE | fields)
    theirs = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.2 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, Decoder.from_safetensors(folder, "cpu", torch.float32)


@torch.no_grad()
def reference(theirs, tokens: list[int]):
    return theirs(torch.tensor([tokens])).logits[0]


def random_tokens(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(97), k=n)


def close(ours, expected):
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layer_group", [1, 4])
def test_whole_prefill_chunks_and_decodes_give_the_same_logits(pair, layer_group):
    theirs, ours = pair
    tokens = random_tokens(1, 75)
    expected = reference(theirs, tokens)
    whole = Runner(ours, layer_group)
    close(whole.step({0: tokens})[0], expected)
    cut = Runner(ours, layer_group)
    for start, end in [(0, 30), (30, 31), (31, 70), *((i, i + 1) for i in range(70, 75))]:
        close(cut.step({0: tokens[start:end]})[0], expected[start:end])


def test_a_mixed_batch_gives_each_sequence_its_logits(pair):
    theirs, ours = pair
    prompts = {seq: random_tokens(seq, 40) for seq in range(5)}
    expected = {seq: reference(theirs, tokens) for seq, tokens in prompts.items()}
    runner = Runner(ours, layer_group=3, block_tokens=8)
    spans = [{0: (0, 19), 1: (0, 3)}, {1: (3, 4), 2: (0, 33), 0: (19, 20), 3: (0, 1)}]
    spans += [{0: (20, 38), 2: (33, 34), 4: (0, 12), 3: (1, 2), 1: (4, 40)}]
    for step in spans:
        logits = runner.step({seq: prompts[seq][a:b] for seq, (a, b) in step.items()})
        for seq, (a, b) in step.items():
            close(logits[seq], expected[seq][a:b])


def test_greedy_tokens_are_the_same_with_blocks_anywhere(pair):
    (theirs, ours), layer_group = pair, 2
    prompts = {0: random_tokens(10, 23), 1: random_tokens(11, 5), 2: random_tokens(12, 1)}
    runner = Runner(ours, layer_group, seed=layer_group)
    new, generated = dict(prompts), {seq: [] for seq in prompts}
    for _ in range(16):
        logits = runner.step(new)
        new = {seq: [int(greedy(logits[seq][-1:]))] for seq in prompts}
        for seq, tokens in new.items():
            generated[seq] += tokens
    for seq, prompt in prompts.items():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert generated[seq] == expected[0, len(prompt) :].tolist()
