"""`BlockKeys`: what a trace's hash ids say of the engine's blocks, whatever the size of either."""

from itertools import chain

from traces.request import Image, Request

FIRST_IMAGE_KEY = 1 << 80
"""Beyond all keys of blocks without images."""


class BlockKeys:
    """Keys of blocks of `block_size` tokens: those of one content have one key, wherever they stand."""

    num_ahead: int = 0
    """Tokens behind a block that its key names, too."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int, ...], int] = {}

    def of(self, request: Request) -> tuple[int, ...]:
        """Keys of the blocks that the ids name as a whole, from the first on.

        Ids of the output count where the prompt's ids name its last block too. Blocks of one content are apart where
        parts of images in them are (vLLM's extra keys): ids may be made of tokens, which are alike for all images.
        """
        keys = self._of_ids(request)
        return self._apart(keys, request.images) if request.images else keys

    def _apart(self, keys: tuple[int, ...], images: tuple[Image, ...]) -> tuple[int, ...]:
        found, size, numbers = list(keys), self.block_size, self._numbers
        for offset, num_tokens, image_id in images:
            for block in range(offset // size, min(len(keys), -(-(offset + num_tokens) // size))):
                content = found[block], offset - block * size, num_tokens, image_id
                found[block] = FIRST_IMAGE_KEY + numbers.setdefault(content, len(numbers))
        return tuple(found)

    def _of_ids(self, request: Request) -> tuple[int, ...]:
        ids, named = request.hash_ids, request.hash_block_tokens
        if request.output_hash_ids and len(ids) * named >= request.prompt_tokens:
            ids += request.output_hash_ids
        size = self.block_size
        if named == size:
            return ids
        if named % size == 0:
            parts = named // size
            return tuple(chain.from_iterable([range(ident * parts, (ident + 1) * parts) for ident in ids]))
        # A block's content is all the ids that it touches, from where it begins in the first of them.
        numbers = self._numbers
        found = []
        for begin in range(0, len(ids) * named - size + 1, size):
            touched = ids[begin // named : (begin + size - 1) // named + 1]
            found.append(numbers.setdefault((begin % named, *touched), len(numbers)))
        return tuple(found)
