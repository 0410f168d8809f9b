"""A scenario on the real clock: the same set-up, engine and result as a simulated one, executed by torch."""

import signal
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import processor

import torch

from gpu_runtime.device import TorchDevice
from gpu_runtime.device_memory import DeviceMemory
from gpu_runtime.instance import LiveInstance, Observer
from gpu_runtime.kv.copy_spans import CopySpans
from gpu_runtime.kv.stored import stored_dtype
from gpu_runtime.machine.fastest_kernels import fastest
from gpu_runtime.machine.live_memory import check_weights, telling_shortage
from gpu_runtime.machine.threads import use_fastest_threads
from gpu_runtime.measured.live_timeline import WARNING, Profiler
from gpu_runtime.model.backend import activate_flash, check_backend
from gpu_runtime.model.capture_sizes import capture_sizes, piece_sizes
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.flashinfer_kernels import build_all, build_kernels
from gpu_runtime.model.fp8 import check_fp8
from gpu_runtime.ranks import Group
from gpu_runtime.tokens.trace_prompts import TracePrompts
from sim.cost.pricing import Lanes
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.errors import UserError
from sim.parts.stage.speculative import Speculative
from sim.results.metrics import TableSink
from sim.results.sections import Machine
from sim.run.prepare import Setup
from sim.run.runs import Recording, Run, build_engine
from sim.run.traffic import arrivals_of, traffic
from sim.specs.json_file import built_in_names
from sim.specs.models import BUILT_IN, load_model
from traces.errors import TraceError
from traces.request import Request

