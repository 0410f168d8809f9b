"""vLLM 0.19 on two RTX PRO 6000, data-parallel with experts over both: Qwen3 30B-A3B as measured and as simulated.

    python validation/vllm019_dp_ep.py FOLDER    # a checkout of casys-kaist/LLMServingSim

As `vllm019_rtx_pro_6000.py`, of the fourth server of that folder: `data_parallel_size` 2, `enable_expert_parallel`.
Prices are the shipped `rtx-pro-6000-imported`: attention and products of Llama-3.1 8B and Qwen3 32B, experts of
aiconfigurator's tables of vLLM 0.24. Nothing is of this model's tables in the folder, or of its run. What goes between
the cards has the rate and latency of LLMServingSim's configuration of this machine, which are in the profile.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm019_rtx4090 import compare, read_measured
from vllm019_rtx_pro_6000 import GPU, asked_folder, convert

from sim.cost.profile import load_profile
from sim.options.scenario import Scenario

SERVER, MODEL = "Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"
TRACE = "qwen3-30b-a3b"


def scenario(folder: Path, scratch: Path) -> Scenario:
    """The server and its traffic, which is converted into `scratch`."""
    convert(folder, SERVER, scratch, TRACE)
    return Scenario(
        trace=str(scratch / "trace.csv"),
        model=MODEL,
        gpu=GPU,
        data_parallel_size=2,
        enable_expert_parallel=True,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
    )


def main() -> None:
    """Print measured and simulated figures side by side."""
    folder = asked_folder(__doc__)
    if folder is None:
        return
    with TemporaryDirectory() as name:
        scratch = Path(name)
        setup = scenario(folder, scratch)
        shipped = load_profile(f"{GPU}-imported")
        compare(read_measured(scratch), [shipped], lambda profile: replace(setup, profile=str(profile)))


if __name__ == "__main__":
    main()
