"""Small crowded clusters do what is pinned in `golden/clusters.txt` (`pinned_clusters.py` renews it)."""

import pinned_clusters
import pytest

PINNED = pinned_clusters.CLUSTERS.read_text().splitlines()
NAMES = pinned_clusters.names()


def test_every_kind_is_pinned():
    assert [line.rpartition(" #")[0] for line in PINNED[:: pinned_clusters.RUNS]] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_clusters_do_what_is_pinned(name):
    found = pinned_clusters.lines(name)
    assert found == [line for line in PINNED if line.rpartition(" #")[0] == name], "if that is meant: make pins"
