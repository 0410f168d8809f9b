"""Ask vLLM 0.33.0's own v1 scheduler what it decides for a workload, over a virtual clock.

Scheduler, KV-cache manager, block pool and block hashes are vLLM's, driven on a CPU with a model that always samples
the token the workload prescribes. Only needed to make new answers; the tests read the stored ones in ``cases_v1/``.

Setup, in a virtual environment of its own (Python 3.11): torch for the CPU, ``pip install --no-deps vllm==0.33.0``, and
of vLLM's requirements those that ``import vllm.v1.core.sched.scheduler`` asks for (none of CUDA's).

A step at time t, synchronous: every request with arrival_s <= t + 1e-12 is added; ``schedule()``; the step is priced
and t moves on; ``update_from_output()`` with a token for each request whose scheduled tokens reach its last known one.
A step that schedules nothing takes no time; after three of them in a row t jumps to the next arrival. Asynchronous: one
batch more in flight than there are stages. On several stages and synchronous: as many (``Oracle.run_queued``).

Price, from ``cost`` p0,p1,p2,d0,d1,d2 in seconds. An entry (request, n) with c tokens computed before the step is a
decode if n is 1 and c >= prompt_tokens, of context c + 1; else a prompt chunk::

    p0 + p1 * sum(n) + p2 * sum(n^2)          if there is any chunk
    d0 + d1 * decodes + d2 * sum(context)     if there is any decode; d0 is dropped beside a chunk

Where tokens are drafted (``spec_method``), each entry's drafts are d1 more each, and d2 counts the context with them.
After each step that samples, ``spec_tokens`` are drafted for every request; drafting takes no time. Of drafts behind
the first g tokens of request r's answer the i-th is accepted, if all before it are, where ``drawn(seed, r, g + i)`` is
less than ``acceptance[i]``.

Each token that the encoder gives takes ``encoder_s_per_token`` more.

The token at position p is B[p // 16] * 16 + p % 16, where B is hash_ids, then output_hash_ids if hash_ids name the
prompt's last block too; blocks beyond them are private to the request.

The answer, besides ``args`` and the ``workload``:

* ``requests``: columns ``first``, ``finish``, ``preempted`` (how many times) and ``hit`` (cached tokens at the first
  admission); null for those whose prompts of max_model_len tokens or more vLLM's front end refuses
* ``steps``: of each the clock at its start, the line ``request:tokens ... [preempt request ...]`` in vLLM's order, free
  blocks after ``schedule()``, and evictions until then
* ``iterations``, ``preemptions``, ``evictions``, ``hit_tokens``, ``rehit_tokens`` (at later admissions), ``makespan``
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    PYTHONHASHSEED="0",
    VLLM_USE_V2_MODEL_RUNNER="1",
)
logging.disable(logging.CRITICAL)

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, compute_mm_encoder_budget  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

ARRIVAL_SLACK = 1e-12
MOST_STEPS = 20_000
"""After as many vLLM is held to be preempting for ever."""
BLOCK = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "torch_dtype": "float16",
}  # fmt: skip
"""Of the model only this is read."""


def drawn(seed: int, request: int, place: int) -> float:
    """A number in [0, 1), the same whenever it is asked for."""
    mask = (1 << 64) - 1
    x = (seed * 0xD1342543DE82EF95 + request * 0x9E3779B97F4A7C15 + place * 0xDA942042E4DD58B5 + 1) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) * 2.0**-64


class Row(NamedTuple):
    """A request of the workload."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()
    output_hash_ids: Sequence[int] = ()
    priority: int = 0
    lora: int = 0
    images: Sequence[tuple[int, int, int]] = ()
    """Each one's place, tokens and id."""


