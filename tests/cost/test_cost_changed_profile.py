"""`--profile NAME:CONSTANT=VALUE`: constants that the user changes, and what follows of them."""

import json

import pytest
from msgspec import structs

from sim.cost.changed_profile import RATES, changed, profile_named
from sim.cost.kernels import KernelTables
from sim.cost.profile import KERNEL_NAMES, load_profile
from sim.errors import UserError

BASE = load_profile("l20-derived")


def test_constants_are_replaced_and_the_rest_stays():
    found = profile_named("l20-derived:beta=2,pcie_bytes_per_s=5e9", "l20")
    assert found.value("beta") == 2.0
    assert found.value("h2d_bytes_per_s") == found.value("d2h_bytes_per_s") == 5e9
    assert found.constants["beta"].source == "given by the user: beta=2"
    assert found.name == "l20-derived:beta=2,pcie_bytes_per_s=5e9"
    assert found.status == BASE.status and found.content_hash != BASE.content_hash
    kept = set(BASE.constants) - {"beta", "h2d_bytes_per_s", "d2h_bytes_per_s"}
    assert all(found.constants[name] == BASE.constants[name] for name in kept)
    assert profile_named(":beta=2", "l20").value("flops_per_s") == BASE.value("flops_per_s")


def test_a_gpu_twice_as_fast_halves_the_time_of_what_it_computes(tmp_path):
    fast = profile_named("l20-derived:gpu_speed=2")
    spaced = profile_named("l20-derived: gpu-speed =2")
    assert all(spaced.value(name) == fast.value(name) for name in fast.constants)
    assert all(fast.value(name) == 2 * BASE.value(name) for name in RATES if name not in KERNEL_NAMES)
    assert fast.value("layer_overhead_s") == BASE.value("layer_overhead_s") / 2
    assert fast.value("h2d_bytes_per_s") == BASE.value("h2d_bytes_per_s")
    linear = {"form": "linear", "prefill": [0.01, 1e-4, 0], "decode": [0.02, 1e-3, 1e-4], "swap_s_per_block": 1e-3}
    (tmp_path / "p.json").write_text(json.dumps(linear))
    once, twice = (profile_named(f"{tmp_path / 'p.json'}{more}", "l20").constants for more in ("", ":gpu_speed=2"))
    ratios = {name: twice[name].value / constant.value for name, constant in once.items() if constant.value}
    copies = [name for name in ratios if not name.startswith(("prefill", "decode"))]
    assert copies and ratios == dict.fromkeys(ratios, 0.5) | dict.fromkeys(copies, 1.0)


def test_a_rate_of_all_reduces_stands_for_those_measured():
    assert profile_named("h100-imported:beta=1").all_reduce == load_profile("h100-imported").all_reduce is not None
    assert profile_named("h100-imported:allreduce_bytes_per_s=1e9").all_reduce is None


def test_tables_of_kernels_have_no_speed_to_change():
    tables = KernelTables(
        model="tiny", tp=1, weight_bytes=1.0, kv_bytes=1.0, layer=[(1, 1.0)], iteration=[(1, 1.0)], head=[(1, 1.0)],
        attention=[(1, 0, 0, 0, 1.0), (0, 0, 1, 1, 1.0)],
    )  # fmt: skip
    timed = structs.replace(BASE, form="table", kernels=tables)
    assert changed(timed, "flops_per_s=1e12").value("flops_per_s") == 1e12
    with pytest.raises(UserError, match="gpu_speed does not scale tables of kernels; leave it out"):
        changed(timed, "gpu_speed=2")


def test_what_costs_nothing_at_zero_may_be_zero():
    assert profile_named("l20-derived:copy_launch_s=0", "l20").value("copy_launch_s") == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("l20-derived:h2d=1", "'h2d' is no constant of form roofline; known: pcie_bytes_per_s, gpu_speed, flops_per_s"),
        ("l20-derived:beta=x", "beta = 'x' is not a number above 0"),
        ("l20-derived:beta=0", "beta = '0' is not a number above 0"),
        ("l20-derived:beta=inf", "is not a number above 0"),
        ("l20-derived:beta=-1", "is not a number above 0"),
        ("l20-derive:beta=1", "did you mean 'l20-derived'"),
        ("l20-derived:beta=1,", "= '' is not a number"),
    ],
)
def test_wrong_changes_are_told(text, words):
    with pytest.raises(UserError) as caught:
        profile_named(text, "l20")
    assert words in str(caught.value)
