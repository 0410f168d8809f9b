"""`Grid`: the shapes of a quick and of a full calibration, before the machine's limits cut them."""

from dataclasses import dataclass

KIB, MIB, GIB = 1024, 1024**2, 1024**3


@dataclass(frozen=True)
class Grid:
    """Shapes to time.

    Attributes:
        prompts: tokens of single prompts, ascending; the first three are timed on the slowest machine.
        prompt_batches: (sequences, tokens each).
        chunks: (tokens computed, tokens cached before) of single sequences.
        mixed: (tokens of a prompt, decodes beside it, tokens cached before each of these).
        decode_batches, decode_contexts: all pairs of sequences and tokens cached before.
        head_rows: rows of the LM head.
        recomputed, restored: tokens of prefixes.
        steps: (sequences, tokens computed, tokens cached before) of whole iterations.
        copies: bytes of single copies between device and host, pinned.
        pageable: the same, pageable.
        scattered: (bytes of a piece, pieces), pinned.
        staged: the same where the host's side is in a row: they pass through a buffer on the device.
        memcpys: bytes copied from pinned to pageable memory.
        all_reduces: bytes on each GPU.
        launches: empty operations in a row.
    """

    prompts: tuple[int, ...]
    prompt_batches: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, int], ...]
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    head_rows: tuple[int, ...]
    recomputed: tuple[int, ...]
    restored: tuple[int, ...]
    steps: tuple[tuple[int, int, int], ...]
    copies: tuple[int, ...]
    pageable: tuple[int, ...]
    scattered: tuple[tuple[int, int], ...]
    staged: tuple[tuple[int, int], ...]
    memcpys: tuple[int, ...]
    all_reduces: tuple[int, ...]
    launches: tuple[int, ...]


FULL = Grid(
    prompts=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    prompt_batches=((4, 512), (8, 1024), (16, 256), (64, 128)),
    chunks=((128, 2048), (512, 2048), (512, 8192), (512, 32768), (2048, 8192), (2048, 30720)),
    mixed=tuple((n, b, c) for n in (64, 256, 1024) for b, c in ((8, 512), (64, 512), (8, 8192), (128, 2048))),
    decode_batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    decode_contexts=(128, 512, 2048, 8192, 32768, 131072),
    head_rows=(1, 4, 16, 64, 256, 1024),
    recomputed=(16, 32, 64, 128, 512, 2048, 8192),
    restored=(128, 512, 2048, 8192, 32768),
    steps=(
        *((batch, 1, context) for batch in (1, 4, 16, 64) for context in (32, 128, 512, 1536)),
        (256, 1, 512),
        *((batch, tokens, 0) for batch in (1, 4) for tokens in (16, 64, 256, 768)),
        *((1, tokens, 0) for tokens in (2048, 4096)),
    ),
    copies=tuple(4 * KIB * 4**power for power in range(10)),
    pageable=(64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB),
    scattered=(
        (4 * KIB, 256),
        (8 * KIB, 256),
        (8 * KIB, 2048),
        (32 * KIB, 256),
        (128 * KIB, 16),
        (128 * KIB, 256),
        (128 * KIB, 2048),
        (512 * KIB, 256),
        (2 * MIB, 64),
    ),
    staged=((16 * KIB, 256), (128 * KIB, 256), (128 * KIB, 2048)),
    memcpys=(64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB),
    all_reduces=(8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB, 256 * MIB),
    launches=(1, 10, 100),
)
QUICK = Grid(
    prompts=(16, 64, 256, 1024, 4096),
    prompt_batches=((4, 256),),
    chunks=((256, 1024),),
    mixed=((64, 8, 512), (256, 32, 512), (512, 8, 2048)),
    decode_batches=(1, 8, 64),
    decode_contexts=(128, 512, 2048),
    head_rows=(1, 64),
    recomputed=(16, 32, 64, 512),
    restored=(64, 512),
    steps=(
        *((batch, 1, context) for batch in (1, 4, 16) for context in (32, 128, 384)),
        *((batch, tokens, 0) for batch in (1, 4) for tokens in (16, 64, 192)),
    ),
    copies=(4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB),
    pageable=(256 * KIB, 16 * MIB),
    scattered=((4 * KIB, 64), (4 * KIB, 512), (128 * KIB, 64)),
    staged=((128 * KIB, 64),),
    memcpys=(64 * KIB, MIB, 16 * MIB),
    all_reduces=(64 * KIB, 4 * MIB, 64 * MIB),
    launches=(1, 100),
)
