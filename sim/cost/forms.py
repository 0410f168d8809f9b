"""The forms of the cost model, chosen by the profile.

- roofline: `sim.cost.roofline`. A profile of form `table` has one too, for what lies beyond its tables.
- table: `sim.cost.table`.
  What the engine's host takes is beside both (`CostModel.host`); its CUDA graphs pad the tokens of a decode batch.
- paper: LayerKV Eq. 3 (prefill) and eLLM Eq. 3-4 (decode) as printed; wrong as predictions of time, kept to reproduce
  the papers' decisions.
- linear: given coefficients; copies cost seconds a block.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from sim.cost.launches import num_launches
from sim.cost.model import CostModel
from sim.cost.profile import Profile
from sim.cost.roofline import RooflineCost, projection_flops
from sim.engine.changes import Direction
from sim.engine.plan import IterationPlan, WindowTokens
from sim.errors import InvariantError, UserError
from sim.specs.expert_layout import ExpertLayout
from sim.specs.hardware import HardwareSpec
from sim.specs.models import ModelSpec

if TYPE_CHECKING:
    from sim.cost.engine_profile import EngineProfile


class LinearCost(CostModel):
    """Form `linear`: prefill p0 + p1*tokens + p2*sum(len^2), decode d0 + d1*batch + d2*context tokens (s).

    An iteration with both costs the prefill plus d1*batch + d2*context.
    """

    def __init__(
        self,
        prefill: Seq[float],
        decode: Seq[float],
        swap_s_per_block: float,
        block_bytes: float,
        copy_launch_s: float = 0.0,
        model: ModelSpec | None = None,
    ) -> None:
        """`block_bytes` of a whole block, per GPU.

        `copy_launch_s` is the part of `swap_s_per_block` that does not depend on the block's bytes. `model` is needed
        to price single layers.
        """
        super().__init__()
        self.copy_launch_s = copy_launch_s
        self.copy_s_per_byte = max(0.0, swap_s_per_block - copy_launch_s) / block_bytes
        self.num_layers = model.num_layers if model else 0
        # Of a prompt token's linear work in all layers, the keys and values of one.
        self.projection = projection_flops(model) / model.linear_flops_per_token if model else None
        self.p0, self.p1, self.p2 = prefill
        self.d0, self.d1, self.d2 = decode
        self.prelude_base_s = self.prelude_s_per_token = 0.0
        """What of these passes before the GPU begins: for an iteration, for each token of its prompts and contexts."""
        # Of a context token's seconds: of the layers that read a window, and of what is read beside windows.
        kv, layers = (model.kv_format(), model.num_attention_layers) if model else (None, 1)
        self.window_share = kv.num_window_readers / layers if kv else 0.0
        self.context_share = kv.context_reads / layers if kv else 1.0

    def iteration_s(self, plan: IterationPlan) -> float:
        context_tokens = self.context_share * plan.decode_context_tokens
        window = plan.decode_window
        # Where nothing says what is in the windows, as if they held everything.
        context_tokens += self.window_share * (plan.decode_context_tokens if window is None else window.tokens)
        num_decodes = plan.num_decodes + plan.num_single_chunks
        decode = self.d1 * num_decodes + self.d2 * context_tokens
        if plan.prefill_tokens:
            return self.p0 + self.p1 * plan.prefill_tokens + self.p2 * plan.prefill_squares + decode
        return self.d0 + decode if num_decodes else 0.0

    def prelude_s(self, plan: IterationPlan) -> float:
        return self.prelude_base_s + self.prelude_s_per_token * (plan.prefill_tokens + plan.decode_context_tokens)

    def decode_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> tuple[float, float]:
        within, num_growing = (context_tokens, num_decodes) if window is None else window
        read = self.context_share * context_tokens + self.window_share * within
        growing = self.context_share * num_decodes + self.window_share * num_growing
        return self.d0 + self.d1 * num_decodes + self.d2 * read, self.d2 * growing

    def unread_s(self, num_tokens: int) -> float:
        return self.d2 * self.context_share * num_tokens

    def prefill_s(self, prompt_tokens: int) -> float:
        return self.p0 + self.p1 * prompt_tokens + self.p2 * prompt_tokens * prompt_tokens

    def num_copies(self, num_blocks: int, layers: int) -> int:
        # The seconds of a swapped block are those of one piece, whatever it holds of the layers.
        return num_blocks

    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        return self.copy_launch_s * num_copies + num_bytes * self.copy_s_per_byte

    def project_s(self, num_tokens: int) -> float:
        if self.projection is None:
            raise InvariantError("a linear cost without the model's shapes cannot price projections")
        return self.p1 * self.projection * num_tokens

    def recompute_s(self, num_tokens: int) -> float:
        if self.projection is None:
            raise InvariantError("a linear cost without the model's shapes cannot price single layers")
        return (self.p1 * num_tokens + self.p2 * num_tokens * num_tokens) / self.num_layers


class PaperCost(RooflineCost):
    """Form `paper`: iterations by the printed equations (LayerKV Eq. 3; eLLM Eq. 3-4), copies as in the roofline.

    Decode per sequence: 24 h^2 L + 4 h L (s+1) + 2 h V s FLOPs over peak FLOPS. The last term charges the LM head for
    the whole context and nothing is charged for memory bandwidth: use it to reproduce decisions, not times.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int) -> None:
        super().__init__(model, hardware, profile, tp)
        self.follows_longest = False
        h, layers = model.hidden_size, model.num_layers
        peak = tp * hardware.fp16_flops_per_s
        scale = profile.value("alpha") / peak
        self.eq3_linear_s = scale * 2 * model.num_params
        # The printed attention term lacks the layer count.
        self.eq3_square_printed_s = scale * 2 * h
        self.eq3_decode_s = 24 * h * h * layers / peak
        # Context here counts the token being fed: s + 1.
        self.eq3_decode_s_per_context_token = (4 * h * layers + 2 * h * model.vocab_size) / peak

    def iteration_s(self, plan: IterationPlan) -> float:
        prefill = self.eq3_linear_s * plan.prefill_tokens + self.eq3_square_printed_s * plan.prefill_squares
        num_decodes = plan.num_decodes + plan.num_single_chunks
        return prefill + self.decode_run(num_decodes, plan.decode_context_tokens)[0]

    def decode_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> tuple[float, float]:
        slope = self.eq3_decode_s_per_context_token
        return self.eq3_decode_s * num_decodes + slope * context_tokens, slope * num_decodes

    def unread_s(self, num_tokens: int) -> float:
        # The equations know of no memory.
        return 0.0

    def prefill_s(self, prompt_tokens: int) -> float:
        return prompt_tokens * (self.eq3_linear_s + self.eq3_square_printed_s * prompt_tokens)


