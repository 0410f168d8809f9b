"""`GatedDeltaNetSpec`: layers that keep a state of fixed size in place of KV (Gated DeltaNet: Yang et al. 2024).

Notation: h hidden size, n_k and n_v heads of keys and values, of d_k and d_v elements; k = n_k d_k, v = n_v d_v.
A sequence's state in a layer is n_v d_v d_k elements, and the last inputs of a convolution over queries, keys and
values: (kernel - 1) (2 k + v). vLLM 0.33 keeps both in one page (`MambaStateShapeCalculator`).

Mamba2's layers (Dao and Gu 2024) have the same shapes: its groups' B and C are keys and queries, of d_k elements (the
size of the state), its heads' inputs are values. Where GPUs outnumber the groups, each has one of its own.
"""

import msgspec


class GatedDeltaNetSpec(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Gated DeltaNet in `num_layers` of a model's layers; the others attend."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_dtype_bytes: float
    """Of the state's elements; the convolution's have the model's own type."""
    scan_tokens: int = 0
    """Tokens of a chunk of Mamba2's kernels; 0: the layers are Gated DeltaNet's."""
    mlp_layers: int = 0
    """Of all of the model's layers, those with an MLP or experts; 0: all (Nemotron-H: not all)."""

    @property
    def kind(self) -> str:
        """What the layers are."""
        return "Mamba2" if self.scan_tokens else "Gated DeltaNet"

    @property
    def num_gates(self) -> int:
        """Of a head, beside the values': decay and time step; Mamba2 makes the one of the other."""
        return self.num_value_heads * (1 if self.scan_tokens else 2)

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
        return self.conv_width + 2 * self.value_width + self.num_gates

    def widths(self, hidden_size: int, tp: int) -> list[tuple[float, float]]:
        """Inputs and outputs per GPU of a layer's products: to queries, keys, values and gates, and out of it."""
        first = self.conv_width + self.value_width + self.num_gates
        return [(hidden_size, first / tp), (self.value_width / tp, hidden_size)]

    @property
    def other_params(self) -> int:
        """Elements of a layer's convolution, decay and time step of each head, and norm of a head.

        Of Mamba2: the convolution's biases, what a head takes of its input beside, and a norm of all heads.
        """
        if self.scan_tokens:
            return self.conv_width * (self.conv_kernel + 1) + 3 * self.num_value_heads + self.value_width
        return self.conv_width * self.conv_kernel + 2 * self.num_value_heads + self.value_head_dim

    def recurrent_bytes(self, tp: int = 1) -> float:
        """Bytes per GPU of one sequence's state in one layer, the convolution's left out."""
        return self.num_value_heads / tp * self.value_head_dim * self.key_head_dim * self.state_dtype_bytes

    def conv_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU of the convolution's last inputs of one sequence in one layer."""
        return (self.conv_kernel - 1) * self._conv_width_of(tp) * dtype_bytes

    def _conv_width_of(self, tp: int) -> float:
        """What the convolution of one GPU runs over."""
        copied = max(0, tp - self.num_key_heads) if self.scan_tokens and self.num_key_heads % tp else 0
        return (self.conv_width + 2 * copied * self.key_head_dim) / tp

    def conv_moved_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU that the convolution of one layer reads and writes for a token."""
        return 2 * self._conv_width_of(tp) * dtype_bytes

    def decode_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU that one layer reads and writes for a sequence that decodes.

        State and last inputs both ways, the convolution's input and output, which is read again, and the result.
        """
        moved = 2 * self.page_bytes(dtype_bytes, tp) + self.conv_moved_bytes(dtype_bytes, tp)
        return moved + (self._conv_width_of(tp) + self.value_width / tp) * dtype_bytes

    def scan_flops_per_token(self, tp: int = 1) -> float:
        """FLOPs per GPU of Mamba2's kernels in one layer for a token of a prompt.

        In a chunk of Q tokens each is set against all, 2 Q d_k of a group and 2 Q d_v of a head; a head's state takes
        2 d_k d_v and gives as many. Masked halves are computed, too.
        """
        heads, groups = self.num_value_heads / tp, max(1.0, self.num_key_heads / tp)
        of_head = 2 * self.scan_tokens * self.value_head_dim + 4 * self.key_head_dim * self.value_head_dim
        return heads * of_head + groups * 2 * self.scan_tokens * self.key_head_dim

    def refusal_of(self, tp: int) -> str | None:
        """Why `tp` GPUs cannot share the layers' heads; None: they can."""
        keys, values = self.num_key_heads, self.num_value_heads
        shares_keys = keys % tp == 0 or (self.scan_tokens and keys == 1)
        if shares_keys and values % tp == 0:
            return None
        names = ("groups", "heads") if self.scan_tokens else ("key heads", "value heads")
        return f"does not divide {keys} {names[0]} and {values} {names[1]} of {self.kind}"

    def page_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU of one sequence in one layer, before the page is padded to one of attention."""
        return self.recurrent_bytes(tp) + self.conv_bytes(dtype_bytes, tp)

    def state_bytes(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes per GPU of one sequence in all of these layers."""
        return self.num_layers * self.page_bytes(dtype_bytes, tp)
