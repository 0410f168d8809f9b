"""What must have finished before what: vector clocks of streams and host threads, and what each last did where.

An access is a race unless everything that conflicts with it happens before it, whatever the device's own pace. So a run
in which all went well by luck is found out too.
"""

import threading
from collections.abc import Iterable

import numpy as np

Region = slice | np.ndarray
"""Granules of a piece of memory."""
GRANULE = 4
"""Bytes that are told apart."""
MOST_AGENTS = 64
"""Streams and host threads of one run."""


class Agent:
    """A stream or a host thread: what it knows to be over, by agent."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.clock = np.zeros(MOST_AGENTS, dtype=np.int64)
        self.clock[number] = 1

    def hear(self, clock: np.ndarray) -> None:
        """Whatever `clock` knows is over before anything this agent does from now on."""
        np.maximum(self.clock, clock, out=self.clock)

    def tell(self) -> np.ndarray:
        """What is over when all that this agent has done so far is."""
        told = self.clock.copy()
        self.clock[self.number] += 1
        return told


class Order:
    """All agents of a run, and the races found among them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._agents: list[Agent] = []
        self._local = threading.local()
        self.found: list[str] = []

    def agent(self, name: str) -> Agent:
        """A new one."""
        with self._lock:
            self._agents.append(Agent(name, len(self._agents)))
            return self._agents[-1]

    def streams(self) -> list[Agent]:
        """The agents that are no host threads."""
        return [agent for agent in self._agents if agent.name.startswith("stream")]

    @property
    def thread(self) -> Agent:
        """The host thread that asks."""
        if not hasattr(self._local, "agent"):
            self._local.agent = self.agent(threading.current_thread().name)
        return self._local.agent

    def complain(self, what: str) -> None:
        """Note something that must not happen."""
        with self._lock:
            self.found.append(what)

    def access(self, agent: Agent, what: str, reads: Iterable["Place"], writes: Iterable["Place"]) -> None:
        """An agent reads and writes some places."""
        with self._lock:
            for memory, region in reads:
                self._conflict(agent, what, memory, region, "reads", writes_only=True)
            for memory, region in writes:
                self._conflict(agent, what, memory, region, "writes", writes_only=False)
            time = agent.clock[agent.number]
            for memory, region in reads:
                memory.read_by(agent)[region] = time
            for memory, region in writes:
                memory.writer[region], memory.written[region] = agent.number, time
            agent.clock[agent.number] += 1

    def _conflict(
        self, agent: Agent, what: str, memory: "Memory", region: Region, does: str, *, writes_only: bool
    ) -> None:
        writer = memory.writer[region]
        late = memory.written[region] > agent.clock[writer]
        if late.any():
            other = self._agents[writer[late][0]]
            self.found.append(f"{agent.name} {does} {memory.name} in {what}: {other.name} may still be writing it")
        for number, times in () if writes_only else memory.reads.items():
            if (times[region] > agent.clock[number]).any():
                other = self._agents[number]
                self.found.append(f"{agent.name} {does} {memory.name} in {what}: {other.name} may still be reading it")

    def gone(self, memory: "Memory") -> None:
        """A device's memory is given back: its stream may use it at once, whatever else still does."""
        with self._lock:
            owner = memory.owner
            if owner is None:
                return
            known = np.maximum(owner.clock, self.thread.clock)
            latest = dict.fromkeys((int(n) for n in np.unique(memory.writer)), 0)
            latest = {number: int(memory.written[memory.writer == number].max(initial=0)) for number in latest}
            for number, times in memory.reads.items():
                latest[number] = max(latest.get(number, 0), int(times.max(initial=0)))
            for number, time in latest.items():
                if number != owner.number and time > known[number] and number not in memory.recorded:
                    self.found.append(f"{memory.name} of {owner.name} is freed: {self._agents[number].name} may use it")


class Memory:
    """A storage. `owner` is the stream it was allocated on; None for the host's.

    `recorded` are agents that the allocator waits for before it gives the memory out again (`Tensor.record_stream`).
    """

    def __init__(self, order: Order, name: str, num_bytes: int, owner: Agent | None) -> None:
        self._order, self.name, self.owner = order, name, owner
        self.count = -(-num_bytes // GRANULE)
        self.writer = np.zeros(self.count, dtype=np.int16)
        self.written = np.zeros(self.count, dtype=np.int64)
        self.reads: dict[int, np.ndarray] = {}
        self.recorded: set[int] = set()

    def read_by(self, agent: Agent) -> np.ndarray:
        """When an agent last read each granule."""
        times = self.reads.get(agent.number)
        if times is None:
            times = self.reads[agent.number] = np.zeros(self.count, dtype=np.int64)
        return times

    def __del__(self) -> None:
        self._order.gone(self)


Place = tuple[Memory, Region]
"""Some granules of a piece of memory."""
