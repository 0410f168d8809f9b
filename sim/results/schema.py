"""`Result`: what a run leaves in result.json, a superset of what `vllm bench serve --save-result` writes.

Fields have the names and the order of the file, which `docs/results.md` explains one by one. None is null there; UNSET
fields are absent. Times are in s or, where the name says so, in ms.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from sim.results.sections import (
    Accuracy,
    Counts,
    EngineUse,
    LanesUse,
    LatencyParts,
    Machine,
    ResolvedScenario,
    Scaling,
    SLOClass,
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
    """`kvtwin-sim`: simulated; `kvtwin-live`: executed."""
    model_id: str
    """Name of the model."""
    policy: str
    """Label of the policy: its name with the options that were given, as in `layerkv:slo-aware=false`."""
    num_prompts: int
    """Requests that ended: `completed` + `ignored`."""
    request_rate: float | None
    """Requests/s asked for; infinite, in the file the text `inf`: all at once. None: the trace's own arrivals, or the
    workload's default."""
    complete: bool
    """Whether the run came to its end: neither interrupted nor in error."""
    error: str | UnsetType = UNSET
    """Why the run ended early: a bad row of the trace, a failed engine. Absent: no error (an interrupted run has
    none)."""

    duration: float
    """First arrival of any request to last token of any completed, s; 0 if none completed."""
    completed: int
    """Requests that got all their tokens."""
    ignored: int
    """Requests given up: they can never fit, their client left, or what they held was lost."""
    failed: int
    """The same number, under vLLM's name."""
    rejected: int | UnsetType = UNSET
    """Of those ignored, the ones that the policy turned away for their SLOs. Absent: none."""
    total_input_tokens: int
    """Prompt tokens of the requests completed."""
    total_output_tokens: int
    """Output tokens of the requests completed."""
    request_throughput: float
    """`completed` / `duration`, requests/s."""
    output_throughput: float
    """`total_output_tokens` / `duration`, tokens/s."""
    total_token_throughput: float
    """Prompt and output tokens / `duration`, tokens/s."""
    max_output_tokens_per_s: int | UnsetType = UNSET
    """Most tokens of completed requests within one of the seconds since the first of them arrived. Absent: without
    `--save-detailed`."""
    max_concurrent_requests: int
    """Most requests in flight at once, of those completed: from arrival up to their last token."""
    request_goodput: float | None
    """Requests that met every SLO / `duration`, requests/s. None: no SLOs (`--goodput`, or the trace's own)."""
    goodput_attainment: float | None
    """Requests that met every SLO / requests that ended, 0 to 1; an ignored one met none. None: no SLOs, or nothing
    ended."""
    slo_classes: list[SLOClass] | UnsetType = UNSET
    """The same by the SLOs that requests have; `compare` and `report` show each. Absent: all have those of `--goodput`,
    or more than 100 unlike ones."""

    mean_ttft_ms: float | None
    median_ttft_ms: float | None
    std_ttft_ms: float | None
    p50_ttft_ms: float | None
    p90_ttft_ms: float | None
    p95_ttft_ms: float | None
    p99_ttft_ms: float | None
    """Time to first token, ms: first token minus arrival; of a request that is computed again, its first first token.
    None: nothing completed."""
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    std_tpot_ms: float | None
    p50_tpot_ms: float | None
    p90_tpot_ms: float | None
    p95_tpot_ms: float | None
    p99_tpot_ms: float | None
    """Time per output token, ms: (last token - first token) / (tokens - 1) of each request of two tokens or more. None:
    there is none."""
    mean_e2el_ms: float | None
    median_e2el_ms: float | None
    std_e2el_ms: float | None
    p50_e2el_ms: float | None
    p90_e2el_ms: float | None
    p95_e2el_ms: float | None
    p99_e2el_ms: float | None
    """End to end, ms: last token minus arrival. None: nothing completed."""
    mean_queue_ms: float | None
    median_queue_ms: float | None
    std_queue_ms: float | None
    p50_queue_ms: float | None
    p90_queue_ms: float | None
    p95_queue_ms: float | None
    p99_queue_ms: float | None
    """Queueing, ms: first scheduled minus arrival; the rest of TTFT is prefill. From single-precision values. None:
    nothing completed."""
    mean_itl_ms: float | None
    median_itl_ms: float | None
    std_itl_ms: float | None
    p50_itl_ms: float | None
    p90_itl_ms: float | None
    p95_itl_ms: float | None
    p99_itl_ms: float | None
    """Inter-token latency, ms: each gap between two tokens of a request, of all requests together. None: no request has
    two tokens."""
    itl_percentiles: Literal["exact", "from bins, within 0.01 %"]
    """`exact`, or `from bins, within 0.01 %` after a million runs of like iterations."""

    latency_parts: LatencyParts | UnsetType = UNSET
    """Where the mean end-to-end latency went, below. Absent: no time series was kept; a pipeline's batches overlap; a
    request was given up on its way."""

    makespan_s: float
    """Time of the last token of any request completed, s from the clock's start; 0 if none completed."""
    num_iterations: int
    """Iterations of the engine, or of all engines together."""
    num_preemptions: int
    """Times a sequence lost its place among those decoding, or its KV."""
    counters: Counts
    """What else was counted, below."""
    lanes: LanesUse
    """How long each lane was in use, below; of several engines the mean."""
    tiers: list[TierUse] | UnsetType = UNSET
    """Tiers below the GPU that keep prefixes, the nearest first, below. Absent: there is none."""
    engines: list[EngineUse] | UnsetType = UNSET
    """Each engine's share, below. Absent: there is one."""
    scaling: Scaling | UnsetType = UNSET
    """Replicas that came and went, below. Absent: without `--autoscale`."""
    warnings: list[str]
    """Sentences to read before the figures: limits that were adjusted, rows of the trace left out, extrapolated times,
    ignored requests."""
    scenario: ResolvedScenario
    """What was asked for and what it resolved to, below."""
    profile: UsedProfile
    """The constants that priced the run, below."""
    engine_profile: UsedEngineProfile | UnsetType = UNSET
    """What the engine cost beside the GPU, below. Absent: prices are all there is (forms `linear` and `paper`)."""
    accuracy: Accuracy | UnsetType = UNSET
    """How far to trust the figures, below. Absent: a live run."""
    versions: Versions
    """What produced the file, below."""
    machine: Machine | UnsetType = UNSET
    """What executed the run, below. Absent: a simulated run."""

    decisions_sha256: str | UnsetType = UNSET
    """SHA-256 over a line for each step, `STEP REQUEST:TOKENS ... preempt REQUEST ...`, in the order of the engine
    (vLLM v1). Absent: without `--save-detailed`, or the policy does not tell."""

    per_request: str | UnsetType = UNSET
    """A sentence: there are no arrays, see the table. Absent: at most 100,000 requests ended."""
    request_ids: list[int] | UnsetType = UNSET
    """Place in the trace, from 0; the arrays are in its order, one element for each request that ended. Absent, as all
    that follow: `per_request` is present."""
    start_times: list[float] | UnsetType = UNSET
    """Arrival, s."""
    input_lens: list[int] | UnsetType = UNSET
    """Prompt tokens."""
    output_lens: list[int] | UnsetType = UNSET
    """Output tokens; 0 of an ignored request."""
    queue_times: list[float] | UnsetType = UNSET
    """First scheduled minus arrival, s; 0 of an ignored request, as all times."""
    ttfts: list[float] | UnsetType = UNSET
    """First token minus arrival, s."""
    latencies: list[float] | UnsetType = UNSET
    """Last token minus arrival, s."""
    errors: list[str] | UnsetType = UNSET
    """Why the request was ignored or failed; empty of one completed."""
    itls: list[list[float]] | UnsetType = UNSET
    """For each request the gaps between its tokens, s. Absent too without `--save-detailed`."""

    def __repr__(self) -> str:
        """One line: thousands of arrays' entries say nothing."""
        times = ((name, getattr(self, f"mean_{name}_ms"), getattr(self, f"p99_{name}_ms")) for name in ("ttft", "tpot"))
        told = [
            f"{name.upper()} mean {mean:,.1f} ms, P99 {p99:,.1f} ms" for name, mean, p99 in times if mean is not None
        ]
        if self.goodput_attainment is not None:
            told.append(f"SLOs met by {self.goodput_attainment:.1%}")
        if not self.complete:
            told.append("ended early")
        return f"<{type(self).__name__} of {self.policy}: {'; '.join([f'{self.completed:,} requests', *told])}>"