@dataclass(frozen=True)
class Options:
    """What the scheduler and the price of a step depend on. Of `blocks` one is vLLM's null block.

    With a `window` there are `num_window` groups of layers that have it, before or behind `num_full` groups that keep
    all; blocks are those of one group. With `num_state` there are as many groups of layers that keep a state, before
    the others; `exports_states` says that kernels write one out amid a chunk. With a `spec_method` so many tokens are
    drafted after each step that samples; `acceptance` are the chances that one is accepted where those before it are.
    With `max_loras` so many adapters run at once; a row's `lora` is its adapter's number, 0 none.
    With `max_tokens_per_image` prompts have images, the largest of so many tokens.
    A pipeline has so many `stages`, each of which takes an equal share of a step's price.
    """

    blocks: int
    max_model_len: int = 512
    max_num_seqs: int = 256
    max_batched: int = 2048
    no_prefix_caching: bool = False
    policy: str = "fcfs"
    long_prefill: int = 0
    long_prefill_adaptive: bool = False
    watermark: float = 0.0
    no_reserve_full_isl: bool = False
    async_scheduling: bool = False
    stages: int = 1
    window: int = 0
    num_full: int = 1
    num_window: int = 0
    window_first: bool = False
    num_state: int = 0
    exports_states: bool = False
    spec_method: str = ""
    spec_tokens: int = 0
    acceptance: tuple[float, ...] = ()
    acceptance_seed: int = 0
    max_loras: int = 0
    max_tokens_per_image: int = 0
    whole_images: bool = False
    encoder_s_per_token: float = 0.0
    cost: tuple[float, ...] = (0.005, 4e-5, 2e-9, 0.02, 2e-5, 6e-7)


