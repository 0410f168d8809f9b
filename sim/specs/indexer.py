"""DeepSeek's sparse attention: an indexer scores every token of the context, attention reads the best ones alone.

Source: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025 (arXiv 2512.02556). As
vLLM stores it: the indexer's keys in FP8 with a scale; latents in 16 bits, or in a format of FP8 of their own.
"""

import msgspec

SCALED_ELEMENTS, SCALE_BYTES = 128, 4
"""Elements in FP8 that share a scale, and its bytes."""
DEQUANTIZE_OPS = 25 * 256
"""Vector operations that make 16 bits of a token's latent: 50 cycles of a multiprocessor, halved where two share it, of
256 each (FlashMLA, docs/20250929-hopper-fp8-sparse-deep-dive.md)."""


def scaled_bytes(num_elements: int) -> int:
    """Bytes of so many elements in FP8, scales included."""
    return num_elements + -(-num_elements // SCALED_ELEMENTS) * SCALE_BYTES


class IndexerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The lightning indexer of every layer. Each GPU of a group has all of it.

    Attributes:
        num_heads: of its queries; a token has one key of `head_dim` elements.
        top_k: most tokens of the context that attention reads.
    """

    num_heads: int
    head_dim: int
    top_k: int

    @property
    def token_bytes(self) -> int:
        """Of a token's key in one layer."""
        return scaled_bytes(self.head_dim)

    @property
    def flops_per_pair(self) -> float:
        """Scores of all heads of one layer, of a token that asks and one of its context."""
        return 2.0 * self.num_heads * self.head_dim

    def projections(self, hidden_size: int, q_lora_rank: int) -> dict[str, int]:
        """Weights of a layer's projections to queries and keys, as checkpoints name them."""
        return {
            "indexer.wq_b": q_lora_rank * self.num_heads * self.head_dim,
            "indexer.wk": hidden_size * self.head_dim,
        }

    def other_params(self, hidden_size: int) -> int:
        """Elements that stay in 16 bits: weights of heads, and the norm of keys."""
        return hidden_size * self.num_heads + 2 * self.head_dim
