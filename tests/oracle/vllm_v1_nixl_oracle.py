"""Ask two of vLLM 0.33.0's own v1 schedulers, one that prefills and one that decodes, with its NixlConnector.

    python vllm_v1_nixl_oracle.py               # makes cases_nixl.json.gz; the environment is vllm_v1_oracle.py's
    python vllm_v1_nixl_oracle.py FILE 0 500    # seeds 0 to 499, for `python nixl_replay.py FILE` to compare

Schedulers and the connector's side of them are vLLM's; ours are a virtual clock, in series, and a worker that pretends:
what is pulled starts with the step that decides it, on one link, first come, first served, `s_per_block` a block. Both
engines hear of its end with the output of the step that runs then, or at once. A prefilled request is at the other
engine when its step ends. Each engine's step is priced as `vllm_v1_oracle.py` says; one without tokens takes no time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm_v1_oracle import Options, Oracle, Row, make_scheduler, write_answer

CASES = Path(__file__).with_name("cases_nixl.json.gz")
SEEDS = (
    5001, 5007, 5008, 5012, 5013, 5014, 5017, 5018, 5022, 5023, 5024, 5026, 5037, 5040, 5042, 5046, 5048, 5049, 5051,
    5054, 5057, 5059, 5060, 5062, 20044, 20229, 20248, 30148, 60157, 62017, 62024, 62145,
)  # fmt: skip
"""Among those on which one rule or another had been wrong here."""
SLACK_S = 1e-9


class Side(Oracle):
    """One of the two engines.

    Attributes:
        flying: the step that runs: when it ends, what it computes, and which token each request samples.
        landed: requests whose copies ended and were not reported yet.
        stirred: whether something happened since it last scheduled.
        handed_over: requests that ended here, and what the other engine is to know of their blocks.
    """

    def __init__(self, rows: Sequence[Row], options: Options, end_of_copy: str) -> None:
        super().__init__(rows, options)
        self.end_of_copy = end_of_copy
        self.flying: tuple[float, Any, dict[str, int | None]] | None = None
        self.landed: set[str] = set()
        self.stirred = False
        self.handed_over: list[tuple[int, dict[str, Any]]] = []
        update = self.scheduler.update_from_output

        def heard(*args: Any) -> Any:
            found = update(*args)
            ended = (one for outputs in found.values() for one in outputs.outputs if one.kv_transfer_params)
            self.handed_over += [(int(one.request_id), one.kv_transfer_params) for one in ended]
            return found

        self.scheduler.update_from_output = heard

    def _make_scheduler(self) -> tuple[Any, Any]:
        return make_scheduler(self.options, KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"))

    def add(self, number: int, max_tokens: int, params: dict[str, Any]) -> None:
        """A request, with what it says of its KV."""
        row = self.rows[number]
        asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        request = Request(
            request_id=f"{number:06d}", prompt_token_ids=self.tokens[number][: row.prompt_tokens], pooling_params=None,
            arrival_time=row.arrival_s, sampling_params=asked, block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        self.stirred = True

    def deliver(self, output: Any, sampling: dict[str, int | None], now: float) -> None:
        """A step's tokens, and the copies that ended."""
        copies = KVConnectorOutput(**{self.end_of_copy: self.landed}) if self.landed else None
        self.landed, self.stirred = set(), bool(sampling) or copies is not None
        self._deliver(output, sampling, now, copies)

    def schedule(self, now: float) -> list[tuple[str, int]]:
        """One `schedule()`, whose step then runs; the blocks that it pulls, by request."""
        output, price = self._schedule(now)
        requests = self.scheduler.requests
        sampling = {
            key: None if requests[key].is_prefill_chunk else requests[key].num_output_tokens
            for key in output.num_scheduled_tokens
        }
        if sampling:
            self.flying, self.stirred = (now + price, output, sampling), False
        else:
            self.deliver(output, {}, now)
            # vLLM's loop never rests: what a preemption freed is looked at again.
            self.stirred |= bool(output.preempted_req_ids)
        pulled = output.kv_connector_metadata.reqs_to_recv.items()
        return [(key, sum(map(len, request.local_block_ids))) for key, request in pulled]