OVER_DRAWS = {
    "goodput_attainment": "SLOs met",
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "mean TTFT",
    "p99_ttft_ms": "P99 TTFT",
    "mean_tpot_ms": "mean TPOT",
    "p99_tpot_ms": "P99 TPOT",
    "mean_e2el_ms": "mean E2EL",
}
"""Fields of `Result` that are compared over draws of the traffic, in words."""


class Spread(Struct, frozen=True):
    """A ratio over draws of the traffic: geometric mean, and where it lies with 95 %, by Student's t on logarithms."""

    ratio: float
    low: float
    high: float


class Bounds(Struct, kw_only=True, frozen=True):
    """What no scheduler exceeds, runs with one limit of the machine lifted, and runs on other draws of the traffic."""

    goodput_bound: float | None = None
    """The most goodput that any scheduler could reach with these prices and limits, requests/s
    (`sim/bounds/goodput.py`); of policies whose limits differ, the greatest. None: `--no-bound`; 20,000 requests or
    more without `--bound`; no SLOs, a closed loop, pools, or prices of form `table` or `paper`."""
    bound_shares: dict[str, float] = {}
    """Label: goodput over the bound, of runs that complete every request; empty without a bound."""
    lifted: dict[str, dict[str, dict[str, float | None]]] = {}
    """Label: limit lifted: metric: value, of `--lift-limits`: `infinite PCIe`, `infinite memory`, `known lengths`; a
    limit that a policy does not know is left out."""
    draws: int = 1
    """Draws of the traffic that `over_draws` is of, that of `metrics` among them: `--seeds`."""
    over_draws: dict[str, dict[str, Spread]] = {}
    """Label: metric: ratio to the first policy over all draws; empty without `--seeds`. A metric that is 0 or missing
    in a draw is left out."""


class Comparison(Bounds, kw_only=True, frozen=True):
    """What comparison.json holds of several results; metrics are those of `sim.results.report.METRICS`."""

    baseline: str | None
    """Label of the first policy. None: no policy was run."""
    policies: list[str]
    """Labels, in order."""
    metrics: dict[str, dict[str, float | None]]
    """Label: metric: value, below."""
    ratios_to_baseline: dict[str, dict[str, float | None]]
    """Label: metric: value over the first policy's. None: either is missing, or the first is 0."""
    overloaded: list[str]
    """Labels of the policies whose queue grew to the end of the arrivals: in their second half more requests came than
    ended, or than were first scheduled, by over three standard deviations of Poisson arrivals."""
    sentences: list[str]
    """Which engines the policies ran on, then what differs from the first policy, a paragraph for each further one."""
    profiles: dict[str, UsedProfile]
    """Label: `profile` of its result."""
