"""Images of prompts: how files have them, and what is wrong with them.

In CSV a cell `12:576:7;700:576:8`: of the prompt's tokens, the 576 from place 12 on (the first is at 0) are image 7's,
then those from 700 on image 8's. In JSON lines a list of such triples.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from traces.fields import Where
from traces.request import Image
from traces.triples import parse_triples, triples_of

FIELD = "images"
REMEDY = "write OFFSET:TOKENS:ID;... as in 12:576:7;700:576:8, places counted from 0"
KINDS = (int, int, int)
Images = tuple[Image, ...]


def parse_images(cell: str) -> Images:
    """The images of a CSV cell; ValueError where it is none."""
    return tuple(map(Image._make, parse_triples(cell, KINDS)))


def images_of(value: object) -> Images:
    """The images of a JSON value; ValueError where it is none."""
    return tuple(map(Image._make, triples_of(value, KINDS)))


def write_images(images: Images) -> str:
    """The cell that `parse_images` reads."""
    return ";".join(f"{offset}:{num_tokens}:{image_id}" for offset, num_tokens, image_id in images)


def images_fit(images: Images, prompt_tokens: int) -> bool:
    """Whether they are in order, apart, of a token or more, and within the prompt."""
    if not images:
        return True
    apart = all(one.offset + one.num_tokens <= other.offset for one, other in pairwise(images))
    last = images[-1]
    inside = images[0].offset >= 0 and last.offset + last.num_tokens <= prompt_tokens
    return apart and inside and min(image.num_tokens for image in images) > 0


def check_images(
    where: Where, parse: Callable[[Any], Images], shown: object, prompt_tokens: int, remedy: str = REMEDY
) -> Images:
    """The images that `shown` says, or the error that names what is wrong with them."""
    try:
        images = parse(shown)
    except ValueError:
        raise where.error(FIELD, shown, "is not a list of images", remedy) from None
    if not images_fit(images, prompt_tokens):
        problem = f"has images out of order, without tokens or beyond the prompt's {prompt_tokens}"
        raise where.error(FIELD, shown, problem, remedy)
    return images
