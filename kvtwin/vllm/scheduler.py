"""`Preset`, `Adaptive`: vLLM 0.33's scheduler, whose steps compute what a preset of kvtwin plans.

vLLM's own `schedule()` carries the plan out, so that what it sends to the workers, counts and logs is its own: it is
shown the requests of the plan alone, told how many tokens each of them gets, and handed the blocks that were taken for
them when that was decided. Prefix hits, block tables, sampling, stops, grammars and metrics are vLLM's.
"""

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.config import VllmConfig  # pyright: ignore[reportMissingImports]
from vllm.outputs import RequestError  # pyright: ignore[reportMissingImports]
from vllm.v1.core.kv_cache_manager import KVCacheBlocks  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.interface import PauseState  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.output import SchedulerOutput  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig  # pyright: ignore[reportMissingImports]
from vllm.v1.outputs import ModelRunnerOutput  # pyright: ignore[reportMissingImports]
from vllm.v1.request import Request, RequestStatus  # pyright: ignore[reportMissingImports]

from kvtwin.vllm.driver import Driver
from kvtwin.vllm.settings import EngineFacts, make_setup, read_settings
from sim.errors import InvariantError, UserError

BY_NAME = ("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "watermark")
"""Options of vLLM's `SchedulerConfig` that are ours by the same names."""


class Preset(AsyncScheduler):
    """The preset that `--additional-config '{"kvtwin": {"policy": ...}}'` names, scheduled ahead or serially."""

    default_policy: ClassVar[str | None] = None
    clock = staticmethod(time.time)
    """Of the times of arrival that vLLM's front end notes."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        check_config(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        if self.max_num_encoder_input_tokens:
            raise UserError("kvtwin.vllm: images and sound are not planned for; start vLLM with --language-model-only")
        self._ahead = vllm_config.scheduler_config.async_scheduling
        told = read_settings(vllm_config.additional_config)
        setup = make_setup(told, facts_of(vllm_config, self.block_size), self.default_policy)
        self.driver = Driver(
            setup, manager=self.kv_cache_manager, preempt=self._preempt_now, clock=lambda: self.clock()
        )
        # The driver has taken the manager's own; the steps of vLLM are handed what it took.
        self.kv_cache_manager.allocate_slots = self._given_blocks
        self._step_tokens: dict[str, int] = {}
        self._no_blocks = self.kv_cache_manager.empty_kv_cache_blocks
        # Requests whose grammar is being compiled.
        self._unready: list[Request] = []

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if reason := _unservable(request):
            self._refuse(request, reason)
        elif request.status == RequestStatus.WAITING:
            self.driver.add(request)
        else:
            self._unready.append(request)

    def _refuse(self, request: Request, reason: str) -> None:
        """End a request in error, with the next outputs."""
        self.grammar_compile_error_reqs[request.request_id] = RequestError(code="validation_error", message=reason)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        self._unready = [request for request in self._unready if not request.is_finished()]
        self.driver.drop(ended)
        return ended

    def _preempt_now(self, request: Request) -> None:
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    # -- a step --------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        for request in self._unready[:]:
            if self._handle_blocked_waiting_request(request):
                self._unready.remove(request)
                self.deferred_waiting.discard(request)
                self.driver.add(request)
        if self._pause_state == PauseState.PAUSED_ALL:
            return self._carry_out({}, [])
        step = self.driver.schedule()
        while self.driver.refused:
            self._refuse(*self.driver.refused.pop())
        return self._carry_out(step.num_tokens, step.started)

    def _carry_out(self, num_tokens: dict[str, int], started: list[Request]) -> SchedulerOutput:
        """A step of vLLM's own, which sees the requests that have tokens in it and no others."""
        running, waiting = self.running, self.waiting
        chosen = [request for request in running if request.request_id in num_tokens]
        self._step_tokens = num_tokens
        self.running, self.waiting = list(chosen), FCFSRequestQueue(started)
        for request in started:
            self._count_hit(request)
        output = super().schedule()
        if output.num_scheduled_tokens != num_tokens:
            raise InvariantError(f"planned {num_tokens}, and vLLM scheduled {output.num_scheduled_tokens}")
        self.running = running + self.running[len(chosen) :]
        for request in started:
            waiting.remove_request(request)
        self.waiting = waiting
        return output

    def _count_hit(self, request: Request) -> None:
        """As vLLM counts those of a request that it looks up itself; it takes one that has any for looked up."""
        if hit := request.num_computed_tokens:
            self.kv_cache_manager.record_prefix_cache_stats(request, hit)
            if request.prefill_stats and not request.num_preemptions:
                request.prefill_stats.set(
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_local_cached_tokens=hit,
                    num_external_cached_tokens=0,
                )

    def _get_local_prefix_cache_hit(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """Asked of those that hit nothing."""
        return self._no_blocks, 0, 0, False

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The last word on the tokens of a request in a step."""
        return self._step_tokens[request.request_id]

    def _given_blocks(self, request: Request, num_new_tokens: int, **asked: Any) -> KVCacheBlocks:  # noqa: ANN401
        """In place of `KVCacheManager.allocate_slots`: what the plan has taken."""
        return self.driver.memory.given(request.request_id) or self._no_blocks

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._ahead:
            super()._update_after_schedule(scheduler_output)
        else:
            Scheduler._update_after_schedule(self, scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:  # noqa: ANN401
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_scheduled_tokens:
            self.driver.came()
        return outputs

    # -- what the plan does not know -----------------------------------------------------------------------------------

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state == PauseState.PAUSED_NEW:
            raise UserError("kvtwin.vllm: the engine pauses whole, not for new requests alone; pause it with mode=keep")
        super().set_pause_state(pause_state)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests and self.running:
            raise UserError("kvtwin.vllm: requests that run keep their KV; reset the prefix cache when none runs")
        return super().reset_prefix_cache(reset_running_requests, reset_connector)


class Adaptive(Preset):
    """`adaptive` without a host to park on."""

    default_policy = "adaptive"


def check_config(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """UserError where vLLM is asked for what a plan does not know."""
    groups = kv_cache_config.kv_cache_groups
    plain = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
    parallel = config.parallel_config
    asked = {
        "--speculative-config": config.speculative_config is not None,
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "--ec-transfer-config": config.ec_transfer_config is not None,
        "--enable-lora": config.lora_config is not None,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--prefill-schedule-interval": config.scheduler_config.prefill_schedule_interval > 1,
        "--max-num-active-seqs": config.scheduler_config.max_num_active_seqs is not None,
        "a model of another task than text": config.model_config.runner_type != "generate",
        "a model that is an encoder and a decoder": config.model_config.is_encoder_decoder,
        "a model with layers that do not keep the whole context": not plain,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise UserError(f"kvtwin.vllm: {what} is not planned for; leave it out, or leave --scheduler-cls out")


def facts_of(config: VllmConfig, block_size: int) -> EngineFacts:
    """What vLLM's configuration says to the preset."""
    scheduler, cache = config.scheduler_config, config.cache_config
    options = {name: getattr(scheduler, name) for name in BY_NAME}
    options["scheduling_policy"] = scheduler.policy
    options["scheduler_reserve_full_isl"] = scheduler.scheduler_reserve_full_isl
    return EngineFacts(
        model=config.model_config.model,
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        num_gpu_blocks=cache.num_gpu_blocks - 1,
        block_size=block_size,
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        enable_prefix_caching=cache.enable_prefix_caching,
        async_scheduling=scheduler.async_scheduling,
        options=options,
    )


def _unservable(request: Request) -> str:
    """Why a request is not served; empty where it is."""
    if request.resumable:
        return "input that streams is not planned for"
    if request.has_encoder_inputs:
        return "images and sound are not planned for"
    if request.lora_request is not None or request.pooling_params is not None:
        return "adapters and pooling are not planned for"
    return ""
