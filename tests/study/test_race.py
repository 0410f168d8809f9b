"""Many deployments raced: which come on to longer traffic."""

from sim.study import race
from sim.study.deployments import Deployment
from sim.study.points import Outcome
from sim.study.search import Ran, Slo


def test_deployments_are_alike_only_if_they_were_so_at_the_loads_near_the_best(monkeypatch):
    """All are given up at the same time one load above: those that sustained the best one at unlike TTFTs come on."""
    deployments = [Deployment({"ttft_ms": ttft_ms}, 1, "one engine", False, ()) for ttft_ms in (10.0, 20.0, 20.0)]

    def runs(asked, *_):
        return [
            Ran(options, 1, Outcome("k", missed_s=5.0) if options["rate_scale"] > 1.0 else Outcome("k", told(options)))
            for options in asked
        ]

    def told(options):
        return {"mean_ttft_ms": options["ttft_ms"], "completed": 40, "num_prompts": 40} | dict.fromkeys(
            ("mean_tpot_ms", "p99_ttft_ms", "p99_tpot_ms", "duration"), 1.0
        )

    monkeypatch.setattr(race, "runs", runs)
    monkeypatch.setattr(race, "_second", lambda raced, ground: raced)
    ground = race.Ground(lambda span_s, load: {}, [Slo("p99_ttft_ms", 100.0)], None, None, race.Work(None))
    found, refused = race.race(deployments, ground, 1.0)
    assert [one.deployment.options["ttft_ms"] for one in found] == [10.0, 20.0] and not refused
