"""`GatedDeltaNetSpec`: layers that keep a state of fixed size in place of KV (Gated DeltaNet: Yang et al. 2024).

Notation: h hidden size, n_k and n_v heads of keys and values, of d_k and d_v elements; k = n_k d_k, v = n_v d_v.
A sequence's state in a layer is n_v d_v d_k elements, and the last inputs of a convolution over queries, keys and
values: (kernel - 1) (2 k + v). vLLM 0.33 keeps both in one page (`MambaStateShapeCalculator`).
"""

import msgspec


class GatedDeltaNetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Gated DeltaNet in `num_layers` of a model's layers; the others attend."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_dtype_bytes: float
    """Of the state's elements; the convolution's have the model's own type."""

    @property
    def value_width(self) -> int:
        """v, elements of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """2 k + v, what the convolution runs over."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_width

    @property
    def inner_width(self) -> int:
        """Elements of one token between a layer's projections: queries, keys, values, gates and the heads' result."""
        return self.conv_width + 2 * self.value_width + 2 * self.num_value_heads

    def widths(self, hidden_size: int, tp: int) -> list[tuple[float, float]]:
        """Inputs and outputs per GPU of a layer's products: to queries, keys, values and gates, and out of it."""
        first = self.conv_width + self.value_width + 2 * self.num_value_heads
        return [(hidden_size, first / tp), (self.value_width / tp, hidden_size)]

    @property
    def other_params(self) -> int:
        """Elements of a layer's convolution, decay and time step of each head, and norm of a head."""
        return self.conv_width * self.conv_kernel + 2 * self.num_value_heads + self.value_head_dim

    def recurrent_bytes(self, tp: int = 1) -> float:
        """Bytes per GPU of one sequence's state in one layer, the convolution's left out."""
        return self.num_value_heads / tp * self.value_head_dim * self.key_head_dim * self.state_dtype_bytes

    def conv_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU of the convolution's last inputs of one sequence in one layer."""
        return (self.conv_kernel - 1) * self.conv_width / tp * dtype_bytes

    def conv_moved_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU that the convolution of one layer reads and writes for a token."""
        return 2 * self.conv_width / tp * dtype_bytes

    def decode_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU that one layer reads and writes for a sequence that decodes.

        State and last inputs both ways, the convolution's input and output, which is read again, and the result.
        """
        moved = 2 * self.page_bytes(dtype_bytes, tp) + self.conv_moved_bytes(dtype_bytes, tp)
        return moved + (self.conv_width + self.value_width) / tp * dtype_bytes

    def page_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU of one sequence in one layer, before the page is padded to one of attention."""
        return self.recurrent_bytes(tp) + self.conv_bytes(dtype_bytes, tp)

    def state_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU of one sequence in all of these layers."""
        return self.num_layers * self.page_bytes(dtype_bytes, tp)
