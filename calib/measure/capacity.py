"""`Capacity`: what of the machine decides which shapes are worth planning."""

import msgspec


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The machine as it was when the run first started; kept in its log, so that a resumed run has the same plan.

    Attributes:
        device_bytes: free memory of the device (on a CPU that of the host).
        host_bytes: free memory of the host.
        cache_bytes: last-level cache of the device.
        num_gpus: CUDA devices in sight; 0 on a CPU.
        flops_per_s, bytes_per_s: rough rates, on the low side, for leaving out what would take too long.
        graphs: whether the device replays graphs.
    """

    device_bytes: int
    host_bytes: int
    cache_bytes: int
    num_gpus: int
    flops_per_s: float
    bytes_per_s: float
    graphs: bool
