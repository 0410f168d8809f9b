"""Form `table`: measured kernel times, interpolated between the points measured; the roofline beyond them.

An iteration is its layers (all but attention, by tokens; attention, by prompts' chunk and decodes), what it runs once,
LM head and sampler, all-reduces, and the engine's overhead per step. Beyond a table the value at its edge grows as the
profile's roofline does. The tables know one chunk beside decodes that are alike: several chunks count as one of as many
tokens and query-context pairs, decodes as so many with the mean context.
"""

from bisect import bisect_right
from math import inf

from sim.cost.kernels import KernelTables, coordinates, edge, grid_of, value_at
from sim.cost.profile import Profile
from sim.cost.roofline import RooflineCost
from sim.engine.plan import IterationPlan, WindowTokens
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec
from sim.specs.models import ModelSpec


class TableCost(RooflineCost):
    """Form `table`, of the model and group of GPUs that were timed.

    Raises:
        UserError: another model, another type of weights or KV, or another number of GPUs.
    """

    straight_decodes = 0.0

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, profile: Profile, tp: int) -> None:
        super().__init__(model, hardware, profile, tp)
        # They were timed with decodes that are alike.
        self.follows_longest = False
        tables = profile.kernels
        if tables is None:
            raise UserError(f"profile {profile.name}: field kernels is missing: form table needs measured kernels")
        _check_model(tables, model, tp, profile.name)
        rows = tables.attention
        self._layer = grid_of(tables.layer)
        self._once = grid_of(tables.iteration)
        self._head = grid_of(tables.head)
        self._chunk = grid_of([(new, cached, s) for new, cached, decodes, _, s in rows if not decodes])
        self._decode = grid_of([(decodes, context, s) for new, _, decodes, context, s in rows if not new])
        mixed = [row for row in rows if row[0] and row[2]]
        self._mixed = grid_of(mixed) if mixed else None
        self._launch_s = min(seconds for *_, seconds in rows)
        self._by_context: dict[int, tuple[float, list[float], list[float]]] = {}

    # -- kernels -----------------------------------------------------------------------------------------------------

    def linear_s(self, tokens: int) -> float:
        """All of the layers but attention, s."""
        most = self._layer[0][-1]
        seconds = self.layers * value_at(self._layer, (tokens,))
        return seconds if tokens <= most else seconds * super().linear_s(tokens) / super().linear_s(int(most))

    def head_s(self, num_sampled: int) -> float:
        """LM head and sampler for `num_sampled` tokens, s."""
        most = self._head[0][-1]
        seconds = value_at(self._head, (num_sampled,))
        if num_sampled > most:
            seconds *= self._logits_s(num_sampled) / self._logits_s(int(most))
        return seconds + num_sampled * self.sampling_s_per_sample

    def _once_s(self, tokens: int) -> float:
        most = self._once[0][-1]
        return value_at(self._once, (tokens,)) * max(1.0, tokens / most)

    def _shape_s(self, new: float, cached: float, decodes: float, context: float) -> float:
        """The roofline's attention of all layers, for how it grows beyond the tables."""
        read_s = self.decode_s_per_context_token * decodes * (context + 1) + self.padding_s(decodes)
        if not new:
            return read_s
        pairs = max(new, self.tile_tokens) * (cached + (new + 1) / 2)
        if not self.tile_tokens:
            return self.attention_s_per_pair * pairs + read_s
        idle = max(0.0, new / self.tile_tokens - 1) * decodes
        return self._together_s(pairs, cached + new, idle, int(decodes), decodes * (context + 1), read_s)

    def _chunk_s(self, new: float, cached: float) -> float:
        """Attention of a chunk alone in one layer, s."""
        at = edge(self._chunk, (new, cached))
        seconds = value_at(self._chunk, at)
        beyond = new > at[0] or cached > at[1]
        return seconds * self._shape_s(new, cached, 0, 0) / self._shape_s(at[0], at[1], 0, 0) if beyond else seconds

    def _beside_s(self, new: float, cached: float, decodes: int, context: float) -> float:
        """What decodes add to a chunk's attention in one layer, s."""
        if self._mixed is None:
            return max(0.0, self._decodes_s(decodes, context) - self._launch_s)
        point = new, cached, decodes, context
        at = edge(self._mixed, point)
        seconds = value_at(self._mixed, at)
        if any(x > most for x, most in zip(point, at, strict=True)):
            seconds *= self._shape_s(*point) / self._shape_s(*at)
        return max(0.0, seconds - self._chunk_s(new, cached))

    def _attention_of(self, plan: IterationPlan, num_decodes: int) -> float:
        """Attention of prompts, and of decodes beside them, in all layers, s."""
        chunks = [(c.num_new, c.num_cached) for c in plan.chunks if c.num_new > 1 or not plan.num_single_chunks]
        new = plan.prefill_tokens
        cached = (plan.prefill_pairs - new * (new + 1) / 2) / new
        if cached >= 0.0 or len(chunks) == 1:
            seconds = self._chunk_s(new, max(0.0, cached))
        else:
            # Several prompts, which do not attend to each other, share a launch.
            seconds = sum([self._chunk_s(*chunk) - self._launch_s for chunk in chunks]) + self._launch_s
        if num_decodes:
            context = plan.decode_context_tokens / num_decodes - 1
            seconds += self._beside_s(new, max(0.0, cached), num_decodes, context)
        return self.layers * seconds

    # -- iterations --------------------------------------------------------------------------------------------------

    def iteration_s(self, plan: IterationPlan) -> float:
        num_decodes = plan.num_decodes + plan.num_single_chunks
        if not plan.prefill_tokens:
            return self.decode_run(num_decodes, plan.decode_context_tokens)[0] if num_decodes else 0.0
        tokens, sampled = plan.prefill_tokens + num_decodes, plan.num_sampled_prefills + plan.num_decodes
        seconds = self.linear_s(tokens) + self._attention_of(plan, num_decodes) + self._once_s(tokens)
        if sampled:
            seconds += self.head_s(sampled)
        if plan.prefill_tokens > self.most_tokens:
            self._note_beyond("tokens", plan.prefill_tokens)
        if plan.decode_context_tokens > self.most_context_tokens or num_decodes > self.most_batch:
            self._note_decodes(num_decodes, plan.decode_context_tokens)
        seconds += self.all_reduce_s(tokens)
        return max(seconds, self.launches_s) if tokens > self.captured_tokens else seconds

    def straight_steps(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> float:
        """Iterations of a batch that stays the same until its mean context passes the table's next point."""
        first_s, slope_s, steps = self._segment(num_decodes, context_tokens)
        return min(steps, self._launched_steps(num_decodes, first_s, slope_s))

    def _device_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None, longest_tokens: int
    ) -> tuple[float, float]:
        return self._segment(num_decodes, context_tokens)[:2]

    def _segment(self, num_decodes: int, context_tokens: int) -> tuple[float, float, float]:
        """First duration, growth, and iterations until the mean context passes the table's next point."""
        base_s, contexts, seconds = self._decodes(num_decodes)
        context = context_tokens / num_decodes - 1
        place = bisect_right(contexts, context)
        if place == 0:
            first_s, slope_s = base_s + seconds[0], 0.0
        elif place == len(contexts):
            # Beyond the table: in proportion to the roofline, which is a straight line here.
            edge_s = self._shape_s(0, 0, num_decodes, contexts[-1])
            slope_s = seconds[-1] * self.decode_s_per_context_token * num_decodes / edge_s
            first_s = base_s + seconds[-1] + slope_s * (context - contexts[-1])
        else:
            low, high = contexts[place - 1], contexts[place]
            slope_s = (seconds[place] - seconds[place - 1]) / (high - low)
            first_s = base_s + seconds[place - 1] + slope_s * (context - low)
        steps = int(contexts[place] - context) + 1 if place < len(contexts) else inf
        return first_s, slope_s, steps

    def _decodes(self, num_decodes: int) -> tuple[float, list[float], list[float]]:
        """Of a batch: seconds beside its attention, and attention of all layers by mean context."""
        known = self._by_context.get(num_decodes)
        if known is None:
            tokens = num_decodes if self.padded is None else self.padded(num_decodes)
            base_s = self.linear_s(tokens) + self._once_s(tokens) + self.head_s(num_decodes)
            base_s += self.all_reduce_s(tokens)
            contexts = coordinates(self._decode, num_decodes)
            seconds = [self.layers * self._decodes_s(num_decodes, context) for context in contexts]
            known = self._by_context[num_decodes] = base_s, contexts, seconds
        return known

    def _decodes_s(self, num_decodes: int, context: float) -> float:
        """Attention of decodes alone in one layer, s."""
        point = num_decodes, context
        at = edge(self._decode, point)
        seconds = value_at(self._decode, at)
        if all(x <= most for x, most in zip(point, at, strict=True)):
            return seconds
        return seconds * max(1.0, self._shape_s(0, 0, *point) / self._shape_s(0, 0, *at))

    def prefill_s(self, prompt_tokens: int) -> float:
        seconds = self._prompt_s(prompt_tokens) + self._once_s(prompt_tokens) + self.head_s(1)
        return self._launched_s(seconds + self.added_host_s(1) + self.all_reduce_s(prompt_tokens), prompt_tokens)

    def _prompt_s(self, num_tokens: int) -> float:
        return self.linear_s(num_tokens) + self.layers * self._chunk_s(num_tokens, 0)


def _check_model(tables: KernelTables, model: ModelSpec, tp: int, profile: str) -> None:
    if model.kv_layers or model.mla or model.moe or model.gdn:
        raise UserError(f"profile {profile}: form table prices layers that are alike: {model.name}'s are not")
    timed = tables.model, tables.tp, tables.weight_bytes, tables.kv_bytes
    weights = model.linear_weight_bytes / model.num_layers
    if timed != (model.name, tp, weights, model.kv_bytes_per_token_layer()):
        raise UserError(
            f"profile {profile}: its kernels are those of {tables.model} on {tables.tp} GPUs with matrices of "
            f"{tables.weight_bytes:.0f} bytes a layer and {tables.kv_bytes:.0f} of KV a token: simulate that, not "
            f"{model.name} on {tp} with {weights:.0f} and {model.kv_bytes_per_token_layer():.0f}, or use a roofline"
        )