def _with_engine(
    cost: RooflineCost, engine: "EngineProfile | None", model: ModelSpec, hardware: HardwareSpec, ranks: int = 1
) -> RooflineCost:
    if engine is not None:
        cost.host = engine.host_time()
        # Every GPU of a group has all logits, and samples.
        cost.pieced_s = engine.value("pieced_layer_s") * model.num_layers
        cost.eager_s = max(engine.value("eager_layer_s") * model.num_layers, cost.pieced_s)
        if hardware.copies_beside_compute:
            sizes = engine.graph_batch_sizes
            graphs = sizes[-1] if sizes else 0
            cost.pieced_tokens = graphs if engine.graphs_of == "all" else 0
            cost.set_launches(
                engine.value("eager_kernel_s") * num_launches(model, cost.tp, ranks),
                beyond_prompts=cost.pieced_tokens,
                beyond_decodes=graphs,
            )
        cost.sampling_s_per_sample = engine.value("sampling_s_per_logit") * model.vocab_size
        # A CPU, which makes its copies itself, launches no graphs.
        if hardware.copies_beside_compute:
            cost.padded = engine.padding()
            cost.most_captured = max(engine.graph_batch_sizes, default=0)
        if engine.block_copies == "block":
            cost.copies_whole_blocks = True
    return cost


def build_cost(
    model: ModelSpec,
    hardware: HardwareSpec,
    profile: Profile,
    tp: int,
    block_bytes: float,
    form: str | None = None,
    engine: "EngineProfile | None" = None,
    experts: ExpertLayout | None = None,
) -> CostModel:
    """The cost model of a profile, in the profile's own form or, but for linear ones, as `roofline` or `paper`.

    `engine` adds host time and padded batches to the forms `roofline` and `table`; prices of the others are all there
    is. `experts` says which GPUs share the routed ones, where that is not the tensor-parallel group as a whole.
    """
    form = form or profile.form
    if experts is not None and form != "roofline":
        raise UserError(
            f"profile {profile.name}: form {form} has no prices of experts that data-parallel ranks or expert "
            "parallelism spread over GPUs; take a profile of form roofline"
        )
    if profile.form == "linear" or form == "linear":
        if profile.form != form or profile.linear is None:
            raise UserError(f"cost form {form!r} cannot come from profile {profile.name!r} of form {profile.form!r}")
        linear = profile.linear
        swap_s, launch_s = linear.swap_s_per_block, linear.copy_launch_s
        cost: CostModel = LinearCost(linear.prefill, linear.decode, swap_s, block_bytes, launch_s, model)
    elif form == "table":
        from sim.cost.table import TableCost  # noqa: PLC0415

        cost = _with_engine(TableCost(model, hardware, profile, tp), engine, model, hardware)
    elif form == "roofline" and experts is not None:
        from sim.cost.spread_experts import SpreadExpertsCost  # noqa: PLC0415 - most runs have no such experts

        cost = SpreadExpertsCost(model, hardware, profile, experts)
        cost = _with_engine(cost, engine, model, hardware, experts.ranks)
    elif form == "roofline":
        cost = _with_engine(RooflineCost(model, hardware, profile, tp), engine, model, hardware)
    elif form == "paper":
        cost = PaperCost(model, hardware, profile, tp)
    else:
        raise UserError(f"cost form: {form!r} is not one of roofline, table, paper, linear")
    cost.copies_beside_compute = hardware.copies_beside_compute
    return cost
