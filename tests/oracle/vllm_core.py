"""vLLM 0.33's own `EngineCore` on a CPU, over a virtual clock, with the scheduler class that is asked for.

Everything that decides is vLLM's and that class's. The executor computes nothing, always samples the token that the
workload prescribes, and lets time pass: an iteration takes what the preset's cost model says, or what it took in a
run before. The environment is that of `vllm_v1_oracle.py`; `scheduler_replay.simulated` is the same in the simulator.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from scheduler_replay import BLOCK, Served, tokens_of
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm_v1_oracle import MODEL

from kvtwin.vllm.settings import EngineFacts
from sim.cost.pricing import Lanes, Pricer
from traces.request import Request as Asked

TIE_S = 1e-9
MOST_STEPS = 50_000
NOTHING = ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])


class Later:
    """An output that is there once the clock has come to its time."""

    def __init__(self, get: Callable[[], ModelRunnerOutput]) -> None:
        self._get = get

    def result(self) -> ModelRunnerOutput:
        return self._get()


class Core:
    """One engine core of vLLM with one workload."""

    def __init__(
        self, requests: Sequence[Asked], facts: EngineFacts, scheduler: str | None, told: dict[str, Any],
        before: Served | None = None,
    ) -> None:  # fmt: skip
        """`before`: a run that says what iterations take, where no preset does."""
        self.requests, self.facts = requests, facts
        self.tokens = list(map(tokens_of, requests))
        self.now_s = 0.0
        self.found, self.before = Served(), before
        self.lanes = Lanes()
        self.sampled: dict[str, int] = {}
        self.pending: list[tuple[Any, dict[str, int], float]] = []
        self.core = EngineCore(self._config(scheduler, told), self._executor(), log_stats=True)
        self.scheduler = self.core.scheduler
        self.driver = getattr(self.scheduler, "driver", None)
        self.scheduler.clock = lambda: self.now_s
        if self.driver is not None and not facts.async_scheduling:
            cost, limits = self.driver.engine.scheduler.deployment.cost, self.driver.engine.scheduler.limits
            self.pricer = Pricer(
                cost, self.lanes, lambda *_: None, layers=1, num_groups=1, block_bytes=limits.block_bytes
            )
        preempt = self.scheduler._preempt_request

        def preempted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.found.preempted.append(int(request.request_id))
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = preempted

    def _config(self, scheduler: str | None, told: dict[str, Any]) -> VllmConfig:
        facts = self.facts
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            model = ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, max_model_len=facts.max_model_len,
                dtype="float16", seed=0,
            )  # fmt: skip
        scheduling = SchedulerConfig(
            max_model_len=facts.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=facts.max_num_seqs,
            policy=facts.options["scheduling_policy"],
            max_num_batched_tokens=facts.max_num_batched_tokens,
            enable_chunked_prefill=True,
            async_scheduling=facts.async_scheduling,
            **{name: value for name, value in facts.options.items() if name != "scheduling_policy"},
            scheduler_cls=scheduler,
        )
        cache = CacheConfig(
            block_size=BLOCK,
            enable_prefix_caching=facts.enable_prefix_caching,
            num_gpu_blocks_override=facts.num_gpu_blocks + 1,
        )
        return VllmConfig(
            model_config=model,
            scheduler_config=scheduling,
            cache_config=cache,
            device_config=DeviceConfig(device="cpu"),
            additional_config={"kvtwin": told},
        )

    def _executor(self) -> type[Executor]:
        core = self

        class Pretended(Executor):
            def _init_executor(self) -> None:
                pass

            def check_health(self) -> None:
                pass

            def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
                spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
                answers = {
                    "get_kv_cache_spec": [{"layer": spec}],
                    "get_supported_kv_cache_layouts": [["NHD"]],
                    "determine_available_memory": [1 << 40],
                    "compile_or_warm_up_model": [],
                }
                return answers.get(method, [None])

            def execute_model(self, output: Any, non_block: bool = False) -> Any:
                future: Future[ModelRunnerOutput | None] = Future()
                future.set_result(core.launch(output))
                return future

            def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
                output, sampling, end_s = core.pending.pop(0)
                later = Later(lambda: core.finish(output, sampling, end_s))
                return later if non_block else later.result()

        return Pretended

    # -- the device ----------------------------------------------------------------------------------------------------

    def launch(self, output: Any) -> ModelRunnerOutput | None:
        """An iteration begins, as soon as the one before has ended."""
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return NOTHING
        if self.before is not None:
            end_s = self.before.steps[len(self.found.steps)][0]
        elif self.facts.async_scheduling:
            end_s = self.driver.ends_s
        else:
            end_s = self.pricer.step(self.driver.latest, self.now_s).end_s
        host_free_s = self.before.host_free_s[len(self.found.steps)] if self.before else self.driver.host_free_s
        self.found.host_free_s.append(host_free_s)
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.found.steps.append((end_s, [(int(key), tokens) for key, tokens in scheduled.items()], free))
        assert len(self.found.steps) < MOST_STEPS, "a request waits for ever"
        sampling = {}
        for key in scheduled:
            if not self.scheduler.requests[key].is_prefill_chunk:
                sampling[key] = self.sampled.get(key, 0)
                self.sampled[key] = sampling[key] + 1
        self.pending.append((output, sampling, end_s))
        return None

    def finish(self, output: Any, sampling: dict[str, int], end_s: float) -> ModelRunnerOutput:
        """It has ended."""
        self.now_s = max(self.now_s, end_s)
        keys = list(output.num_scheduled_tokens)
        tokens = []
        for key in keys:
            number = int(key)
            asked = self.requests[number]
            # What is sampled beyond the last is dropped.
            which = min(sampling[key], asked.output_tokens - 1) if key in sampling else None
            tokens.append([] if which is None else [self.tokens[number][asked.prompt_tokens + which]])
        return ModelRunnerOutput(
            req_ids=keys, req_id_to_index={key: i for i, key in enumerate(keys)}, sampled_token_ids=tokens
        )

    # -- the front end -------------------------------------------------------------------------------------------------

    def run(self) -> Served:
        """Serve the whole workload."""
        following, idle = 0, 0
        while True:
            num_steps = len(self.found.steps)
            if num_steps and self.facts.async_scheduling:
                self.now_s = max(self.now_s, self.found.host_free_s[-1])
            while following < len(self.requests) and self.requests[following].arrival_s <= self.now_s + TIE_S:
                self._arrive(following)
                following += 1
            if self.scheduler.has_requests() or self.core.batch_queue:
                outputs, _ = self.core.step_fn()
                for out in (one for each in (outputs or {}).values() for one in each.outputs):
                    if out.finish_reason is not None:
                        self.found.finish_s[int(out.request_id)] = self.now_s
                idle = idle + 1 if len(self.found.steps) == num_steps and not self.core.batch_queue else 0
                if idle < 4:
                    continue
            if following == len(self.requests):
                assert not self.scheduler.has_unfinished_requests(), "nothing is computed, and requests wait"
                return self.found
            idle, self.now_s = 0, max(self.now_s, self.requests[following].arrival_s)

    def _arrive(self, number: int) -> None:
        asked = self.requests[number]
        request = Request(
            request_id=f"{number:06d}",
            prompt_token_ids=self.tokens[number][: asked.prompt_tokens],
            pooling_params=None,
            arrival_time=asked.arrival_s,
            priority=asked.priority,
            sampling_params=SamplingParams(max_tokens=asked.output_tokens, ignore_eos=True),
            block_hasher=self.core.request_block_hasher,
        )
        self.core.add_request(request)
