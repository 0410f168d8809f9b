"""What building a part is given, and how the parts of a system are built and found to go together."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from sim.engine.limits import Deployment, Limits
from sim.errors import UserError
from sim.frozen import frozen
from sim.kv.offload_options import OffloadOptions
from sim.parts.catalogue import KINDS, STAGES, known_part
from sim.parts.needs import check_needs

if TYPE_CHECKING:
    from sim.engine.scheduler import Parts
    from sim.systems.base import Policy

MEMPOOL = "mempool"
"""The memory of engines that cache prefixes and send one another what they lack."""
STORED = "stored"
"""The memory of engines whose prompts a store of the cluster may have."""

Options = TypeVar("Options")


@frozen
class Builder:
    """What the parts of one system, for one engine, are built from."""

    policy: "Policy"
    limits: Limits
    deployment: Deployment

    @cached_property
    def names(self) -> dict[str, str]:
        """Kind of part -> name."""
        return self.policy.names

    def options(self, kind: type[Options]) -> Options:
        """The options of a kind (`Policy.options`)."""
        return self.policy.options(kind)

    @property
    def offloading(self) -> OffloadOptions:
        """What is offloaded."""
        options = self.options(OffloadOptions)
        if options.offloads and self.names["batching"] != "unified":
            raise UserError(f"--kv-offloading-size: goes with batching=unified, not {self.names['batching']}")
        return options

    def refuse_beside_drafts(self) -> None:
        """UserError for what does not go with tokens that are drafted."""
        if self.offloading.offloads:
            raise UserError(
                "--kv-offloading-size: what a connector copies of slots ahead is not simulated; leave it out, or "
                "spec-method"
            )
        if self.policy.schedules_ahead:
            raise UserError(
                "--async-scheduling: drafted tokens are verified in series here: a step knows what the one before it "
                "accepted; leave it out, or spec-method"
            )

    def refuse_beside_adapters(self) -> None:
        """UserError for what does not go with adapters, of which so many at most are in use at once."""
        stage = self.names["stage"]
        if self.deployment.role != "both" or STAGES[stage].takes_calls:
            raise UserError(
                "--enable-lora: adapters of sequences that come from another engine or return from a tool are not "
                f"simulated; leave it out, or stage={stage}"
            )

    @property
    def block_bytes(self) -> float:
        """Bytes of a block on all GPUs of the engine together."""
        return self.limits.block_bytes * self.deployment.tensor_parallel_size

    def refuse_windows(self, asked: str, remedy: str = "") -> None:
        """UserError for models of which some layers have rings of blocks, where `asked` keeps whole prefixes."""
        if self.limits.has_window_groups:
            raise UserError(f"{asked}: {self.deployment.model.name} has layers that keep a window only{remedy}")

    def refuse_unlike_layers(self, *, selected: bool = False) -> None:
        """UserError for models whose layers share their KV or attend to a part of the context.

        Args:
            selected: a share of all that is kept may be attended to.
        """
        model = self.deployment.model
        kv = model.kv_format()
        if not kv.keeps_all or self.limits.window is not None or not (selected or kv.is_dense):
            what = f"layers of {model.name} share their KV or attend to a part of the context"
            raise UserError(f"memory={self.names['memory']}: {what}")


def build_parts(b: Builder) -> "Parts":
    """One part of each kind. UserError where they do not go together."""
    from sim.engine.scheduler import Parts

    kinds = {kind: known_part(kind, b.names[kind]) for kind in KINDS}
    try:
        parts: dict[str, Any] = {kind: part.build(b) for kind, part in kinds.items()}
    except UserError:
        # What no option mends comes before an option that is missing or refused.
        check_needs(b.names, kinds)
        raise
    for kind, part in parts.items():
        refuse_unseen(b.names[kind], type(part))
    check_needs(b.names, parts)
    return Parts(**parts)


def refuse_unseen(name: str, kind: type) -> None:
    """UserError where a class defines what the compiled one it derives from (setup.py) reads as an object's own."""
    unseen = vars(kind).keys() & set(getattr(kind, "__mypyc_attrs__", ())) - {"__dict__"}
    if unseen and "__mypyc_attrs__" not in vars(kind):
        raise UserError(
            f"part {name}: {kind.__qualname__} defines {', '.join(sorted(unseen))} in its class, where compiled code "
            "does not look; assign to self in __init__, or install kvtwin without KVTWIN_MYPYC"
        )