DTYPES = {"half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
NOT_DRAWN = "acceptance rates are not read by a run on a device: a draft is accepted where the model chooses its token"


@dataclass(frozen=True)
class LiveOptions:
    """What a live run needs beside its scenario.

    Attributes:
        device: cuda or cpu.
        weights: folder with config.json and *.safetensors; None: random weights of the scenario's model and seed.
        seed: of random weights and of prompts.
        attention_backend: what `--attention-backend` takes.
    """

    device: str
    weights: Path | None = None
    seed: int = 0
    attention_backend: str = "auto"


def check_device(device: str) -> None:
    """UserError unless torch can use the device; says why it cannot."""
    if device == "cpu":
        return
    if torch.version.cuda is None:
        raise UserError(
            f"--device cuda: torch {torch.__version__} is a build without CUDA: install another, or use --device cpu"
        )
    try:
        # The first that asks the driver: there may be no device, an old driver, or a process that has it to itself.
        torch.cuda.mem_get_info()
    except RuntimeError as error:
        raise UserError(
            f"--device cuda: {str(error).splitlines()[0].rstrip('.')}; mend that, or use --device cpu"
        ) from error


def check_gpus(tp: int, device: str) -> None:
    """UserError unless each of `tp` ranks has a GPU of its own; on a CPU they share it."""
    if device == "cuda" and torch.cuda.device_count() < tp:
        raise UserError(f"--tp {tp}: {torch.cuda.device_count()} CUDA devices are here: give as many at most")


def default_dtype(device: str) -> str:
    """What `--dtype auto` computes in, a key of `DTYPES`."""
    if device == "cpu":
        return "float32"
    # Before Ampere, bfloat16 is emulated.
    return "bfloat16" if torch.cuda.get_device_capability()[0] >= 8 else "float16"


def load_decoder(model: str, dtype: str, options: LiveOptions, group: Group | None = None) -> Decoder:
    """The model with its weights on the device.

    Args:
        model: built-in name or config.json, used unless `options.weights` names a checkpoint.
        dtype: a key of `DTYPES`.
        group: load what this rank has of it.

    Raises:
        UserError: a model that the runtime does not compute, or whose weights do not fit; a backend that cannot.
    """
    check_device(options.device)
    built_in = options.weights is None and model.lower() in built_in_names(BUILT_IN)
    config = DecoderConfig.from_spec(load_model(model)) if built_in else DecoderConfig.from_hf(options.weights or model)
    check_backend(options.attention_backend, options.device, DTYPES[dtype], config)
    part = config if group is None else config.part(group.size)
    check_weights(part, DTYPES[dtype], options.device)
    if config.fp8:
        widths = {"hidden": part.hidden_size, "of a rank's queries": part.q_size, "MLP columns": part.intermediate_size}
        check_fp8(config.name, widths, torch.device(options.device))
    if options.device == "cuda":
        activate_flash(torch.device(options.device))
    if options.device == "cpu" and group is None:
        use_fastest_threads(config, DTYPES[dtype])
    if options.weights is not None:
        decoder = Decoder.from_safetensors(options.weights, options.device, DTYPES[dtype], group)
    else:
        decoder = Decoder.random(config, device=options.device, dtype=DTYPES[dtype], seed=options.seed, group=group)
    name, config = options.attention_backend, decoder.config
    if name == "fastest":
        kernels = fastest(decoder, build_all(config, decoder.dtype, decoder.device))
    else:
        kernels = build_kernels(name, config.num_heads, decoder.dtype, decoder.device)
    decoder.compute_with(kernels)
    return decoder


def build_device(
    scheduler: Scheduler, decoder: Decoder, options: LiveOptions, kv_cache_dtype: str = "auto"
) -> TorchDevice:
    """The device that executes a scheduler's plans, with KV of the type that `--kv-cache-dtype` names.

    Raises:
        ValueError: the scheduler's layer groups do not divide the decoder's layers evenly.
        UserError: a memory whose plans cannot be executed, or pools that do not fit.
    """
    limits, on_cuda = scheduler.limits, options.device == "cuda"
    prompts = TracePrompts(decoder.config.vocab_size, options.seed)
    dtype = stored_dtype(kv_cache_dtype, decoder.dtype, options.device)
    with telling_shortage():
        memory = DeviceMemory(decoder, scheduler, torch.device(options.device), dtype)
    return TorchDevice(
        memory,
        prompt_of=prompts,
        on_token=prompts.hear,
        stays_awake=True,
        graph_batch_sizes=capture_sizes(limits.max_num_seqs) if on_cuda else (),
        piece_sizes=piece_sizes(limits.max_num_seqs, limits.max_num_batched_tokens) if on_cuda else (),
    )


def recorder(lanes: Lanes, watch: Observer | None, copies: CopySpans, profiler: Profiler | None = None) -> Observer:
    """What keeps the lanes, the time series and the profile of a run up to date, iteration by iteration."""

    def observe(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        lanes.compute.run(start_s, times.end_s - start_s, plan.kind)
        record_copies(lanes, copies)
        if watch is not None:
            watch(plan, start_s, times)
        if profiler is not None:
            profiler.step()

    return observe


def record_copies(lanes: Lanes, copies: CopySpans) -> None:
    """Put the copies that have ended on their lanes."""
    for span in copies.take():
        lanes.of(span.direction).run(span.start_s, span.end_s - span.start_s, "KV copy")


def check_lengths(setup: Setup, config: DecoderConfig) -> None:
    """UserError for a request that would outgrow the model's positions, under a policy that does not stop there.

    Before `perform`, which computes whatever it is given. Reads the traffic, if need be, as far as it can be read.
    """
    if build_engine(setup, None, Recording()).scheduler.batching.stops_at_max_model_len:
        return
    positions = config.max_position_embeddings
    # A trace that turns out bad is served as far as it goes.
    with suppress(TraceError):
        for request in traffic(setup.scenario):
            length = request.most_tokens
            if request.prompt_tokens <= setup.limits.max_model_len and length > positions:
                raise UserError(
                    f"request {request.request_id}: {request.prompt_tokens} + {length - request.prompt_tokens} tokens, "
                    f"{config.name} has {positions} positions and the policy does not stop there: "
                    f"give --clip {positions}, or a policy of vLLM v1's"
                )


def perform(
    setup: Setup,
    requests: Iterable[Request],
    table: TableSink | None,
    keep: Recording,
    decoder: Decoder,
    options: LiveOptions,
) -> Run:
    """Serve the requests as they arrive, in real time; an interrupt ends the run and keeps what is finished.

    Other ranks of the decoder's group serve them with it, and end with an interrupt.
    """
    parts = build_engine(setup, table, keep)
    stage = parts.scheduler.stage
    if isinstance(stage, Speculative) and stage.acceptance is not None and stage.acceptance.chances:
        setup.warnings.append(NOT_DRAWN)
    device = build_device(parts.scheduler, decoder, options, setup.scenario.kv_cache_dtype)
    profiler = Profiler(device.memory.device) if keep.timeline else None
    if profiler is not None:
        setup.warnings.append(WARNING)
    observe = recorder(parts.lanes, parts.observer, device.memory.engine.spans, profiler)
    arrivals = arrivals_of(setup.scenario, requests)
    ended = arrivals.ended if arrivals.hears_ends else None
    instance = LiveInstance(parts.engine, device, arrivals, observer=observe, ended=ended)
    run = Run(engines=[parts], instances=[instance], backend="kvtwin-live", machine=describe_machine(decoder))
    group = decoder.group
    try:
        with torch.inference_mode(), nullcontext() if group is None else group.serving(setup):
            with telling_shortage():
                device.warm_up()
            if profiler is None:
                device.start()
            else:
                profiler.start(device.start)
            instance.serve()
        device.memory.check()
        device.memory.check_counts()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run.interrupted = True
    except TraceError as error:
        run.error = str(error)
    finally:
        device.close()
        record_copies(parts.lanes, device.memory.engine.spans)
        if profiler is not None:
            run.trace_events = profiler.events()
    return run


def describe_machine(decoder: Decoder) -> Machine:
    """What executes a decoder: device, library, type of the weights."""
    cuda, kernels = decoder.device.type == "cuda", decoder.kernels
    attention = kernels.attention_of(decoder.dtype, decoder.config.head_dim, decoder.device)
    return Machine(
        device=torch.cuda.get_device_name(decoder.device) if cuda else processor() or "CPU",
        torch=version("torch"),
        dtype=str(decoder.dtype).removeprefix("torch."),
        threads=str(torch.get_num_threads()),
        attention=f"{attention} ({kernels.why})" if kernels.why else attention,
    )
