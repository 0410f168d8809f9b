"""Whether hash ids fit the lengths of their request, and what is said where they do not.

`hash_ids` name the full blocks of the prompt and perhaps its partly filled last one, whose id then names the whole
block, generated tokens in it included. `output_hash_ids` name the blocks after that one; the last of all, which may be
partly filled and whose last token no engine ever computes, may be left out.
"""

from traces.fields import Where

Ids = tuple[int, ...]


def hashes_fit(prompt: int, hashes: Ids, block: int) -> bool:
    """Say whether `hashes` name all full blocks of the prompt, and perhaps the partly filled last one."""
    return not hashes or (block > 0 and prompt // block <= len(hashes) <= -(-prompt // block))


def output_hashes_fit(prompt: int, output: int, hashes: Ids, block: int, output_hashes: Ids) -> bool:
    """Say whether `output_hashes` name the blocks after the prompt's, and `hashes` all up to there."""
    if not output_hashes:
        return True
    if block < 1 or len(hashes) != -(-prompt // block):
        return False
    most = output_blocks(prompt, output, block)
    return most - 1 <= len(output_hashes) <= most


def output_blocks(prompt: int, output: int, block: int) -> int:
    """Return how many blocks generated tokens reach after those of the prompt."""
    return -(-(prompt + output) // block) - -(-prompt // block)


def check_hashes(where: Where, prompt: int, hashes: Ids, block: int, block_field: str = "") -> None:
    """Raise the error that names hash ids which do not fit the prompt; `block_field` is where the row has `block`."""
    if hashes_fit(prompt, hashes, block):
        return
    if block == 0:
        remedy = "give `--hash-block-tokens` (Mooncake: 512, Bailian: 16)"
        raise where.error("hash_ids", hashes, "has no block size", remedy)
    problem = f"has {len(hashes)} ids where {prompt} tokens make {-(-prompt // block)} blocks of {block}"
    raise where.error("hash_ids", hashes, problem, _remedy(block_field))


def check_output_hashes(
    where: Where, prompt: int, output: int, hashes: Ids, block: int, output_hashes: Ids, block_field: str = ""
) -> None:
    """Raise the error that names output hash ids which do not fit; `hashes` and `block` are known to."""
    if output_hashes_fit(prompt, output, hashes, block, output_hashes):
        return
    if not hashes or len(hashes) != -(-prompt // block):
        problem = f"comes after {len(hashes)} hash_ids, which do not name the whole prompt"
        remedy = "name all its blocks in hash_ids, the partly filled last one too, or leave output_hash_ids empty"
        raise where.error("output_hash_ids", output_hashes, problem, remedy)
    most = output_blocks(prompt, output, block)
    problem = f"has {len(output_hashes)} ids where {prompt} + {output} tokens add {most} blocks of {block}"
    raise where.error("output_hash_ids", output_hashes, problem, _remedy(block_field))


def _remedy(block_field: str) -> str:
    """A row's own block size overrules the flag, which would then change nothing."""
    return (
        f"correct {block_field} or the row"
        if block_field
        else "give the right `--hash-block-tokens`, or correct the row"
    )


def prefixes(ids: Ids, known: dict[tuple[int, int], int]) -> list[int]:
    """Return a number for each prefix that `ids` make: equal numbers, equal prefixes. `known` remembers them."""
    found, last = [], 0
    for ident in ids:
        last = known.setdefault((last, ident), len(known) + 1)
        found.append(last)
    return found


def num_shared(left: Ids | list[int], at: int, right: Ids, begin: int, end: int) -> int:
    """Return how many ids `left` from `at` on and `right[begin:end]` share at their beginning."""
    most = min(len(left) - at, end - begin)
    if tuple(left[at : at + most]) == right[begin : begin + most]:
        return most
    low = 0
    while low + 1 < most:
        middle = (low + most) // 2
        if tuple(left[at + low : at + middle]) == right[begin + low : begin + middle]:
            low = middle
        else:
            most = middle
    return low
