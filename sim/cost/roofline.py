"""Form `roofline`: fitted constants on the model's own FLOPs and bytes, per GPU of a tensor-parallel group of G.

T = ridge(N c_lin / (G F), (W + N a) / (G H)) + experts + max(launch, N e / E) + attention + LM head for sampled tokens
    + all-reduces + overhead of each layer, where ridge(c, m) = (c^p + m^p)^(1/p).

- Linear layers: the ridge times a measured factor of N where the profile has any (`Profile.linear_factors`). Of weights
  and inputs that are both quantised (FP8, NVFP4) the share of c_lin that they are counts at their format's F, with a p,
  factors and an overhead of its own; quantising the inputs reads and writes bytes at a rate of its own, beside. Where
  weights alone are quantised, products are those of 16 bits, which read fewer bytes. a are the activations that they
  read and write for a token. e are the bytes of what lies between them (norms, rotary embedding, activation function,
  residual).
- Routed experts: ridge(N c_e / (G F_e), W_e (1 - (1 - k/E)^N) / (G H_e)) + N a_e / A_e + launch of each layer, with
  constants of their type of weights (`Profile.experts`). These kernels choose experts, quantise inputs, activate and
  sum as well, so that nothing else counts that. Where no such kernel was timed, experts are linear layers with W of
  those met, and no factors count.
- Routers that engines keep in 32 bits are whole on each GPU of a group, at `fp32_flops_per_s`.
- Decodes alone read KV at a rate of their own, and `kv_padding_tokens` more each: kernels read whole tiles. Where
  `kv_padding_waves` is given, only as many do as fill the `attention_slots` so often: the rest start while others
  read. KV that needs computing as well, because it is quantised or latent, costs ridge(FLOPs / (G F_attn) + vector
  operations / (F / 16), bytes / H_kv) for each token read; FP8 KV at its own rate, padding and overhead, where those
  were timed; latents of 16 bits with constants of their own kernels where the profile has them (`sim.cost.latents`).
- Layers that keep a state read no KV: their projections are linear layers, their kernels `sim.cost.gated_delta_net`.
- Prompts: query-context pairs / (G F_attn). Where `attention_tile_tokens` is given, one kernel does prompts and decodes
  (FlashAttention-2's for lengths that vary): a tile of so many rows costs the same however few of them are used, a
  decode's row as well, over its context and `attention_padding_tokens`; one head of one tile walks its whole context on
  one of `attention_slots`. The grid has the longest chunk's tiles for every sequence: idle ones hold a slot for
  `attention_idle_tile_s`. Heads go one after the other: where a batch does not leave slots for all query heads of a KV
  head, those to come read its KV anew, unless L2 holds it. Computing and reading make a ridge of its own. Else prompts'
  and decodes' kernels run in turn, as they do where layers differ in their KV.
- Decodes of unlike contexts (`longest_kv_bytes_per_s` given): the longest is the last to end. Alone, and where there
  are too many for the kernel to split them, a block reads what it has more than the mean at a rate of its own. Beside
  prompts one head of its tile walks what it has more than the mean, or than the longest of these.
- Iterations that no CUDA graph was captured for take at least what the host takes to launch their kernels one by one
  (`sim.cost.launches`).
- All-reduces, two a layer: as measured where the profile has points of G GPUs. Else launch + 2 (G-1) latency + r / X
  + 2 sqrt(chunk r / X), r = 2 (G-1)/G bytes: a pipeline whose chunks have the best size.
"""

from collections.abc import Callable, Iterator
from math import ceil, inf, sqrt

from sim.cost.gated_delta_net import delta_net_price
from sim.cost.kernels import grid_of, value_at
from sim.cost.latents import latent_price
from sim.cost.model import ACTIVATION_BYTES, BATCHED_COPIES, CostModel, ridge
from sim.cost.profile import FittedRange, Profile, product_name
from sim.engine.changes import D2H, Direction
from sim.engine.plan import IterationPlan, WindowTokens
from sim.specs.hardware import HardwareSpec
from sim.specs.kv_format import KVFormat, window_pairs
from sim.specs.models import ModelSpec

