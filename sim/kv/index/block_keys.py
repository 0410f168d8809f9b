"""`BlockKeys`: what a trace's hash ids say of the engine's blocks, whatever the size of either."""

from traces.request import Request


class BlockKeys:
    """Keys of blocks of `block_size` tokens: those of one content have one key, wherever they stand."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int, ...], int] = {}

    def of(self, request: Request) -> tuple[int, ...]:
        """Keys of the blocks that the ids name as a whole, from the first on.

        Ids of the output count where the prompt's ids name its last block too.
        """
        ids, named = request.hash_ids, request.hash_block_tokens
        if request.output_hash_ids and len(ids) * named >= request.prompt_tokens:
            ids += request.output_hash_ids
        size = self.block_size
        if named == size:
            return ids
        if named % size == 0:
            parts = range(named // size)
            return tuple(ident * len(parts) + part for ident in ids for part in parts)
        # A block's content is all the ids that it touches, from where it begins in the first of them.
        numbers = self._numbers
        found = []
        for begin in range(0, len(ids) * named - size + 1, size):
            touched = ids[begin // named : (begin + size - 1) // named + 1]
            found.append(numbers.setdefault((begin % named, *touched), len(numbers)))
        return tuple(found)
