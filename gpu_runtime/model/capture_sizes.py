"""Which batch sizes of decodes, and numbers of tokens, are captured as CUDA graphs."""

LARGEST_CAPTURE = 512
SMALL_SIZES = (1, 2, 4)
CAPTURE_STEP = 8
COARSE_FROM, COARSE_STEP = 256, 16


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, as vLLM does: 1, 2, 4, multiples of 8 below 256 and of 16 from there on, until one fits
    `max_num_seqs`; 512 at most.

    ValueError unless `max_num_seqs` is positive.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs {max_num_seqs}: must be positive")
    coarse = range(COARSE_FROM, LARGEST_CAPTURE + 1, COARSE_STEP)
    sizes = [*SMALL_SIZES, *range(CAPTURE_STEP, COARSE_FROM, CAPTURE_STEP), *coarse]
    enough = next((i for i, size in enumerate(sizes) if size >= max_num_seqs), len(sizes) - 1)
    return sizes[: enough + 1]


def piece_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Tokens of iterations with prompts to capture, as vLLM does: of the same sizes those up to twice as many as
    sequences; as far as a batch can fill them."""
    most = min(2 * max_num_seqs, captured_size(min(max_num_batched_tokens, LARGEST_CAPTURE)))
    return [size for size in capture_sizes(LARGEST_CAPTURE) if size <= most]


def captured_size(num_tokens: int) -> int:
    """The size that so many tokens, up to the largest, are padded to."""
    return capture_sizes(num_tokens)[-1]
