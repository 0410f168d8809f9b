"""SGLang as it is served today (0.5.23): `python -m sglang.launch_server`, decision for decision.

`tests/oracle/test_oracle_sglang.py` holds it to SGLang's own scheduler. From its code: batches and admission
(`batching`, `prefill_pass`), the queue (`queue`), the radix tree, its evictions and HiCache's host tier (`tree`,
`memory`), its storage (`storage`), pools of layers with a window or a state (`marked_tree`, `window_memory`,
`state_memory`). The paper's system (Zheng et al., arXiv 2312.07104) is `radix`.

Assumed:
- Requests ask for as many tokens as they generate (`max-new-tokens` says otherwise: then they end by a stop token).
- A trace names blocks of tokens; prompts that part within a block share nothing of it.
- The pool is sized as vLLM's (`max-total-tokens` says otherwise), and half as many requests run as it has tokens.
- A prompt that SGLang refuses is ignored; there it passes the queue as one token.
- HiCache's copies go at the link's rate, whatever the page: SGLang's kernels gather. Prices without a copy's (`linear`
  with 0 s a block) have free ones, over at once.
- What is written back is waited for, by the host as well. In SGLang the tokens of the step in flight are told after
  that; here when they are computed.
- Storage behind the host (L3, `storage`) takes the times of SGLang's backend `sim`; what it has already is not written
  again. A request that found nothing there asks again after so many steps; while nothing runs, after so many events.
- A host that only stages for storage (`buffer_only`) is not simulated.
- States are tracked eagerly, in their own type. Copies of states take no time.
- A request that finds no room alone in the pool of layers with a window is ignored; SGLang waits for ever.
- A rank of `enable-dp-attention` decides as its scheduler does. The controller knows what the ranks have of each 20 ms;
  there each rank's last report, which may be older.
- Several victims of one preemption return to the queue in the order in which they ran; SGLang has them in a set.
"""

from typing import TYPE_CHECKING, ClassVar

from sim.cost.engine_profile import TODAYS_SERIAL
from sim.errors import UserError
from sim.frozen import frozen
from sim.specs.expert_layout import HIGH_THROUGHPUT, LOW_LATENCY
from sim.specs.memory import StatePool
from sim.systems.base import Asked, EngineLimits, Policy, WindowPool
from sim.systems.sglang.options import SLIDE_TOKENS, SglangOptions

if TYPE_CHECKING:
    from sim.specs.models import ModelSpec

CHUNK_TOKENS = ((160, 16384), (60, 8192), (20, 4096), (0, 2048))
"""`--chunked-prefill-size` by GiB of a GPU, from so many on."""
GIB = 1 << 30
SEATS = 2048
"""Requests that run, where nothing is said: SGLang's least; large pools have up to twice as many."""


