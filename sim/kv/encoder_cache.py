"""`EncoderCache`: outputs of an image encoder, kept by image, as vLLM v1's `EncoderCacheManager` counts them.

A sequence refers to an output from the step that computes it, or finds it, until the prompt's tokens that it stands for
are computed. Outputs that no sequence refers to stay until room is needed, those that were let go first leave first.
"""

from sim.engine.sequence import Sequence

Encoded = tuple[int, int]
"""Id and tokens of an image: one id with two lengths is two images."""


def encoded(seq: Sequence, place: int) -> Encoded:
    """What the image of `seq` at `place` is known by."""
    _, num_tokens, image_id = seq.request.images[place]
    return image_id, num_tokens


class EncoderCache:
    """Room for so many tokens of outputs. Images of a sequence are told by their places in its `request.images`."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.free = num_tokens
        """Tokens of room that nothing stands in."""
        self.freeable = num_tokens
        """With what no sequence refers to."""
        self._users: dict[Encoded, set[Sequence]] = {}
        self._idle: dict[Encoded, None] = {}
        self.held: dict[Sequence, set[int]] = {}
        """Images that sequences refer to. Sets, as in vLLM: their order is the order in which they are let go."""

    def refer(self, seq: Sequence, place: int) -> bool:
        """`seq` needs an image: whether it is there, and referred to from now on."""
        image = encoded(seq, place)
        users = self._users.get(image)
        if users is None:
            return False
        if not users:
            del self._idle[image]
            self.freeable -= image[1]
        users.add(seq)
        self.held.setdefault(seq, set()).add(place)
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Room for so many tokens, of what is idle if need be; False where there is too little."""
        if num_tokens > self.freeable:
            return False
        while num_tokens > self.free:
            image = next(iter(self._idle))
            del self._idle[image], self._users[image]
            self.free += image[1]
        return True

    def add(self, seq: Sequence, place: int) -> None:
        """`seq` computes an image that is not there, and for which there is room."""
        image = encoded(seq, place)
        self._users[image] = {seq}
        self.held.setdefault(seq, set()).add(place)
        self.free -= image[1]
        self.freeable -= image[1]

    def let_go(self, seq: Sequence, num_computed: int) -> None:
        """`seq` has computed so many tokens: it no longer needs the images that end there or before."""
        held = self.held.get(seq)
        if held is None:
            return
        for place in list(held):
            offset, num_tokens, _ = seq.request.images[place]
            if offset + num_tokens > num_computed:
                continue
            held.remove(place)
            image = encoded(seq, place)
            # A prompt may have an image twice: it refers to it until the last time.
            if all(encoded(seq, other) != image for other in held):
                users = self._users[image]
                users.remove(seq)
                if not users:
                    self._idle[image] = None
                    self.freeable += num_tokens
        if not held:
            del self.held[seq]

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended, or is to be computed again."""
        self.let_go(seq, seq.request.prompt_tokens)
