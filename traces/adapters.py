"""Adapters (LoRA): which one a request of a trace names, and whose cached prompts it shares."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from traces.fields import Where
from traces.rates import check_between, check_seed
from traces.request import Request

FIELD = "lora"


def read_name(where: Where, value: object, *_: int) -> str:
    """What a trace says of one request: a name, or a whole number; empty where nothing. TraceError where it is none."""
    name = "" if value is None else str(value).strip()
    if isinstance(value, bool) or not isinstance(value, str | int | None) or "\n" in name or "\r" in name:
        problem = "is not the name of an adapter"
        raise where.error(FIELD, value, problem, "write it as sql-7b or 3, and nothing where there is none")
    return name


def apart(lora: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of blocks that are another adapter's nowhere, as KV depends on it: hashes of 63 bits, with its name in them.

    So does vLLM 0.33 (`_gen_lora_extra_hash_keys`).
    """
    if not lora:
        return ids
    from hashlib import blake2b  # noqa: PLC0415 - most traces name no adapter

    hashes = (blake2b(f"{ident} {lora}".encode(errors="surrogatepass"), digest_size=8) for ident in ids)
    return tuple(int.from_bytes(found.digest()) >> 1 for found in hashes)


def with_adapters(requests: Iterable[Request], count: int, skew: float, seed: int) -> Iterator[Request]:
    """Draw an adapter for each request, `lora-1` to `lora-COUNT`, the r-th with a weight of r ** -`skew`.

    Raises `TraceError` at once where a number is out of range.
    """
    check_between("loras", count, "give 1 or more", 1, 1e6)
    check_between("lora-skew", skew, "0 draws all alike, 1 is Zipf's law", 0, 5)
    check_seed(seed)
    from random import Random  # noqa: PLC0415 - slow to import, and conversions do not need it

    names = [f"lora-{rank}" for rank in range(1, count + 1)]
    weights = list(accumulate(rank**-skew for rank in range(1, count + 1)))
    dice = Random(f"adapters {seed}")
    return (request._replace(lora=dice.choices(names, cum_weights=weights)[0]) for request in requests)