@frozen
class Sglang(SglangOptions, Policy):
    """Prompts before decodes, a sticky refusal, and a radix tree of all that was computed."""

    name: ClassVar[str] = "sglang"
    summary: ClassVar[str] = "SGLang 0.5: overlap schedule, radix cache, retraction, HiCache"
    default_prefix_caching: ClassVar[bool] = True
    default_block_size: ClassVar[int] = 1
    ranks_share_tokeniser: ClassVar[bool] = True
    composition: ClassVar[dict[str, str]] = {
        "order": "sglang-queue",
        "batching": "extend-first",
        "admission": "memory",
        "memory": "sglang-tree",
        "eviction": "recompute",
        "stage": "direct",
    }

    @property
    def async_scheduling_asked(self) -> bool | None:
        """The overlap schedule: other decisions, whatever there is to hide behind it."""
        if self.names["batching"] != self.composition["batching"]:
            return super().async_scheduling_asked
        return not self.disable_overlap_schedule

    @property
    def own_engine_profile(self) -> str:
        # Without the overlap the host of vLLM v1 is the nearest that is known.
        return "sglang-0.5" if self.schedules_ahead else TODAYS_SERIAL

    def window_pool(self, window_tokens: int, block_size: int, engine: EngineLimits) -> WindowPool | None:
        if self.names["memory"] != self.composition["memory"] or self.disable_hybrid_swa_memory:
            return None
        if not (self.disable_radix_cache and self.max_running_requests and engine.enable_chunked_prefill):
            return WindowPool(share=self.swa_full_tokens_ratio)
        # What so many requests and the chunks in flight take at most (`compute_swa_request_cap`).
        each = window_tokens - 1 + SLIDE_TOKENS + 2 * block_size
        chunks = (1 if self.disable_overlap_schedule else 2) * engine.max_num_batched_tokens
        return WindowPool(tokens=engine.max_num_seqs * each + chunks + block_size)

    def state_pool(self, block_size: int, engine: EngineLimits, *, cached: bool, ranks: int) -> StatePool | None:
        if self.names["memory"] != self.composition["memory"]:
            return None
        # Its own, the one that the tree has where its prompt ends, one more while that is handed over, and the tracked.
        each = 3 + self.tracked_states(block_size) if cached else 1
        if self.max_mamba_cache_size:
            return StatePool(each, num_states=self.max_mamba_cache_size // (ranks if self.enable_dp_attention else 1))
        if self.max_running_requests and not cached:
            return StatePool(each, num_states=engine.max_num_seqs)
        return StatePool(each, self.mamba_full_memory_ratio / (1 + self.mamba_full_memory_ratio))

    def expert_ranks(self, model: "ModelSpec", ranks: int) -> int:
        if not self.enable_dp_attention:
            # Each is a server of its own, with all experts.
            return 1
        if ranks > 1 and model.moe is None:
            raise UserError(
                f"sglang enable-dp-attention: {model.name} has no experts, and dense layers spread over ranks are not "
                "simulated; leave it out: the ranks go by themselves"
            )
        return ranks

    def all2all(self, backend: str | None) -> tuple[str, str]:
        if backend is not None:
            raise UserError(f"--all2all-backend {backend}: is vLLM's; give --sglang-moe-a2a-backend deepep")
        if self.moe_a2a_backend == "none":
            return super().all2all(None)
        decode = HIGH_THROUGHPUT if self.deepep_mode == "normal" else LOW_LATENCY
        return decode, LOW_LATENCY if self.deepep_mode == "low_latency" else HIGH_THROUGHPUT

    def told(self, block_size: int | None) -> dict[str, int | bool]:
        page = self.page_size or block_size or self.default_block_size
        found: dict[str, int | bool] = {}
        if self.page_size:
            found["block_size"] = page
        if self.max_total_tokens:
            if self.max_total_tokens < page:
                raise UserError(
                    f"sglang max-total-tokens: {self.max_total_tokens} is less than a page of {page}; raise it"
                )
            found["num_gpu_blocks_override"] = self.max_total_tokens // page
        if self.max_running_requests:
            found["max_num_seqs"] = self.max_running_requests
        if self.chunked_prefill_size > 0:
            found["max_num_batched_tokens"] = self.chunked_prefill_size
        if self.chunked_prefill_size < 0:
            found["enable_chunked_prefill"] = False
        if self.disable_radix_cache:
            found["enable_prefix_caching"] = False
        return found

    def engine_limits(self, asked: Asked) -> EngineLimits:
        """SGLang's defaults by GPU."""
        ranks = asked.ranks if self.enable_dp_attention else 1
        seats = max(1, asked.max_num_seqs // ranks) if asked.max_num_seqs else SEATS
        if asked.enable_chunked_prefill is False:
            if self.enable_mixed_chunk:
                raise UserError(
                    "--no-enable-chunked-prefill: with --sglang-enable-mixed-chunk decodes ride along with chunks; "
                    "leave one of them out"
                )
            return EngineLimits(seats, max(asked.max_model_len, self.max_prefill_tokens), False)
        gib = asked.gpu_memory_bytes / GIB
        chunk = asked.max_num_batched_tokens or next(tokens for least, tokens in CHUNK_TOKENS if gib >= least)
        if chunk < ranks:
            raise UserError(f"sglang chunked-prefill-size: {chunk} tokens are fewer than the {ranks} ranks; raise it")
        return EngineLimits(seats, chunk // ranks, True)
