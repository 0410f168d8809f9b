"""What the twin's costs say of plans that a live run carried out: every one of them, whatever the twin decided."""

from collections.abc import Callable

from sim.cost.pricing import Lanes, Pricer
from sim.engine.plan import IterationPlan
from sim.run.prepare import Setup

PriceOf = Callable[[IterationPlan], float | None]


def plan_prices(setup: Setup, num_groups: int) -> PriceOf:
    """What prices a plan: s from its decision to its tokens, by the setup's costs, with nothing else on the lanes.

    None for plans that wait for copies of earlier ones, whose ends no plan tells. `num_groups` are those of layers that
    a whole block is divided into (`Memory.num_groups`).
    """

    def price(plan: IterationPlan) -> float | None:
        if plan.awaited:
            return None
        pricer = Pricer(
            setup.cost,
            Lanes(),
            lambda end_s, move: None,
            layers=setup.model.num_layers,
            num_groups=num_groups,
            block_bytes=setup.limits.block_bytes,
            hidden_bytes=setup.model.hidden_bytes_per_token_layer,
        )
        return pricer.step(plan, 0.0).first_end_s

    return price