def tokens_of(number: int, row: Row) -> list[int]:
    """Token ids of a request, prompt and outputs."""
    ids = list(row.hash_ids)
    if len(ids) == -(-row.prompt_tokens // BLOCK):
        ids += row.output_hash_ids
    length = row.prompt_tokens + row.output_tokens
    ids += [(1 << 40) + (number << 16) + i for i in range(len(ids), -(-length // BLOCK))]
    return [ident * BLOCK + j for ident in ids for j in range(BLOCK)][:length]


def make_scheduler(options: Options, connector: Any = None) -> tuple[Any, Any]:
    """vLLM's scheduler and the hasher that its requests need. `connector` is a `KVTransferConfig`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, max_model_len=options.max_model_len,
            dtype="float16", seed=0,
        )  # fmt: skip
    scheduler_config = SchedulerConfig(
        max_model_len=options.max_model_len,
        is_encoder_decoder=False,
        max_num_seqs=options.max_num_seqs,
        policy=options.policy,
        max_num_batched_tokens=options.max_batched,
        enable_chunked_prefill=True,
        async_scheduling=options.async_scheduling,
        long_prefill_token_threshold=options.long_prefill,
        long_prefill_token_threshold_adaptive=options.long_prefill_adaptive,
        watermark=options.watermark,
        scheduler_reserve_full_isl=not options.no_reserve_full_isl,
        disable_chunked_mm_input=options.whole_images,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=not options.no_prefix_caching)
    cache.num_gpu_blocks = options.blocks
    size = BLOCK
    if options.num_state:
        aligned = not options.no_prefix_caching
        cache.mamba_cache_mode = "align" if aligned else "none"
        # Without prefix caching one state lasts a whole request; then no hash is made; sizes need a common multiple.
        size = BLOCK if aligned else math.lcm(BLOCK, options.max_model_len)
    speculative = None
    if options.spec_method:
        # Of the others, which need a model's files, the scheduler reads the name and the number alone.
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=options.spec_tokens, prompt_lookup_max=3, target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )  # fmt: skip
        speculative.method = options.spec_method
    config = VllmConfig(
        model_config=model,
        speculative_config=speculative,
        scheduler_config=scheduler_config,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
        parallel_config=ParallelConfig(pipeline_parallel_size=options.stages),
        lora_config=LoRAConfig(max_loras=options.max_loras) if options.max_loras else None,
        kv_transfer_config=connector,
    )
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    specs: list[Any] = [FullAttentionSpec(**shape)] * options.num_full
    windowed: list[Any] = [SlidingWindowSpec(**shape, sliding_window=options.window)] * options.num_window
    state = MambaSpec(
        block_size=BLOCK if cache.mamba_cache_mode == "align" else options.max_model_len, shapes=((1,),),
        dtypes=(torch.float16,), mamba_cache_mode=cache.mamba_cache_mode,
        num_prefill_checkpoint_blocks=int(options.exports_states),
        prefill_checkpoint_alignment=BLOCK if options.exports_states else None,
    )  # fmt: skip
    ordered = [state] * options.num_state + (windowed + specs if options.window_first else specs + windowed)
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(ordered)]
    kv = KVCacheConfig(
        num_blocks=options.blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=cache.prefix_cache_retention_interval,
    )
    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    scheduler = scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        log_stats=True,
    )
    if options.max_tokens_per_image:
        # What vLLM finds where the model has an encoder; of that nothing else is read.
        budget = compute_mm_encoder_budget(scheduler_config, {"image": options.max_tokens_per_image})
        scheduler.max_num_encoder_input_tokens, cache_size = budget
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size)
    hashes = connector is not None or not options.no_prefix_caching
    ahead = config.num_hash_lookahead_tokens
    return scheduler, get_request_block_hasher(BLOCK, hash_fn, num_hash_lookahead_tokens=ahead) if hashes else None


class Oracle:
    """One scheduler of vLLM with one workload."""

    def __init__(self, rows: Sequence[Row], options: Options) -> None:
        groups = options.num_full + options.num_window + options.num_state
        if (options.blocks - 1) // groups * BLOCK < options.max_model_len:
            raise ValueError("vLLM does not start unless a request of max_model_len tokens fits")
        self.rows, self.options = rows, options
        self.tokens = [tokens_of(*row) for row in enumerate(rows)]
        self.scheduler, self.hasher = self._make_scheduler()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.next = 0
        self.first: list[float | None] = [None] * len(rows)
        self.finish: list[float | None] = [None] * len(rows)
        self.hit: list[int | None] = [None] * len(rows)
        self.preempted = [0] * len(rows)
        self.rehit_tokens = self.evictions = 0
        self.steps: list[tuple[float, str, int, int]] = []
        self._victims: list[int] = []
        self._count()

    def _make_scheduler(self) -> tuple[Any, Any]:
        return make_scheduler(self.options)

    def _count(self) -> None:
        """Note every preemption and every eviction; vLLM's methods do what they did."""
        preempt, evict = self.scheduler._preempt_request, self.pool._maybe_evict_cached_block

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            number = int(request.request_id)
            self._victims.append(number)
            self.preempted[number] += 1
            return preempt(request, *args, **kwargs)

        def evicted(block: Any) -> Any:
            found = evict(block)
            self.evictions += bool(found)
            return found

        self.scheduler._preempt_request = counted
        self.pool._maybe_evict_cached_block = evicted

    def _arrive(self, now: float) -> None:
        while self.next < len(self.rows) and self.rows[self.next].arrival_s <= now + ARRIVAL_SLACK:
            number, row = self.next, self.rows[self.next]
            self.next += 1
            if row.prompt_tokens >= self.options.max_model_len:
                # The front end raises an error before the scheduler sees it.
                continue
            # vLLM's last tie-break compares ids as strings.
            request = Request(
                request_id=f"{number:06d}",
                prompt_token_ids=self.tokens[number][: row.prompt_tokens],
                pooling_params=None,
                arrival_time=row.arrival_s,
                priority=row.priority,
                sampling_params=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True),
                lora_request=LoRARequest(f"adapter {row.lora}", row.lora, "/") if row.lora else None,
                block_hasher=self.hasher,
                mm_features=[
                    MultiModalFeatureSpec(
                        data=None, modality="image", identifier=str(ident), mm_position=PlaceholderRange(offset, length)
                    )
                    for offset, length, ident in row.images
                ],
            )
            self.scheduler.add_request(request)

    def _schedule(self, now: float) -> tuple[Any, float]:
        """One `schedule()`: what it decided, and the price."""
        self._victims.clear()
        known = {key: (r.num_computed_tokens, r.num_prompt_tokens) for key, r in self.scheduler.requests.items()}
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        hits = {}
        for data in output.scheduled_new_reqs:
            # Those that were preempted come back as new ones.
            number = int(data.req_id)
            hits[data.req_id] = data.num_computed_tokens
            if self.hit[number] is None:
                self.hit[number] = data.num_computed_tokens
            else:
                self.rehit_tokens += data.num_computed_tokens
        chunks, contexts, num_drafts = [], [], 0
        for key, tokens in scheduled.items():
            computed, prompt = known[key]
            computed = hits.get(key, computed)
            drafts = len(output.scheduled_spec_decode_tokens.get(key, ()))
            num_drafts += drafts
            if tokens == 1 + drafts and computed >= prompt:
                contexts.append(computed + tokens)
            else:
                chunks.append(tokens - drafts)
        line = " ".join(f"{int(key)}:{tokens}" for key, tokens in scheduled.items())
        if self._victims:
            line += " preempt " + " ".join(map(str, self._victims))
        if line:
            self.steps.append((now, line, self.pool.get_num_free_blocks(), self.evictions))
            if len(self.steps) > MOST_STEPS:
                raise RuntimeError(f"{MOST_STEPS} steps: a request waits for ever")
        encoded = sum(
            self.rows[int(key)].images[place][1]
            for key, places in output.scheduled_encoder_inputs.items()
            for place in places
        )
        return output, self._price(chunks, contexts, num_drafts) + self.options.encoder_s_per_token * encoded

    def _price(self, chunks: list[int], contexts: list[int], num_drafts: int = 0) -> float:
        p0, p1, p2, d0, d1, d2 = self.options.cost
        seconds = 0.0
        if chunks:
            seconds += p0 + p1 * sum(chunks) + p2 * sum(n * n for n in chunks)
        if contexts:
            seconds += (0 if chunks else d0) + d1 * len(contexts) + d2 * sum(contexts)
        return seconds + d1 * num_drafts

    def _accepted(self, number: int, which: int, drafts: list[int]) -> int:
        """Drafts that are accepted behind the first `which` output tokens; none of those that only pad."""
        options = self.options
        for i, token in enumerate(drafts):
            if token < 0 or drawn(options.acceptance_seed, number, which + i) >= options.acceptance[i]:
                return i
        return len(drafts)

    def _sampled(self, number: int, which: int, drafts: list[int]) -> list[int]:
        """Tokens of a request from its output token `which` on; what is beyond its last may be anything."""
        first = self.rows[number].prompt_tokens + which
        tokens = self.tokens[number][first : first + 1 + self._accepted(number, which, drafts)]
        return tokens + [0] * (1 + self._accepted(number, which, drafts) - len(tokens))

    def _draft(self, output: Any) -> None:
        """Draft for every request of the step."""
        if self.options.spec_method:
            keys = [key for key in output.num_scheduled_tokens if key in self.scheduler.requests]
            drafts = [[0] * self.options.spec_tokens for _ in keys]
            self.scheduler.update_draft_token_ids(DraftTokenIds(keys, drafts))

    def _deliver(self, output: Any, sampling: dict[str, int | None], now: float, copies: Any = None) -> list[str]:
        """Give each request its next token; `sampling` says which one, None where it samples none. Returns what ended.

        `copies` is what a connector's worker reports.
        """
        keys = list(output.num_scheduled_tokens)
        tokens = []
        for key in keys:
            number, which = int(key), sampling[key]
            drafts = output.scheduled_spec_decode_tokens.get(key, [])
            tokens.append([] if which is None else self._sampled(number, which, drafts))
        result = ModelRunnerOutput(
            req_ids=keys, req_id_to_index={key: i for i, key in enumerate(keys)}, sampled_token_ids=tokens
        )
        result.kv_connector_output = copies
        ended = []
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                number = int(one.request_id)
                if one.new_token_ids and self.first[number] is None:
                    self.first[number] = now
                if one.finish_reason is not None:
                    self.finish[number] = now
                    ended.append(one.request_id)
        self._draft(output)
        return ended

    def run(self) -> dict[str, Any]:
        """Serve the whole workload."""
        is_queued = self.options.async_scheduling or self.options.stages > 1
        end = self.run_queued() if is_queued else self.run_sync()
        if self.pool.get_num_free_blocks() != self.options.blocks - 1:
            raise AssertionError("blocks were lost")
        return {
            "args": asdict(self.options),
            "workload": self.rows,
            "iterations": len(self.steps),
            "preemptions": sum(self.preempted),
            "evictions": self.evictions,
            "hit_tokens": sum(hit or 0 for hit in self.hit),
            "rehit_tokens": self.rehit_tokens,
            "makespan": end,
            "requests": {"first": self.first, "finish": self.finish, "preempted": self.preempted, "hit": self.hit},
            "steps": self.steps,
        }

    def run_sync(self) -> float:
        """One batch at a time."""
        now, idle, requests = 0.0, 0, self.scheduler.requests
        while True:
            self._arrive(now)
            if not self.scheduler.has_unfinished_requests():
                if self.next >= len(self.rows):
                    return now
                now = max(now, self.rows[self.next].arrival_s)
                continue
            output, price = self._schedule(now)
            if not output.num_scheduled_tokens:
                idle += 1
                if idle > 2:
                    if self.next >= len(self.rows):
                        raise AssertionError("requests wait for ever")
                    now, idle = max(now, self.rows[self.next].arrival_s), 0
                self._deliver(output, {}, now)
                continue
            idle = 0
            now += price
            # `schedule()` has counted this step as computed.
            sampling = {
                key: None if requests[key].is_prefill_chunk else requests[key].num_output_tokens
                for key in output.num_scheduled_tokens
            }
            self._deliver(output, sampling, now)

    def run_queued(self) -> float:
        """As `EngineCore.step_with_batch_queue` has it: batches are scheduled at once until its queue is full.

        The queue holds `max_concurrent_batches`, those without work too. A batch passes stage after stage, each when
        the batch before it has left; where scheduled ahead, the first not before the batch that is so many steps
        older as there are stages has left the last, as its tokens are what this one feeds.
        """
        options, requests = self.options, self.scheduler.requests
        num_stages, ahead = options.stages, options.async_scheduling
        most = num_stages + 1 if ahead else num_stages
        now, free_at, ends = 0.0, [0.0] * num_stages, [0.0] * num_stages
        flying: deque[tuple[float, Any, dict[str, int | None]]] = deque()
        sampled: dict[str, int] = {}
        idle = 0
        while True:
            self._arrive(now)
            if self.scheduler.has_requests():
                output, price = self._schedule(now)
                executed = bool(output.num_scheduled_tokens)
                end = now
                if executed:
                    end = max(now, ends[-num_stages]) if ahead else now
                    for i in range(num_stages):
                        end = free_at[i] = max(end, free_at[i]) + price / num_stages
                elif flying:
                    end = max(now, flying[-1][0])
                ends.append(end)
                sampling: dict[str, int | None] = {}
                for key in output.num_scheduled_tokens:
                    if requests[key].is_prefill_chunk:
                        sampling[key] = None
                    elif ahead:
                        sampling[key] = sampled.get(key, 0)
                        sampled[key] = sampled.get(key, 0) + 1
                    else:
                        sampling[key] = requests[key].num_output_tokens
                flying.append((end, output, sampling))
                idle = 0 if executed else idle + 1
                if len(flying) < most and (executed or self.scheduler.has_requests()):
                    continue
            elif not flying:
                if self.next >= len(self.rows):
                    return now
                now = max(now, self.rows[self.next].arrival_s)
                continue
            end, output, sampling = flying.popleft()
            now = max(now, end)
            # What is sampled beyond max_tokens is thrown away: any token will do.
            for key, which in sampling.items():
                if which is not None:
                    sampling[key] = min(which, self.rows[int(key)].output_tokens - 1)
            self._deliver(output, sampling, now)
            if idle > 2 * most:
                if self.next >= len(self.rows):
                    raise RuntimeError("requests wait for ever")
                now, idle = max(now, self.rows[self.next].arrival_s), 0


def ask(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    """vLLM's answer for a workload, which must be sorted by arrival."""
    return Oracle(rows, options).run()


def write_answer(answer: Any, path: Path) -> int:
    """Write an answer, the same bytes for the same answer; return the size of the file."""
    data = json.dumps(answer, separators=(",", ":")).encode()
    return path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))
