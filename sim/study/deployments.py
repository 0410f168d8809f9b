"""What `plan` chooses among: layouts of engines on so many GPUs, times the knobs of today's engines.

A layout is tensor parallelism x stages x replicas, or a pool that prefills and a pool that decodes, each with its own
tensor parallelism. A knob that the user has set is not searched.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import log
from typing import Any, Literal, get_args

from msgspec import Struct

from sim.errors import UserError
from sim.options.policies import owned_option
from sim.parts.catalogue import BATCHINGS
from sim.parts.options import Conditional
from sim.run.prepare import PIPELINED_BATCHINGS
from sim.specs.hardware import load_hardware
from sim.study.limits import fp8_of
from sim.study.points import policy_of, setup_of

Layouts = Literal["both", "engines", "pools"]
LAYOUTS: tuple[Layouts, ...] = get_args(Layouts)
TENSOR_PARALLEL = (1, 2, 4, 8)
"""GPUs of a group: those of one server."""
STAGES = (1, 2, 4)
BUDGETS = (512, 2048, 8192, 16384)
SEATS = (64, 256, 1024)
OFFLOAD_GIB_PER_GPU = 64.0
AFFINITY = "prefix-affinity"
BUDGET, SEATS_OF, KV_DTYPE, CACHING, OFFLOAD, ROUTER = (
    "max_num_batched_tokens", "max_num_seqs", "kv_cache_dtype", "enable_prefix_caching", "kv_offloading_size", "router",
)  # fmt: skip
Options = dict[str, Any]
ANY: Options = {"workload": "fixed"}
"""Traffic where only the engines matter."""


class Deployment(Struct, frozen=True):
    """One layout with its knobs.

    Attributes:
        options: of a run, without its traffic.
        layout: in words, as `2 engines of 2 GPUs`.
        is_pooled: whether prefill and decode have engines of their own.
        changed: knobs that are others than the engine's defaults.
        distance: how many values that were searched lie nearer to the defaults than theirs, knob by knob.
    """

    options: Options
    num_gpus: int
    layout: str
    is_pooled: bool
    changed: tuple[str, ...]
    distance: int = 0

    @property
    def family(self) -> tuple[bool, bool]:
        """Pools or not, 16-bit KV or not: each family is searched by itself, and its best is told."""
        return self.is_pooled, not self.keeps_answers

    @property
    def keeps_answers(self) -> bool:
        """Whether the model answers as it would with the KV that it was made for: no knob takes bits from that."""
        return KV_DTYPE not in self.changed

    @property
    def simplicity(self) -> tuple[int, int, int, int]:
        """By which of equals the one is taken that changes least: no pools, few knobs, few engines."""
        counts = ("replicas", "prefill_replicas", "decode_replicas")
        return self.is_pooled, len(self.changed), self.distance, sum(self.options.get(name) or 0 for name in counts)

    @property
    def name(self) -> str:
        """In words, knobs included."""
        return ", ".join([self.layout, *(f"{_shown(name)} {_value(self.options[name])}" for name in self.changed)])


class Space:
    """All deployments of a question. `refused` says why layouts and knobs cannot be had, as they are met.

    Args:
        fixed: options that all have; knobs among them are not searched.
        gpu: the kind of GPU.
        policies: texts of `--policy`; each is a choice.
        layouts: like engines, pools, or both.
        shares_prefixes: whether prompts begin alike: else caching and offloading change nothing, and are left alone.
        link_gbps: of engines in pools.
    """

    def __init__(
        self,
        fixed: Mapping[str, Any],
        gpu: str,
        policies: tuple[str, ...],
        layouts: Layouts,
        *,
        shares_prefixes: bool,
        link_gbps: float,
    ) -> None:
        self.fixed, self.gpu, self.layouts, self.link_gbps = dict(fixed), gpu, layouts, link_gbps
        self.shares_prefixes = shares_prefixes
        self.policies = policies
        self.refused: dict[str, list[str]] = {}
        self.conditional: list[Conditional] = []
        """Options of policies that act in some deployments alone, as they are met."""
        self._owned = {name: own.name for name in fixed if (own := owned_option(name)) is not None}
        self._engines: dict[str, dict[tuple[int, int], bool]] = {policy: {} for policy in policies}

    def of(self, num_gpus: int) -> list[Deployment]:
        """The deployments on just so many GPUs, the simplest first."""
        found = [
            Deployment(options, num_gpus, words, "prefill_replicas" in layout, tuple(knobs), distance)
            for policy in self.policies
            for base, layout, words in self._layouts(policy, num_gpus)
            for knobs, distance in self._knobs(base, layout)
            if (options := self._acting({**base, **layout, **knobs}, words)) is not None
        ]
        return sorted(found, key=lambda one: one.simplicity)

    def _acting(self, options: Options, words: str) -> Options | None:
        """Without options that the user gave and that do nothing there; None where the policy's text has them."""
        if not self._owned and not any(":" in policy for policy in self.policies):
            return options
        told = setup_of({**ANY, **options}).conditional
        self.conditional += told
        idle = {one.name: one.told for one in told if not one.acts}
        for name in idle.keys() - self._owned.values():
            self._refuse(idle[name], words)
            return None
        return {name: value for name, value in options.items() if self._owned.get(name) not in idle}

    def _base(self, policy: str) -> Options:
        return {**self.fixed, "gpu": self.gpu, "policy": policy}

    def _layouts(self, policy: str, num_gpus: int) -> Iterator[tuple[Options, Options, str]]:
        """Base options, those of the layout, and the layout in words."""
        base = self._base(policy)
        parsed = policy_of(base)[1]
        hands_over = parsed.hands_over
        batching = parsed.names["batching"]
        # Over NVLink a group of vLLM v1 is ahead of its pipeline. Other batchings have none, which need not be told.
        queues = BATCHINGS[batching].queues_batches and load_hardware(self.gpu).nvlink_bytes_per_s is None
        all_stages = STAGES if queues or batching in PIPELINED_BATCHINGS else (1,)
        named = "" if len(self.policies) == 1 else f"{policy}: "
        if self.layouts != "pools" and not hands_over:
            for tp, stages in product(self._tensor_parallel(), all_stages):
                if num_gpus % (tp * stages) or not self._can(policy, tp, stages):
                    continue
                count = num_gpus // (tp * stages)
                layout: Options = {"tp": tp}
                if stages > 1:
                    layout["pipeline_parallel_size"] = stages
                if count > 1:
                    layout |= {"replicas": count, "router": self.fixed.get("router", "least-loaded")}
                yield base, layout, named + _engines(count, tp, stages)
        if self.layouts != "engines" and (pooled := self._pooled(policy, base, hands_over)) is not None:
            for prefill_tp, decode_tp in product(self._tensor_parallel(), repeat=2):
                if not (self._can(policy, prefill_tp, 1) and self._can(policy, decode_tp, 1)):
                    continue
                for prefill in range(1, num_gpus // prefill_tp + 1):
                    decode, left = divmod(num_gpus - prefill * prefill_tp, decode_tp)
                    if decode < 1 or left:
                        continue
                    layout = {"tp": prefill_tp, "prefill_replicas": prefill, "decode_replicas": decode}
                    if decode_tp != prefill_tp:
                        layout["decode_tp"] = decode_tp
                    words = [_engines(prefill, prefill_tp, 1, "prefill "), _engines(decode, decode_tp, 1, "decode ")]
                    yield pooled, layout, named + " and ".join(words)

    def _tensor_parallel(self) -> tuple[int, ...]:
        return (self.fixed["tp"],) if "tp" in self.fixed else TENSOR_PARALLEL

    def _pooled(self, policy: str, base: Options, hands_over: bool) -> Options | None:
        """The base options of pools; None where the policy cannot hand over."""
        found = {**base, "link_gbps": self.fixed.get("link_gbps", self.link_gbps)}
        if hands_over:
            return found
        # vLLM v1's way where the policy can go it.
        for stage in ("nixl", "hand-over"):
            text = f"{policy}{',' if ':' in policy else ':'}stage={stage}"
            try:
                policy_of({**found, "policy": text})
            except UserError as error:
                refused = str(error)
            else:
                return {**found, "policy": text}
        self._refuse(refused, f"pools of {policy}")
        return None

    def _can(self, policy: str, tp: int, stages: int) -> bool:
        """Whether there are engines of such groups and stages: heads divide, weights fit, the policy has stages."""
        known = self._engines[policy]
        if (tp, stages) not in known:
            base = self._base(policy)
            try:
                pools = {}
                if policy_of(base)[1].hands_over:
                    pools = {"prefill_replicas": 1, "decode_replicas": 1, "link_gbps": self.link_gbps}
                setup_of(ANY | base | pools | {"tp": tp} | ({"pipeline_parallel_size": stages} if stages > 1 else {}))
                known[tp, stages] = True
            except UserError as error:
                known[tp, stages] = False
                self._refuse(str(error), f"tp {tp}" + (f", {stages} stages" if stages > 1 else ""))
        return known[tp, stages]

    def _refuse(self, reason: str, what: str) -> None:
        names = self.refused.setdefault(reason, [])
        if what not in names:
            names.append(what)

    def _knobs(self, base: Options, layout: Options) -> Iterator[tuple[Options, int]]:
        """Each combination of the knobs' values, those that are the defaults left out, and its distance from these."""
        setup = setup_of({**ANY, **base, **layout})
        usual = {BUDGET: setup.limits.max_num_batched_tokens, SEATS_OF: setup.limits.max_num_seqs}
        axes: dict[str, list[Any]] = {
            BUDGET: _others(BUDGETS, usual[BUDGET]),
            SEATS_OF: _others(SEATS, usual[SEATS_OF]),
            KV_DTYPE: [fp8_of(setup)] if setup.model.kv_dtype_bytes == 2.0 else [],
        }
        if self.shares_prefixes:
            axes[CACHING] = [not setup.limits.enable_prefix_caching]
            if setup.policy.name == "vllm-v1" and "prefill_replicas" not in layout and setup.pp == 1:
                axes[OFFLOAD] = [OFFLOAD_GIB_PER_GPU * setup.tp]
            if "replicas" in layout:
                axes[ROUTER] = [AFFINITY]
        names = [name for name in axes if name not in self.fixed]
        for values in product(*([None, *axes[name]] for name in names)):
            knobs = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            if {OFFLOAD, ROUTER} & knobs.keys() and not knobs.get(CACHING, setup.limits.enable_prefix_caching):
                # Nothing would be looked for there.
                continue
            if knobs.get(BUDGET, usual[BUDGET]) >= knobs.get(SEATS_OF, usual[SEATS_OF]):
                yield knobs, sum(axes[name].index(value) for name, value in knobs.items())


def _engines(count: int, tp: int, stages: int, role: str = "") -> str:
    each = f"{tp} GPU{'s' if tp > 1 else ''}" + (f" x {stages} stages" if stages > 1 else "")
    return f"{count} {role}engine{'s' if count > 1 else ''} of {each}"


def _others(values: Sequence[int], usual: int) -> list[int]:
    """Those that are not the default, the nearest to it first."""
    return sorted((value for value in values if value != usual), key=lambda value: abs(log(value / usual)))


def _shown(name: str) -> str:
    return name.replace("_", "-")


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
