"""What a policy is made of: frozen options (`Policy`), limits shared by all (`Limits`), and the state they steer.

A `Policy` is a preset: a frozen dataclass whose fields are its options (the CLI turns each into a flag) and whose
`scheduler()` builds the `Scheduler` that decides, iteration by iteration. Neither knows a clock: times are facts given.
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sim.engine.batch import DecodeBatch
from sim.engine.blocks import BlockPool
from sim.engine.itl import GapCollector
from sim.engine.plan import IterationPlan, StepTimes, Transfer
from sim.engine.predictor import LengthPredictor, NoPredictor
from sim.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from sim.cost.forms import CostModel
    from sim.specs.hardware import HardwareSpec
    from sim.specs.models import ModelSpec


@dataclass(frozen=True)
class Limits:
    """The engine's limits, by vLLM's names. Blocks are whole (`block_size` tokens, all layers), per GPU."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int
    block_bytes: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = False


@dataclass(frozen=True)
class Deployment:
    """What the policy may know of the machine: it predicts with the constants that the clocks run on."""

    model: "ModelSpec"
    hardware: "HardwareSpec"
    tensor_parallel_size: int
    cost: "CostModel"


@dataclass
class Counters:
    """What a run counts beside times."""

    preemptions: int = 0
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    swap_space_exhausted: int = 0
    """Swaps that became recomputations for lack of host blocks; vLLM 0.5.5 aborts there."""
    ignored: dict[str, int] = field(default_factory=dict)
    policy: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Counters of one policy, by name."""


class Scheduler(ABC):
    """Queues, pools and the decode batch of one engine, and the decisions over them."""

    def __init__(self, limits: Limits, gaps: GapCollector, *, layer_group: int = 1) -> None:
        self.limits = limits
        # Pool units a whole block takes: 1 where a block holds all layers, the layer count where it holds one.
        self.unit = layer_group
        self.gaps = gaps
        self.gpu = BlockPool("GPU KV blocks", limits.num_gpu_blocks * layer_group)
        self.host = BlockPool("host KV blocks", limits.num_cpu_blocks * layer_group)
        self.batch = DecodeBatch(limits.block_size, gaps)
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()
        self.counters = Counters()
        self.finished: list[Sequence] = []
        """Ended since the engine last looked, completed or ignored."""
        self._changed = False
        """Whether this step ended or preempted anything: an empty step is then followed by another at once."""

    def add(self, seq: Sequence) -> None:
        """A request arrived."""
        self.waiting.append(seq)

    @abstractmethod
    def schedule(self, now_s: float) -> IterationPlan | None:
        """Decide the next iteration, or None if there is nothing to do until another fact arrives."""

    @abstractmethod
    def commit(self, plan: IterationPlan, times: StepTimes) -> None:
        """The plan was carried out for `times.steps` iterations."""

    def transfer_done(self, transfer: Transfer) -> None:
        """A copy beside the computation ended."""
        raise NotImplementedError(f"{type(self).__name__} starts no transfers")

    def num_generated_of(self, seq: Sequence) -> int:
        """Output tokens that a sequence has had."""
        return self.batch.num_generated_of(seq) if seq in self.batch.members else seq.num_generated

    def truncate(self, seq: Sequence, output_tokens: int) -> None:
        """`seq` ends with its `output_tokens`-th token, which is yet to come (a stop token; a client that has left)."""
        if seq in self.batch.members:
            self.batch.shorten(seq, output_tokens)
        else:
            seq.output_tokens = output_tokens

    def cancel(self, seq: Sequence) -> None:
        """Nobody waits for `seq` any more: it leaves the queue, or ends with its next token."""
        if seq.status in (Status.FINISHED, Status.IGNORED):
            return
        if seq.status is Status.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
            self.ignore(seq, "cancelled")
            return
        self.truncate(seq, min(seq.output_tokens, self.num_generated_of(seq) + 1))

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Sequences admitted and not finished, swapped or parked."""

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV is (partly) on the host and that do not decode."""
        return len(self.swapped)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is still to end."""
        return bool(self.waiting or self.swapped or self.num_running)

    def record_tokens(self, log: dict[int, list[float]]) -> None:
        """Keep the time of every token, by request id, in `log`."""
        self.batch.token_log = log

    def ignore(self, seq: Sequence, reason: str) -> None:
        """End `seq` without completing it (vLLM's FINISHED_IGNORED); it must hold no blocks."""
        seq.status = Status.IGNORED
        seq.error = f"ignored: {reason}"
        self._changed = True
        self.counters.ignored[reason] = self.counters.ignored.get(reason, 0) + 1
        self.finished.append(seq)


def option(default: Any, help_text: str) -> Any:  # noqa: ANN401 - a dataclass default
    """A policy's option with the text that `--help` shows."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Policy:
    """A named preset; subclasses add their options as fields and say which paper they follow."""

    name: ClassVar[str]
    summary: ClassVar[str]
    default_swap_space_gib: ClassVar[float] = 4.0
    """Host memory for KV per GPU when the user names none (vLLM 0.5.5's `--swap-space`)."""

    @abstractmethod
    def scheduler(self, limits: Limits, gaps: GapCollector, deployment: Deployment) -> Scheduler:
        """Build the state that this policy steers."""

    def length_predictor(self, seed: int) -> LengthPredictor:
        """What the engine is to know of output lengths; nothing unless the policy asks for it."""
        return NoPredictor()
