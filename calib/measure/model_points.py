"""`ModelPoints`: the shapes of one model that are worth timing on this machine."""

from collections.abc import Iterator

from msgspec.structs import replace

from calib.measure.capacity import Capacity
from calib.measure.grid import Grid
from calib.measure.points import BLOCK_TOKENS, DRAWN_OPS, Point, mean_tokens, readable_bytes
from calib.samples import EAGER, PIECES, WHOLE
from calib.terms import terms_of
from gpu_runtime.model.capture_sizes import LARGEST_CAPTURE
from sim.specs.model_spec import ModelSpec

MAX_BUILT_LAYERS = 8
TIMED_LAYERS = 8
QUICK_BYTES = 3.2e9
"""Where layers are quick, up to so many run in a row, so that what starting and stopping cost is spread over them: on a
GPU those whose weights together are below so many bytes, and ..."""
QUICK_TOKENS = 256
"""... over so few tokens."""
CACHES = 4
"""The layers built hold so many times the last-level cache: no weight is still in it when its turn comes again."""
KV_SHARE = 0.35
"""Of the device's free memory, for the KV cache."""
CPU_KV_BYTES = {True: 2**30, False: 4 * 2**30}
"""Most KV cache on a CPU, quick or not."""
PIECE_S = {True: 0.5, False: 10.0}
CPU_PIECE_S = {True: 0.25, False: 2.0}
"""Longest execution, quick or not, by the capacity's rough rates."""


class ModelPoints:
    """The grid's points of one model, and which of them the machine has room and time for."""

    def __init__(
        self, name: str, spec: ModelSpec, limits: Capacity, grid: Grid, quick: bool, element_bytes: int
    ) -> None:
        self._name = name
        self._spec = spec
        self._limits = limits
        self._grid = grid
        on_cpu = not limits.num_gpus
        self._piece_s = (CPU_PIECE_S if on_cpu else PIECE_S)[quick]
        weights = spec.linear_weight_bytes / spec.num_layers * element_bytes / spec.dtype_bytes
        wanted = -(-CACHES * limits.cache_bytes // int(weights))
        self.built = min(spec.num_layers, MAX_BUILT_LAYERS, max(2, wanted))
        # Passes over what is built make more layers of it; a CPU has no launches to spread.
        passes = min(TIMED_LAYERS // self.built, round(QUICK_BYTES / (self.built * weights)))
        self._many = self.built if on_cpu else self.built * max(1, passes)
        block = BLOCK_TOKENS * spec.kv_bytes_per_token_layer() * element_bytes / spec.kv_dtype_bytes * self.built
        kv_bytes = min(KV_SHARE * limits.device_bytes, CPU_KV_BYTES[quick] if on_cpu else float("inf"))
        self._kv_blocks = int(kv_bytes // block)
        self._block_bytes = block

    def points(self) -> Iterator[Point]:
        """All of the grid."""
        grid = self._grid
        for tokens in grid.prompts:
            yield self._layers(1, tokens, 0)
        for batch, tokens in grid.prompt_batches:
            yield self._layers(batch, tokens, 0)
        for tokens, context in grid.chunks:
            yield self._layers(1, tokens, context)
        # Where decodes come from graphs: elsewhere kernels take their turns anyway.
        for tokens, decodes, context in grid.mixed if self._limits.graphs else ():
            shape = self._layers(1, tokens, 0, beside=decodes)
            yield replace(shape, decodes=decodes, decode_context_tokens=context)
        for context in grid.decode_contexts:
            for batch in grid.decode_batches:
                yield self._decodes(batch, context)
        for tokens in grid.recomputed:
            yield self._layers(1, tokens, 0, op="recompute")
        for tokens in grid.restored:
            yield self._layers(1, tokens, 0, op="restore")
        for rows in grid.head_rows:
            yield Point(op="lm_head", model=self._name, batch_size=rows, new_tokens=1)
        for batch, tokens, context in grid.steps:
            # One pass through the decoder, whatever its tokens.
            shape = self._decodes(batch, context) if tokens == 1 else self._layers(batch, tokens, context)
            yield replace(shape, op="step", num_layers=self.built)

    def _layers(
        self, batch: int, tokens: int, context: int, *, beside: int = 0, op: str = "layers", graph: int = EAGER
    ) -> Point:
        """As the runtime computes them: all but attention from graphs where these are captured, `beside` more tokens
        included; each of the layers once, then."""
        if self._limits.graphs and op == "layers" and graph == EAGER and batch * tokens + beside <= LARGEST_CAPTURE:
            graph = PIECES
        layers = self._many if batch * tokens <= QUICK_TOKENS and graph != PIECES else self.built
        if op in DRAWN_OPS and not context:
            tokens = mean_tokens(tokens)
        return Point(
            op=op,
            model=self._name,
            num_layers=layers,
            batch_size=batch,
            new_tokens=tokens,
            context_tokens=context,
            graph=graph,
        )

    def _decodes(self, batch: int, context: int) -> Point:
        """As the runtime computes them: from a graph where the machine has graphs and the batch is captured."""
        graph = self._limits.graphs and batch <= LARGEST_CAPTURE
        return self._layers(batch, 1, context, graph=WHOLE if graph else EAGER)

    def fault(self, point: Point) -> str:
        """Why a point cannot be measured; empty if it can."""
        if not point.new_tokens:
            return ""
        if point.blocks > self._kv_blocks:
            return f"needs more KV cache than {readable_bytes(int(self._kv_blocks * self._block_bytes))}"
        if self._rough_s(point) > self._piece_s and point.tokens > self._grid.prompts[2]:
            return f"may take more than {self._piece_s:g} s an execution"
        return ""

    def _rough_s(self, point: Point) -> float:
        t = terms_of([point.sample([1.0])], {self._name: self._spec})
        flops = t.linear_flops + t.attention_flops + t.head_flops
        moved = t.weight_bytes + t.kv_bytes + t.head_bytes
        return float((flops / self._limits.flops_per_s + moved / self._limits.bytes_per_s)[0])