SPLIT_BELOW = 1.6
"""Blocks for each multiprocessor below which FlashAttention-2 splits contexts among several: 0.8 of two."""
READ_ANEW = (0.8, 1.3)
"""A KV head's bytes, over those of L2, from which and up to which ever more of it is read anew (LLMServingSim's kernels
on RTX 4090 and RTX PRO 6000: 64 and 128 decodes after 1,024 to 4,096 tokens)."""
VECTOR_SHARE = 1 / 16
"""Vector operations a second, of the tensor cores' FLOP/s (an assumption: A100 19.5 of 312 TFLOPS, H100 67 of 989).
They dequantise KV that no kernel was timed with."""


class RooflineCost(CostModel):
    """Form `roofline`: fitted constants on the model's own FLOPs and bytes."""

    padded: Callable[[int], int] | None = None
    """Tokens that the linear layers compute for a decode batch of so many, where the engine's CUDA graphs pad it."""
    most_captured = 0
    """Tokens of the largest of those graphs."""
    copies_whole_blocks = False
    """Whether the engine copies a block as one piece, whatever it holds; else each layer's keys and values apart."""
    sampling_s_per_sample = 0.0
    """What the engine's sampler takes for a token, beside the LM head."""
    eager_s = 0.0
    """The least that the layers of an iteration with prompts take, where their kernels are launched one by one."""
    pieced_s = 0.0
    """The same where all but attention comes from graphs."""
    pieced_tokens = 0
    """Tokens up to which it does."""
    launches_s = 0.0
    """What the host takes to launch all kernels one by one: the least of an iteration without a captured graph."""
    captured_tokens: float = inf
    """Tokens of an iteration with prompts up to which it runs from a graph."""
    captured_decodes: float = inf
    """The same of decodes alone."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int) -> None:
        super().__init__()
        value = profile.value
        flops, bandwidth = value("flops_per_s"), value("hbm_bytes_per_s")
        self._set_range(profile.range or FittedRange())
        self._batch_s: dict[int, float] = {}
        self._linear_s: dict[int, float] = {}
        self._head_s: dict[int, float] = {}
        self.exponent = value("roofline_exponent")
        self.tp = tp
        self.layers = model.num_layers
        self.attention_layers = model.num_attention_layers
        self.delta_net = delta_net_price(model, profile, tp)
        self._set_experts(model, profile)
        if self.expert_layers:
            # From here on everything but the routed experts.
            model = model.without_routed_experts()
        # Of products whose weights and inputs are quantised.
        share, kind = model.quantised_flops_share, model.product_quantization
        linear_flops = flops
        if share:
            linear_flops = 1 / ((1 - share) / flops + share / value(product_name(kind, "flops_per_s")))
        self.linear_exponent = value(product_name(kind, "roofline_exponent")) if share else self.exponent
        self.linear_s_per_token = model.linear_flops_per_token / (tp * linear_flops)
        self.linear_weights_s = model.linear_weight_bytes / (tp * bandwidth)
        self._set_met_experts(model, tp * bandwidth)
        self._set_factors(model, profile)
        # Beyond their 16 bits.
        s_per_flop = 1 / value("fp32_flops_per_s") - 1 / (tp * flops)
        self.added_s_per_token = model.fp32_flops_per_token * s_per_flop
        if share:
            quantised_bytes = model.quantised_input_bytes_per_token(tp)
            self.added_s_per_token += quantised_bytes / value(product_name(kind, "quantize_bytes_per_s"))
        self.activations_s_per_token = model.linear_activation_bytes_per_token(tp) / bandwidth
        self.elementwise_s_per_token = model.elementwise_bytes_per_token(tp) / value("elementwise_bytes_per_s")
        self.attention_s_per_pair = model.attention_flops_per_token_pair / (tp * value("attention_flops_per_s"))
        self.latents = latent_price(model, profile, tp)
        self.index_s_per_pair = 0.0
        if self.latents:
            self.attention_s_per_pair = self.latents.prefill_s_per_pair
            self.index_s_per_pair = self.latents.index_s_per_pair
            self.added_s_per_token += self.latents.joined_s_per_token
        self._set_kv(model, model.kv_format(tp), profile)
        self._set_tiles(model, hardware, profile, tp)
        self.head_s_per_sample = model.head_flops_per_token / (tp * flops)
        self.head_weights_s = model.head_weight_bytes / (tp * bandwidth)
        self.logits_s_per_sample = model.head_activation_bytes_per_token / (tp * bandwidth)
        overhead_s = value("layer_overhead_s")
        added_s = share * (value(product_name(kind, "layer_overhead_s")) - overhead_s)
        if self.expert_layers and model.moe and not model.moe.shared_intermediate_size:
            # A layer's four products and attention were timed; of these two are the experts', and one the router's.
            experts = self.expert_layers / model.num_layers
            overhead_s, added_s = (1 - experts / 5) * overhead_s, (1 - experts / 2) * added_s
        self.overhead_s = model.num_layers * (overhead_s + added_s + self.kv_layer_overhead_s)
        self.elementwise_least_s = model.num_layers * value("elementwise_launch_s")
        self._set_copies(hardware, profile)
        self.pieces_per_layer = (1 if model.mla else 2) * model.num_stored_layers / model.num_layers
        self._set_all_reduce(model, hardware, profile)
        self.projection_s_per_token = projection_flops(model) / (tp * linear_flops)

    def set_launches(self, seconds: float, *, beyond_prompts: int, beyond_decodes: int) -> None:
        """Iterations with prompts of more tokens, and of more decodes, take at least `seconds`."""
        if seconds:
            self.launches_s = seconds
            self.captured_tokens, self.captured_decodes = float(beyond_prompts), float(beyond_decodes)
            self.straight_decodes = min(self.straight_decodes, self.captured_decodes)

    def _set_range(self, seen: FittedRange) -> None:
        # Below the least seen, prompts cost what decodes of as many tokens do, and those begin at one.
        self.most_tokens = seen.tokens[1] if seen.tokens else inf
        self.most_batch = seen.batch[1] if seen.batch else inf
        self.most_context_tokens = seen.context_tokens[1] if seen.context_tokens else inf

    def _set_experts(self, model: ModelSpec, profile: Profile) -> None:
        """Routed experts of all layers, where kernels of their type of weights were timed."""
        self.expert_layers = 0
        self.expert_s_per_token = self.expert_weights_s = self.expert_activation_s_per_token = 0.0
        self.expert_least_s, self.expert_exponent = 0.0, 1.0
        self.idle_share = 1 - model.moe.experts_per_token / model.moe.num_experts if model.moe else 0.0
        constants = self._expert_constants(model, profile)
        if model.moe is None or constants is None:
            return
        self.expert_layers = model.moe.num_moe_layers
        self.expert_s_per_token = model.routed_flops_per_token / (self.tp * constants["expert_flops_per_s"])
        self.expert_weights_s = model.routed_weight_bytes / (self.tp * constants["expert_bytes_per_s"])
        moved_bytes = model.routed_activation_bytes_per_token(self.tp)
        self.expert_activation_s_per_token = moved_bytes / constants["expert_activation_bytes_per_s"]
        self.expert_exponent = constants["expert_roofline_exponent"]
        self.expert_least_s = self.expert_layers * constants["expert_launch_s"]

    def _expert_constants(self, model: ModelSpec, profile: Profile) -> dict[str, float] | None:
        """Those of the kernels of routed experts; None: they are priced as linear layers."""
        return profile.experts(model.expert_quantization)

    def _set_met_experts(self, model: ModelSpec, bandwidth: float) -> None:
        """Seconds that reading all routed experts takes where they are linear layers like others."""
        self.routed_weights_s = 0.0
        if model.moe:
            self.routed_weights_s = (model.linear_weight_bytes - model.linear_weight_bytes_read(0)) / bandwidth

    def _set_factors(self, model: ModelSpec, profile: Profile) -> None:
        """What products take over their roofline, by tokens, where it was measured."""
        points = profile.factors(model.product_quantization if model.quantised_flops_share else "")
        # Experts have fewer rows each.
        self.factor_points = points if points and not (model.moe and not self.expert_layers) else []
        self.factors = grid_of(self.factor_points) if self.factor_points else None

    def _set_kv(self, model: ModelSpec, kv: KVFormat, profile: Profile) -> None:
        """Seconds of a decode per token that the layers with and without a window read."""
        self.kv = kv
        self.last_token_share = model.last_token_share
        # Kernels that read FP8 were timed whole, the conversion included.
        timed = model.fp8_kv and not model.mla and "fp8_kv_bytes_per_s" in profile.constants
        kind = "fp8_kv" if timed else "kv"
        bandwidth = profile.value(f"{kind}_bytes_per_s")
        self.kv_layer_overhead_s = profile.value("fp8_kv_layer_overhead_s") if timed else 0.0
        compute_s = kv.flops_per_token_read / profile.value("attention_flops_per_s")
        if self.latents:
            compute_s = self.latents.decode_s_per_token_read
            self.kv_layer_overhead_s = self.latents.launch_s
        if not timed:
            compute_s += kv.dequantize_ops_per_token_read / (VECTOR_SHARE * profile.value("flops_per_s"))

        def read_s(layers: float, computed_s: float) -> float:
            seconds = kv.token_layer_bytes * layers / bandwidth
            return ridge(computed_s, seconds, self.exponent) if computed_s else seconds

        # What several decodes read together is read once and computed for each. Windows are not shared.
        computed_s, full_share = compute_s * kv.context_reads, kv.context_reads / self.attention_layers
        if self.index_s_per_pair:
            # Of all tokens that are not attended to their keys are read.
            computed_s, full_share = self.index_s_per_pair, 0.0
        self.full_s_per_token = read_s(kv.context_reads, computed_s)
        self.window_s_per_token = read_s(kv.num_window_readers, compute_s * kv.num_window_readers)
        computed_s = max(self.attention_s_per_pair * full_share, computed_s)
        self.unread_s_per_token = max(0.0, self.full_s_per_token - computed_s)
        padding = self.latents.padding_tokens if self.latents else profile.value(f"{kind}_padding_tokens")
        self.kv_padding_s = padding * (self.full_s_per_token + self.window_s_per_token)
        if model.indexer and kv.dequantize_ops_per_token_read:
            # Whatever the context is, FlashMLA's kernel for quantised latents takes as many tokens.
            self.kv_padding_s += model.indexer.top_k * self.window_s_per_token
            self.window_s_per_token = 0.0
        self.kv_padding_s += kv.residual_bytes / bandwidth
        # Where nothing says what is in the windows, as if they held everything.
        self.decode_s_per_context_token = self.full_s_per_token + self.window_s_per_token
        self.is_uniform = kv.is_dense and not self.last_token_share

    def _set_tiles(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int) -> None:
        """What the kernel that does prompts and decodes together rounds up; no tile where layers differ in their KV."""
        self.tile_tokens = profile.value("attention_tile_tokens") if self.is_uniform and not model.mla else 0.0
        self.slots = profile.value("attention_slots")
        self.attention_exponent = profile.value("attention_roofline_exponent")
        self.tile_padding_tokens = profile.value("attention_padding_tokens")
        heads, kv_heads = model.num_heads / tp, max(1, model.num_kv_heads // tp)
        # Pairs of a GPU's whole time that one tile of one head takes of it for each token of its context.
        self.walk_pairs_per_token = self.tile_tokens * self.slots / heads
        self.heads_per_kv = heads / kv_heads
        self.most_padded = profile.value("kv_padding_waves") * self.slots / kv_heads if self.slots else inf
        if self.kv.residual_bytes:
            # Each decode reads its own, however many there are.
            self.most_padded = inf
        head_bytes = self.kv.token_layer_bytes / kv_heads
        # Tokens of which L2 holds one KV head's keys and values of a layer.
        self.cached_tokens = (hardware.l2_bytes or 0.0) / head_bytes
        self.idle_tile_s = (
            profile.value("attention_idle_tile_s") * heads * self.kv.num_full_readers / (self.slots or inf)
        )
        self.longest_s_per_token = self.kv.num_full_readers * head_bytes / profile.value("longest_kv_bytes_per_s")
        self.follows_longest = self.tile_tokens > 0.0 and self.longest_s_per_token > 0.0
        # Decodes by themselves whose contexts are not split.
        self.least_whole = SPLIT_BELOW * self.slots / kv_heads

    def _note_beyond(self, name: str, value: float) -> None:
        if value > self.beyond.get(name, 0.0):
            self.beyond[name] = value

    def _set_copies(self, hardware: HardwareSpec, profile: Profile) -> None:
        value = profile.value
        self.links = -(-self.tp // hardware.gpus_per_pcie_link)
        # GPUs of the group that share a link share its bandwidth.
        share = self.tp / self.links
        self.d2h_s_per_byte = share / value("d2h_bytes_per_s")
        self.h2d_s_per_byte = share / value("h2d_bytes_per_s")
        self.copy_launch_s = value("copy_launch_s")
        self.copy_setup_s, self.copy_lone_s = value("copy_setup_s"), value("copy_lone_s")

    def _set_all_reduce(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile) -> None:
        tp, value = self.tp, profile.value
        self.all_reduce_on_pcie = tp > 1 and hardware.nvlink_bytes_per_s is None
        self.num_all_reduces = 2 * model.num_layers if tp > 1 else 0
        ring = 2 * (tp - 1) / tp * model.hidden_size * ACTIVATION_BYTES
        points = (profile.all_reduce or {}).get(str(tp))
        token_bytes = model.hidden_size * ACTIVATION_BYTES
        # By tokens, as far as they were measured.
        self.all_reduce_points = [(size / token_bytes, seconds) for size, seconds in points or ()]
        self.all_reduce = grid_of(self.all_reduce_points) if points else None
        self.all_reduced_s_per_token = ring / value("allreduce_bytes_per_s")
        self.all_reduce_chunk_s = value("allreduce_chunk_s")
        self.all_reduce_fixed_s = value("allreduce_launch_s") + 2 * (tp - 1) * value("allreduce_latency_s")

    def padding_s(self, num_decodes: float) -> float:
        """What decodes read beyond their contexts, s."""
        most = self.most_padded
        return self.kv_padding_s * (num_decodes if num_decodes < most else most)

    def products_s(self, tokens: int) -> float:
        """Linear layers of all layers over `tokens` tokens, inputs made FP8 included, routed experts left out, s."""
        memory = self.linear_weights_s + tokens * self.activations_s_per_token
        if self.routed_weights_s:
            memory -= self.routed_weights_s * self.idle_share**tokens
        seconds = ridge(tokens * self.linear_s_per_token, memory, self.linear_exponent)
        if self.factors:
            seconds *= value_at(self.factors, (tokens,))
        return seconds + tokens * self.added_s_per_token

    def linear_s(self, tokens: int) -> float:
        """Linear layers of all layers, and what lies between them, over `tokens` tokens, s."""
        # Batches are of few sizes and come again and again: here and below what depends on the size alone is kept.
        known_s = self._linear_s.get(tokens)
        if known_s is not None:
            return known_s
        seconds = self.products_s(tokens)
        if self.expert_layers:
            seconds += self.experts_s(tokens)
        seconds += max(self.elementwise_least_s, tokens * self.elementwise_s_per_token)
        self._linear_s[tokens] = seconds
        return seconds

    def experts_s(self, tokens: int) -> float:
        """Routed experts of all layers over `tokens` tokens, s; none where they are priced as linear layers."""
        met_s = self.expert_weights_s * (1 - self.idle_share**tokens)
        products_s = ridge(tokens * self.expert_s_per_token, met_s, self.expert_exponent)
        return products_s + tokens * self.expert_activation_s_per_token + self.expert_least_s

    def _linear_parts_s(self, tokens: int, last_tokens: int) -> float:
        """The same where some of the layers see a prompt's last token only."""
        share = self.last_token_share
        seconds = (1 - share) * self.linear_s(tokens)
        return seconds + share * self.linear_s(last_tokens) if last_tokens else seconds

    def _attention_s(self, cached: int, num_new: int, is_sampled: bool) -> float:
        """Attention of all layers over `num_new` prompt tokens after `cached` ones, s."""
        pairs, all_pairs = 0, num_new * cached + num_new * (num_new + 1) // 2
        for layers in self.kv.layers:
            if layers.last_token_only:
                pairs += layers.num_layers * (cached + num_new) * is_sampled
            elif layers.prompt_window is not None:
                pairs += layers.num_layers * window_pairs(cached, num_new, layers.prompt_window)
            else:
                pairs += layers.num_layers * all_pairs
        return self.attention_s_per_pair / self.attention_layers * pairs + self.index_s_per_pair * all_pairs

    def _tiled_s(self, plan: IterationPlan, num_decodes: int, read_s: float) -> float:
        """Attention of prompts, and of decodes that would read for `read_s` by themselves, in one kernel, s."""
        pairs = float(plan.prefill_pairs)
        longest, tiles, most, sequences = 0.0, 0.0, 1.0, num_decodes
        for chunk in plan.chunks:
            num_new, cached = chunk.num_new, chunk.num_cached
            if num_new > 1 or not plan.num_single_chunks:
                longest = max(longest, cached + num_new)
                pairs += max(0.0, self.tile_tokens - num_new) * (cached + (num_new + 1) / 2)
                own = max(1.0, num_new / self.tile_tokens)
                tiles, most, sequences = tiles + own, max(most, own), sequences + 1
        idle = most * sequences - tiles - num_decodes
        seconds = self._together_s(pairs, longest, idle, num_decodes, plan.decode_context_tokens, read_s)
        if plan.decode_longest_tokens:
            beyond = plan.decode_longest_tokens - max(longest, plan.decode_context_tokens / num_decodes)
            seconds += self.attention_s_per_pair * self.walk_pairs_per_token * max(0.0, beyond)
        return seconds

    def _together_s(
        self, pairs: float, longest: float, idle: float, num_decodes: int, context_tokens: float, read_s: float
    ) -> float:
        """The same, of prompts' pairs and longest context, tiles included, `idle` tiles, and decodes of like contexts,
        `context_tokens` in all."""
        idle_s = self.idle_tile_s * idle
        if not num_decodes:
            return self.attention_s_per_pair * max(pairs, self.walk_pairs_per_token * longest) + idle_s
        pairs += self.tile_tokens * (context_tokens + num_decodes * self.tile_padding_tokens)
        longest = max(longest, context_tokens / num_decodes)
        if self.slots:
            reads = min(max(1.0, num_decodes * self.heads_per_kv / self.slots), self.heads_per_kv)
            read_s *= 1.0 + (reads - 1.0) * self._anew(context_tokens)
        compute_s = self.attention_s_per_pair * max(pairs, self.walk_pairs_per_token * longest) + idle_s
        return ridge(compute_s, read_s, self.attention_exponent)

    def _anew(self, context_tokens: float) -> float:
        """Share of a KV head's decodes' KV that L2 has lost when the next query heads read it."""
        if not self.cached_tokens:
            return 1.0
        first, last = READ_ANEW
        return min(1.0, max(0.0, (context_tokens / self.cached_tokens - first) / (last - first)))

    def _longest_s(self, num_decodes: int, context_tokens: int, longest_tokens: int) -> float:
        """What decodes by themselves wait for the longest of them, s."""
        if num_decodes < self.least_whole:
            return 0.0
        return self.longest_s_per_token * max(0.0, longest_tokens - context_tokens / num_decodes)

    def _uneven_s(self, plan: IterationPlan) -> float:
        """Linear layers and prompts' attention of an iteration where layers differ."""
        sampled = plan.num_sampled_prefills + plan.num_decodes
        seconds = self._linear_parts_s(plan.prefill_tokens + plan.num_decodes, sampled)
        for chunk in plan.chunks:
            is_sampled = chunk.num_cached + chunk.num_new == chunk.seq.num_tokens
            seconds += self._attention_s(chunk.num_cached, chunk.num_new, is_sampled)
        return seconds

    def head_s(self, num_sampled: int) -> float:
        """LM head and sampler for `num_sampled` tokens, s."""
        seconds = self._head_s.get(num_sampled)
        if seconds is None:
            seconds = self._logits_s(num_sampled) + num_sampled * self.sampling_s_per_sample
            self._head_s[num_sampled] = seconds
        return seconds

    def _logits_s(self, num_sampled: int) -> float:
        memory = self.head_weights_s + num_sampled * self.logits_s_per_sample
        return ridge(num_sampled * self.head_s_per_sample, memory, self.exponent)

    def iteration_s(self, plan: IterationPlan) -> float:
        num_decodes = plan.num_decodes + plan.num_single_chunks
        if not plan.prefill_tokens:
            # A decode iteration that copies ride along with.
            decodes = num_decodes, plan.decode_context_tokens, plan.decode_window, plan.decode_longest_tokens
            return self.decode_run(*decodes)[0] if num_decodes else 0.0
        tokens = plan.prefill_tokens + num_decodes
        sampled = plan.num_sampled_prefills + plan.num_decodes
        if plan.decode_window is None:
            read_s = self.decode_s_per_context_token * plan.decode_context_tokens
        else:
            read_s = self.full_s_per_token * plan.decode_context_tokens
            read_s += self.window_s_per_token * plan.decode_window.tokens
        read_s += self.padding_s(num_decodes)
        if self.tile_tokens:
            # What is read together is taken off by the caller.
            shared_s = self.unread_s(plan.decode_shared_tokens)
            work_s = self.linear_s(tokens) + self._tiled_s(plan, num_decodes, read_s - shared_s) + shared_s
        elif self.is_uniform:
            linear_s = self._linear_s.get(tokens) or self.linear_s(tokens)
            work_s = linear_s + self.attention_s_per_pair * plan.prefill_pairs + read_s
        else:
            work_s = self._uneven_s(plan) + read_s
        seconds = work_s + self.overhead_s
        if seconds < self.eager_s:
            seconds = max(seconds, self._least_s(tokens))
        if self.delta_net:
            seconds += self.delta_net.decode_s(num_decodes) + self.delta_net.prefill_s(_chunks(plan))
        if sampled:
            seconds += self._head_s.get(sampled) or self.head_s(sampled)
        if self.tp > 1:
            seconds += self.all_reduce_s(tokens)
        if seconds < self.launches_s and tokens > self.captured_tokens:
            seconds = self.launches_s
        if plan.prefill_tokens > self.most_tokens:
            self._note_beyond("tokens", plan.prefill_tokens)
        if plan.decode_context_tokens > self.most_context_tokens or num_decodes > self.most_batch:
            self._note_decodes(num_decodes, plan.decode_context_tokens)
        return seconds

    def _note_decodes(self, num_decodes: int, context_tokens: int) -> None:
        if num_decodes > self.most_batch:
            self._note_beyond("batch", num_decodes)
        if context_tokens > self.most_context_tokens:
            self._note_beyond("context_tokens", context_tokens)

    def note_jump(self, plan: IterationPlan, iterations: int) -> None:
        context_tokens = plan.decode_context_tokens + plan.num_decodes * (iterations - 1)
        if context_tokens > self.most_context_tokens:
            self._note_beyond("context_tokens", context_tokens)

    def decode_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> tuple[float, float]:
        first_s, slope_s = self._device_run(num_decodes, context_tokens, window, longest_tokens)
        if context_tokens > self.most_context_tokens or num_decodes > self.most_batch:
            self._note_decodes(num_decodes, context_tokens)
        if num_decodes > self.captured_decodes and first_s < self.launches_s:
            return self.launches_s, 0.0
        return first_s, slope_s

    def straight_steps(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> float:
        """Iterations of a batch beyond the graphs until the GPU takes longer than launching."""
        return self._launched_steps(num_decodes, *self._device_run(num_decodes, context_tokens, window, longest_tokens))

    def _launched_steps(self, num_decodes: int, first_s: float, slope_s: float) -> float:
        """Iterations until the GPU, which takes `first_s` and then `slope_s` more each time, takes longer."""
        if num_decodes <= self.captured_decodes or first_s >= self.launches_s or not slope_s:
            return inf
        return ceil((self.launches_s - first_s) / slope_s)

    def _device_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None, longest_tokens: int
    ) -> tuple[float, float]:
        """`decode_run` without what launching takes at least."""
        batch_s = self._batch_s.get(num_decodes)
        if batch_s is None:
            tokens = num_decodes if self.padded is None else self.padded(num_decodes)
            batch_s = self.linear_s(tokens) + self.head_s(num_decodes) + self.overhead_s
            batch_s += self.padding_s(num_decodes) + self.all_reduce_s(tokens)
            if self.delta_net:
                batch_s += self.delta_net.decode_s(num_decodes)
            self._batch_s[num_decodes] = batch_s
        if window is None:
            slope = self.decode_s_per_context_token * num_decodes
            first = batch_s + self.decode_s_per_context_token * context_tokens
        else:
            slope = self.full_s_per_token * num_decodes + self.window_s_per_token * window.num_growing
            first = batch_s + self.full_s_per_token * context_tokens + self.window_s_per_token * window.tokens
        if longest_tokens:
            # All contexts grow alike: what they differ by stays as it is.
            first += self._longest_s(num_decodes, context_tokens, longest_tokens)
        return first, slope

    def unread_s(self, num_tokens: int) -> float:
        return self.unread_s_per_token * num_tokens

    def prefill_s(self, prompt_tokens: int) -> float:
        seconds = max(self._prompt_s(prompt_tokens) + self.overhead_s, self._least_s(prompt_tokens)) + self.head_s(1)
        return self._launched_s(seconds + self.added_host_s(1) + self.all_reduce_s(prompt_tokens), prompt_tokens)

    def _least_s(self, tokens: int) -> float:
        """What launching takes the host for the layers of an iteration with prompts, s: as far as it is known."""
        return self.pieced_s if tokens <= self.pieced_tokens else self.eager_s

    def _launched_s(self, seconds: float, prompt_tokens: int) -> float:
        """Seconds of a prompt alone, host time that is not hidden included: at least what launching it takes."""
        if prompt_tokens <= self.captured_tokens:
            return seconds
        return max(seconds, self.launches_s + self.added_host_s(1))

    def _prompt_s(self, num_tokens: int) -> float:
        """Linear layers and attention of a prompt alone."""
        if self.is_uniform:
            pairs = float(num_tokens * (num_tokens + 1) // 2)
            if self.tile_tokens:
                pairs += max(0.0, self.tile_tokens - num_tokens) * (num_tokens + 1) / 2
                pairs = max(pairs, self.walk_pairs_per_token * num_tokens)
            states_s = self.delta_net.prefill_s((num_tokens,)) if self.delta_net else 0.0
            return self.linear_s(num_tokens) + self.attention_s_per_pair * pairs + states_s
        return self._linear_parts_s(num_tokens, 1) + self._attention_s(0, num_tokens, is_sampled=True)

    def project_s(self, num_tokens: int) -> float:
        return self.projection_s_per_token * num_tokens

    def recompute_s(self, num_tokens: int) -> float:
        return self._prompt_s(num_tokens) / self.layers

    def num_copies(self, num_blocks: int, layers: int) -> int:
        if self.copies_whole_blocks:
            return num_blocks
        # vLLM 0.5.5 copies each layer's keys and values apart; a latent is one piece.
        return ceil(self.pieces_per_layer * num_blocks * layers)

    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        moved_s = num_bytes * (self.d2h_s_per_byte if direction is D2H else self.h2d_s_per_byte)
        if not num_copies:
            return moved_s
        # The next piece is asked for while the last is on its way.
        if num_copies < BATCHED_COPIES and self.copy_lone_s:
            return self.copy_lone_s + max(self.copy_lone_s * (num_copies - 1), moved_s)
        return self.copy_setup_s + max(self.copy_launch_s * num_copies, moved_s)

    def all_reduce_s(self, num_tokens: int) -> float:
        if self.tp == 1:
            return 0.0
        if self.all_reduce:
            most = self.all_reduce[0][-1]
            return self.num_all_reduces * value_at(self.all_reduce, (num_tokens,)) * max(1.0, num_tokens / most)
        moved_s = self.all_reduced_s_per_token * num_tokens
        pipelined_s = moved_s + 2 * sqrt(self.all_reduce_chunk_s * moved_s)
        return self.num_all_reduces * (self.all_reduce_fixed_s + pipelined_s)

    def least_all_reduces(self) -> list[tuple[float, float]]:
        """Straight lines below `all_reduce_s`: seconds of an iteration, and of each of its tokens."""
        count = self.num_all_reduces
        if self.all_reduce is None or not count:
            return [(count * self.all_reduce_fixed_s, count * self.all_reduced_s_per_token)]
        points = self.all_reduce_points
        # Through zero, and through the least seconds at the fewest tokens, where that is not below zero.
        lines = [(0.0, min(s / n for n, s in points))]
        first, least_s = points[0][0], min(s for _, s in points)
        slope_s = min((s - least_s) / (n - first) for n, s in points[1:]) if points[1:] else 0.0
        if least_s >= slope_s * first:
            lines.append((least_s - slope_s * first, slope_s))
        return [(count * fixed_s, count * s_per_token) for fixed_s, s_per_token in lines]


def _chunks(plan: IterationPlan) -> Iterator[int]:
    """Tokens of the chunks of prompts in a plan; single tokens count as decodes."""
    return (chunk.num_new for chunk in plan.chunks if chunk.num_new > 1 or not plan.num_single_chunks)


def projection_flops(model: ModelSpec) -> float:
    """Multiplications and additions that make one token's keys and values of one layer from its input."""
    return model.kv_projection_flops_per_token_layer
