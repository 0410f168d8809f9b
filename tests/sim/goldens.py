"""What modules of pins that are kept in full, in `golden/`, share."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


from sim.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
SMALL = "--max-model-len 1024 --gpu l20 --goodput ttft:3000 tpot:100 --seed 1 --num-prompts 30"
TRAFFIC = {
    "crowd": "--workload sharegpt --request-rate 20 --num-gpu-blocks-override 110 --num-cpu-blocks-override 150",
    "turns": "--workload sessions --turns 4 --think-time 2 --shared-prefix 100 --prefix-groups 2 --max-context 900 "
    "--input-len 90 --output-len 40 --request-rate 8 --num-gpu-blocks-override 90 --num-cpu-blocks-override 120",
}
POOLS = "--prefill-replicas 2 --decode-replicas 2 --link-gbps 20"
ONE_TOKEN = "--num-gpu-blocks-override 1600 --num-cpu-blocks-override 2400"
"""Blocks have one."""
WITH_POOLS = ("distserve", "splitwise", "memserve", "mooncake")


def rounded(value: object) -> object:
    """With eight digits of every number, and 0 for what rounding leaves: the last digits differ between machines."""
    match value:
        case float():
            return f"{value:.8g}" if abs(value) >= 1e-9 else "0"
        case dict():
            return {str(name): rounded(item) for name, item in value.items()}
        case list() | tuple():
            return [rounded(item) for item in value]
        case _:
            return value


def rough(text: str) -> str:
    """Numbers with three digits; days and digests of files left out."""
    text = text.replace(str(GOLDEN), "GOLDEN")
    text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", re.sub(r"\b\d{4}-\d\d-\d\d\b", "DAY", text))
    return re.sub(r"(?<![\w.-])[-+]?\d+\.\d+(e[-+]?\d+)?", lambda found: f"{float(found[0]) or 0.0:.3g}", text)


def digest(value: object) -> str:
    return sha256(json.dumps(rounded(value)).encode()).hexdigest()[:12]


def attempt(of: Callable[..., object], *given: object, **named: object) -> object:
    """What a function gives, or how it refuses."""
    try:
        return of(*given, **named)
    except UserError as error:
        return str(error)


Kinds = Mapping[str, Callable[[], Iterator[str]]]


def lines_of(name: str, kinds: Kinds) -> Iterator[str]:
    """What is pinned of a kind."""
    yield f"== {name}"
    yield from (line.rstrip() for line in kinds[name]())


def write(path: Path, kinds: Kinds) -> None:
    """All of them, one after another."""
    path.write_text("\n".join(line for name in kinds for line in lines_of(name, kinds)) + "\n")


def short(text: str, most: int) -> str:
    """A line as it is, or its beginning and a digest of all of it where it is longer."""
    return text if len(text) < most else f"{text[: most - 20]} {digest(text)}"
