"""Options of `memory=mapped` (vAttention's, vTensor's), and of any mix with it."""

from typing import TYPE_CHECKING

from sim.errors import UserError
from sim.frozen import frozen
from sim.parts.options import CheckedOptions, option

if TYPE_CHECKING:
    from sim.specs.model_spec import ModelSpec


@frozen
class PageOptions(CheckedOptions):
    """Pages of the GPU's driver."""

    page_kib: int = option(
        2048, "KiB of a page; CUDA's own are of 2048, smaller ones take a changed driver", within=(4, 1 << 20)
    )
    map_us: float = option(
        40.0,
        "time to map a page, us, which a prompt waits for (assumed); 0: hidden, as in vTensor",
        within=(0.0, 1e9),
    )

    def tokens(self, model: "ModelSpec", tp: int) -> int:
        """Whose keys, or values, of one layer fill a page. UserError where a page holds none."""
        found = int(self.page_kib * 1024 / (model.kv_bytes_per_token_layer(tp) / 2))
        if not found:
            raise UserError(f"page-kib: {self.page_kib} is less than the keys of a token of {model.name}; raise it")
        return found
