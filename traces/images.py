"""Images of prompts: how files have them, and what is wrong with them.

In CSV a cell `12:576:7;700:576:8`: of the prompt's tokens, the 576 from place 12 on (the first is at 0) are image 7's,
then those from 700 on image 8's. In JSON lines a list of such triples.
"""

from itertools import pairwise

from traces.request import Image
from traces.triples import Triples


def _fault(images: tuple[Image, ...], prompt_tokens: int, _: int) -> str:
    """Images are in order, apart, of a token or more, and within the prompt."""
    if not images:
        return ""
    apart = all(one.offset + one.num_tokens <= other.offset for one, other in pairwise(images))
    last = images[-1]
    inside = images[0].offset >= 0 and last.offset + last.num_tokens <= prompt_tokens
    if apart and inside and min(image.num_tokens for image in images) > 0:
        return ""
    return f"has images out of order, without tokens or beyond the prompt's {prompt_tokens}"


IMAGES = Triples(
    "images", Image._make, (int, int, int), "images",
    "write OFFSET:TOKENS:ID;... as in 12:576:7;700:576:8, places counted from 0",
    "write [[OFFSET, TOKENS, ID], ...], places counted from 0", _fault,
)  # fmt: skip
