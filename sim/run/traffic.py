"""The requests of a scenario: read or generated, and sent as they arrive or in a closed loop."""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Protocol

from sim.clock.arrivals import Arrivals
from sim.clock.tokeniser import Tokeniser
from sim.options.scenario import READING, Scenario
from sim.parts.batching.lora_options import LoraOptions
from sim.run.prepare import Setup
from sim.systems.builder import STORED
from traces import readers, transforms
from traces.hash_ids import prefixes
from traces.request import Request
from traces.workloads import ABOUT

DEFAULT_WORKLOAD_PROMPTS = 1000


class ReadTrace(Protocol):
    """A trace's requests in order of arrival: `traces.readers.Trace`, or a copy in memory."""

    @property
    def left_out(self) -> Collection[str]:
        """What of the file, as far as it was read, is in no request: sentences."""
        ...

    @property
    def found(self) -> Collection[str]:
        """Of `images` and `lora`, what a request that was read so far has."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """The requests from the first."""
        ...


def open_trace(scenario: Scenario) -> readers.Trace:
    """The scenario's trace, to be read with its options."""
    reading = {name: value for name in READING if (value := getattr(scenario, name)) is not None}
    needs_times = scenario.request_rate is None and scenario.max_concurrency is None
    trace = readers.open_trace(scenario.trace or "", format=scenario.trace_format, needs_times=needs_times, **reading)
    trace.adapters_apart = True
    return trace


def requests_of(setup: Setup, trace: ReadTrace | None = None) -> Iterable[Request]:
    """The requests of a run, whose warnings get what should be known of them. `trace`: the scenario's, read already."""
    if trace is None and setup.scenario.trace is not None:
        trace = open_trace(setup.scenario)
    requests = traffic(setup.scenario, setup.warnings, trace)
    if trace is not None:
        requests = chain(requests, _not_as_asked(trace, setup))
    elif _serves_adapters(setup):
        setup.warnings.append(NO_ADAPTERS)
    if not setup.limits.enable_prefix_caching and setup.policy.names["memory"] != STORED:
        requests = note_shared_prefixes(requests, setup.warnings)
    return requests


def traffic(scenario: Scenario, warnings: list[str] | None = None, trace: ReadTrace | None = None) -> Iterable[Request]:
    """The scenario's requests, read or generated as they are needed; `warnings` get what a trace's reader left out."""
    requests: Iterable[Request]
    if scenario.trace is not None:
        requests = trace = trace or open_trace(scenario)
        if scenario.num_prompts is not None:
            requests = transforms.head(requests, scenario.num_prompts)
        if warnings is not None:
            requests = chain(requests, _left_out(trace, warnings))
        if scenario.request_rate is not None:
            requests = transforms.at_request_rate(
                requests, scenario.request_rate, burstiness=scenario.burstiness, seed=scenario.seed
            )
    else:
        requests = _generated(scenario)
    if scenario.clip is not None:
        requests = transforms.clip(requests, scenario.clip)
    if scenario.rate_scale != 1.0:
        requests = transforms.scale_rate(requests, scenario.rate_scale)
    return requests


WORTH_SAYING = 0.01
NO_ADAPTERS = "--enable-lora: no request names an adapter (lora); their memory is taken all the same"


class _Sharing:
    """How many of the prompt tokens told so far stand in earlier prompts or answers."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], int] = {}
        self.shared = self.total = 0

    @property
    def share(self) -> float:
        return self.shared / self.total if self.total else 0.0

    def add(self, request: Request) -> None:
        self.total += request.prompt_tokens
        if request.hash_ids:
            num_seen, ids = len(self._seen), request.hash_ids
            keys = prefixes(ids + request.output_hash_ids, self._seen)
            known = sum(key <= num_seen for key in keys[: len(ids)])
            self.shared += min(known * request.hash_block_tokens, request.prompt_tokens - 1)


def shared_prefix_share(requests: Iterable[Request]) -> float:
    """Share of the prompt tokens that an endless prefix cache would have."""
    sharing = _Sharing()
    for request in requests:
        sharing.add(request)
    return sharing.share


def note_shared_prefixes(requests: Iterable[Request], warnings: list[str]) -> Iterator[Request]:
    """The requests; at their end `warnings` get how much of their prompts a prefix cache would have had."""
    sharing = _Sharing()
    for request in requests:
        sharing.add(request)
        yield request
    if sharing.share > WORTH_SAYING:
        warnings.append(
            f"{sharing.share:.0%} of the prompt tokens stand in earlier prompts or answers (hash_ids) and were "
            "computed again: --enable-prefix-caching keeps them, or a policy that does (vllm-v1)"
        )


def _left_out(trace: ReadTrace, warnings: list[str]) -> Iterator[Request]:
    """No request: behind the last one this says what the trace's reader left out."""
    warnings += trace.left_out
    yield from ()


def _not_as_asked(trace: ReadTrace, setup: Setup) -> Iterator[Request]:
    """No request: at the end of a trace this says what of its adapters and images is not simulated."""
    enabled, named = _serves_adapters(setup), "lora" in trace.found
    if named and not enabled:
        setup.warnings.append(
            "requests name adapters (lora): their cached prompts are apart, and that is all; --enable-lora of vllm-v1 "
            "says how many run at once (--max-loras) and takes their memory"
        )
    elif enabled and not named:
        setup.warnings.append(NO_ADAPTERS)
    if "images" in trace.found and not setup.policy.reads_images:
        setup.warnings.append(
            "images are read as text, which no encoder computes (prefix caches tell them apart): "
            "--policy vllm-v1:max-tokens-per-image=N schedules them"
        )
    yield from ()


def _serves_adapters(setup: Setup) -> bool:
    return setup.policy.options(LoraOptions).enable_lora


def _generated(scenario: Scenario) -> Iterator[Request]:
    from traces.generators import generate  # noqa: PLC0415 - numpy is slow to import and replays do not need it

    own = {name: value for name in ABOUT if (value := getattr(scenario, name)) is not None}
    return generate(
        scenario.workload or "",
        num_prompts=scenario.num_prompts or DEFAULT_WORKLOAD_PROMPTS,
        request_rate=scenario.request_rate,
        burstiness=scenario.burstiness,
        seed=scenario.seed,
        input_len=scenario.input_len,
        output_len=scenario.output_len,
        **own,
    )


def arrivals_of(
    scenario: Scenario,
    requests: Iterable[Request],
    front_end_s: float = 0.0,
    front_end_s_per_token: float = 0.0,
    sent_s: dict[int, float] | None = None,
    num_tokenisers: int = 1,
) -> Arrivals:
    """The requests as they reach the engine.

    They are sent as they arrive, or in the scenario's closed loop, whose clients hear of an end `front_end_s` later.
    Each of `num_tokenisers` takes `front_end_s_per_token` for a token of a prompt; `sent_s` gets when each request was
    sent, by id.
    """
    if scenario.max_concurrency is None and not scenario.closed_sessions:
        sent = Arrivals(requests)
    else:
        from sim.clock.closed_loop import ClosedLoop  # noqa: PLC0415 - most runs are open

        by_session = scenario.closed_sessions
        sent = ClosedLoop(requests, scenario.max_concurrency, by_session=by_session, front_end_s=front_end_s)
    return Tokeniser(sent, front_end_s_per_token, num_tokenisers, sent_s) if front_end_s_per_token else sent
