"""`Result`: what a run leaves in result.json, a superset of what `vllm bench serve --save-result` writes.

Fields have the names and the order of the file, which `docs/results.md` explains one by one. None is null there; UNSET
fields are absent. Times are in s or, where the name says so, in ms.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from sim.results.parts import (
    Counts,
    EngineUse,
    LanesUse,
    LatencyParts,
    Machine,
    ResolvedScenario,
    TierUse,
    UsedEngineProfile,
    UsedProfile,
    Versions,
)

Backend = Literal["kvtwin-sim", "kvtwin-live"]
"""Simulated, or executed."""


class Result(Struct, kw_only=True, frozen=True):
    """One run: its statistics, what it counted and what it was made of."""

    backend: Backend
    """Which clock the run was on."""
    model_id: str
    """Name of the model."""
    policy: str
    """Label of the policy: its name with the options that were given."""
    num_prompts: int
    """Requests that ended, completed or ignored."""
    request_rate: float | None
    """Requests/s asked for; None: the trace's own arrivals, infinite: all at once ("inf" in the file)."""
    complete: bool
    """Whether the run came to its end: neither interrupted nor in error."""
    error: str | UnsetType = UNSET
    """Why the run ended early; absent unless it failed."""

    duration: float
    """First arrival to last token of what completed, s."""
    completed: int
    """Requests that got all their tokens."""
    ignored: int
    """Requests given up: they can never fit, were cancelled or failed."""
    failed: int
    """The same number under vLLM's name: requests that did not complete."""
    total_input_tokens: int
    """Prompt tokens of the requests completed."""
    total_output_tokens: int
    """Tokens that the requests completed were given."""
    request_throughput: float
    """Requests completed over duration, 1/s."""
    output_throughput: float
    """Output tokens over duration, 1/s."""
    total_token_throughput: float
    """Prompt and output tokens over duration, 1/s."""
    max_output_tokens_per_s: int | UnsetType = UNSET
    """Most tokens that came within one of the seconds since the first arrival; only where every token's time was kept,
    and of requests completed alone."""
    max_concurrent_requests: int
    """Most requests in flight at once, of those completed: from arrival up to their last token."""
    request_goodput: float | None
    """Requests that met every SLO over duration, 1/s; None without SLOs."""
    goodput_attainment: float | None
    """Requests that met every SLO over those that ended, 0 to 1; None without SLOs or requests."""

    # Time to first token, ms: first token minus arrival. None, as in all that follow, where there is no value.
    mean_ttft_ms: float | None
    median_ttft_ms: float | None
    std_ttft_ms: float | None
    p50_ttft_ms: float | None
    p90_ttft_ms: float | None
    p95_ttft_ms: float | None
    p99_ttft_ms: float | None
    # Time per output token, ms: of each request of two tokens or more, last minus first token over the gaps between.
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    std_tpot_ms: float | None
    p50_tpot_ms: float | None
    p90_tpot_ms: float | None
    p95_tpot_ms: float | None
    p99_tpot_ms: float | None
    # End-to-end latency, ms: last token minus arrival.
    mean_e2el_ms: float | None
    median_e2el_ms: float | None
    std_e2el_ms: float | None
    p50_e2el_ms: float | None
    p90_e2el_ms: float | None
    p95_e2el_ms: float | None
    p99_e2el_ms: float | None
    # Queueing, ms: first scheduled minus arrival, the part of TTFT that is not prefill.
    mean_queue_ms: float | None
    median_queue_ms: float | None
    std_queue_ms: float | None
    p50_queue_ms: float | None
    p90_queue_ms: float | None
    p95_queue_ms: float | None
    p99_queue_ms: float | None
    # Inter-token latency, ms: every gap between two tokens of a request, all requests together.
    mean_itl_ms: float | None
    median_itl_ms: float | None
    std_itl_ms: float | None
    p50_itl_ms: float | None
    p90_itl_ms: float | None
    p95_itl_ms: float | None
    p99_itl_ms: float | None
    itl_percentiles: Literal["exact", "from bins, within 0.01 %"]
    """How the percentiles of the inter-token latency were found."""

    latency_parts: LatencyParts | UnsetType = UNSET
    """Where the mean latency went; absent where no time series was kept, or where it cannot be told."""

    makespan_s: float
    """Time of the last token, s from the clock's start."""
    num_iterations: int
    """Iterations of the engine, or of all engines together."""
    num_preemptions: int
    """Times a sequence lost its place among those decoding, or its KV."""
    counters: Counts
    """What else was counted."""
    lanes: LanesUse
    """How long each lane was in use; of several engines the mean."""
    tiers: list[TierUse] | UnsetType = UNSET
    """Tiers below the GPU that keep prefixes, the nearest first; absent where there is none."""
    engines: list[EngineUse] | UnsetType = UNSET
    """Each engine's share; absent where there is one."""
    warnings: list[str]
    """What a reader of the figures should know, a sentence each."""
    scenario: ResolvedScenario
    """What was asked for, and what it resolved to."""
    profile: UsedProfile
    """The constants that priced the run."""
    engine_profile: UsedEngineProfile | UnsetType = UNSET
    """What the engine cost beside the GPU; absent where prices are all there is."""
    versions: Versions
    """What produced the file."""
    machine: Machine | UnsetType = UNSET
    """What executed the run; absent from simulated ones."""

    decisions_sha256: str | UnsetType = UNSET
    """Of every step's decisions, a line each as vLLM's own schedulers are compared; only where every token's time was
    kept and the batching tells its decisions."""

    per_request: str | UnsetType = UNSET
    """Where the arrays below went; present only where there are too many requests for them."""
    # Arrays, one element a request that ended, in order of the request ids; absent where `per_request` is present.
    request_ids: list[int] | UnsetType = UNSET
    """Place in the trace, from 0."""
    start_times: list[float] | UnsetType = UNSET
    """Arrival, s."""
    input_lens: list[int] | UnsetType = UNSET
    """Prompt tokens."""
    output_lens: list[int] | UnsetType = UNSET
    """Output tokens; 0 of an ignored request."""
    queue_times: list[float] | UnsetType = UNSET
    """Arrival to first scheduled, s."""
    ttfts: list[float] | UnsetType = UNSET
    """Arrival to first token, s; 0 of an ignored request, as all times."""
    latencies: list[float] | UnsetType = UNSET
    """Arrival to last token, s."""
    errors: list[str] | UnsetType = UNSET
    """Why the request was ignored or failed; empty of one completed."""
    itls: list[list[float]] | UnsetType = UNSET
    """Gaps between tokens, s; only where every token's time was kept."""


class Bounds(Struct, kw_only=True, frozen=True):
    """What no scheduler exceeds, and runs with one limit of the machine lifted."""

    goodput_bound: float | None = None
    """Requests a second that meet their SLOs under any scheduler, at most; None where it was not asked for, or there
    is none."""
    bound_shares: dict[str, float] = {}
    """Goodput over the bound, by label."""
    lifted: dict[str, dict[str, dict[str, float | None]]] = {}
    """Metrics by label, then by the limit lifted (infinite PCIe, infinite memory, known lengths)."""


class Comparison(Bounds, kw_only=True, frozen=True):
    """What comparison.json holds of several results; metrics are those of `sim.results.report.METRICS`."""

    baseline: str | None
    """Label of the first policy; None without any."""
    policies: list[str]
    """Labels in order."""
    metrics: dict[str, dict[str, float | None]]
    """By label, then by key; None where the run has no such value."""
    ratios_to_baseline: dict[str, dict[str, float | None]]
    """Value over the first policy's, by label, then by key; None where either is missing or the first is 0."""
    overloaded: list[str]
    """Labels of the policies whose queue grew to the end."""
    sentences: list[str]
    """What differs from the first policy, a paragraph each further policy."""
    profiles: dict[str, UsedProfile]
    """By label."""