def ask(rows: Sequence[Row], options: Options, s_per_block: float) -> dict[str, Any]:
    """When each request's first token and end are, and the blocks that are pulled, in order."""
    sides = front, back = Side(rows, options, "finished_sending"), Side(rows, options, "finished_recving")
    copies: list[tuple[float, str]] = []
    pulled: list[tuple[int, int]] = []
    now = link_free_at = 0.0
    arrived = 0
    while True:
        if not any(side.stirred for side in sides):
            facts = [end for end, _ in copies] + [side.flying[0] for side in sides if side.flying]
            facts += [row.arrival_s for row in rows[arrived : arrived + 1]]
            if not facts:
                break
            now = max(now, min(facts))
        for copy in [copy for copy in copies if copy[0] <= now + SLACK_S]:
            copies.remove(copy)
            for side in sides:
                side.landed.add(copy[1])
                side.stirred = True
        for side in sides:
            if side.flying and side.flying[0] <= now + SLACK_S:
                (end, output, sampling), side.flying = side.flying, None
                side.deliver(output, sampling, end)
        for number, params in front.handed_over:
            back.add(number, rows[number].output_tokens, dict(params))
        front.handed_over.clear()
        while arrived < len(rows) and rows[arrived].arrival_s <= now + SLACK_S:
            front.add(arrived, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            arrived += 1
        for side in sides:
            while side.stirred and not side.flying:
                for key, blocks in side.schedule(now):
                    pulled.append((int(key), blocks))
                    link_free_at = max(now, link_free_at) + blocks * s_per_block
                    copies.append((link_free_at, key))
            side.stirred = False
    for side in sides:
        assert side.pool.get_num_free_blocks() == options.blocks - 1, "blocks were lost"
    return {
        "workload": rows, "args": asdict(options), "s_per_block": s_per_block, "first": back.first,
        "finish": back.finish, "pulled": pulled, "preemptions": sum(back.preempted),
    }  # fmt: skip


def drawn(seed: int) -> tuple[list[Row], Options, float]:
    """A workload of a seed: small pools, few seats, shared beginnings, slow links, watermarks, small chunks."""
    dice = random.Random(seed)
    blocks = dice.choice((60, 90, 150, 400))
    longest = min((blocks - 1) * 16, dice.choice((256, 512)))
    rows, now, shares = list[Row](), 0.0, dice.random() < 0.6
    for _ in range(dice.randint(3, 25)):
        now += dice.choice((0.0, 0.0, dice.expovariate(30), dice.expovariate(5)))
        prompt = dice.choice((dice.randint(1, 40), dice.randint(16, 200), 16 * dice.randint(1, 10)))
        output = dice.choice((2, dice.randint(2, 12), dice.randint(2, 60)))
        prompt = min(prompt, longest - output - 1)
        ids: tuple[int, ...] = ()
        if shares and dice.random() < 0.7:
            stem = 1000 * dice.randint(1, 3)
            ids = tuple(range(stem, stem + dice.randint(1, -(-prompt // 16))))
        rows.append(Row(now, prompt, output, ids))
    options = Options(
        blocks=blocks, max_model_len=longest, max_num_seqs=dice.choice((2, 4, 256)),
        max_batched=dice.choice((256, 512, 2048)), no_prefix_caching=dice.random() < 0.2,
    )  # fmt: skip
    s_per_block = dice.choice((1e-4, 1e-3, 5e-3, 0.0123))
    options = replace(options, watermark=dice.choice((0.0, 0.0, 0.1)))
    if dice.random() < 0.4:
        # Hardly more than the longest, which takes several steps.
        options = replace(
            options, blocks=longest // 16 + 3, max_num_seqs=min(options.max_num_seqs, 32), max_batched=32,
            no_reserve_full_isl=dice.random() < 0.5, long_prefill=dice.choice((0, 8)),
        )  # fmt: skip
    return rows, options, s_per_block


def main() -> None:
    """Make the stored cases, or those named on the command line."""
    path, seeds = CASES, SEEDS
    if sys.argv[1:]:
        path, seeds = Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3]))
    print(f"{len(seeds)} cases, {write_answer([{'seed': seed, **ask(*drawn(seed))} for seed in seeds], path)} bytes")


if __name__ == "__main__":
    main()
