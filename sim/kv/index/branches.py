"""Walks through radix trees of any kind, whose nodes have a `parent` and `children`."""

from collections.abc import Sequence
from typing import Any


def by_branch(root: Any, ends: Sequence[Any]) -> list[int]:  # noqa: ANN401 - nodes of either tree
    """Places in `ends`, in a walk through the tree: children first, of those the branch that the most end in."""
    waiting: dict[Any, list[int]] = {}
    weights: dict[Any, int] = {}
    for place, end in enumerate(ends):
        waiting.setdefault(end, []).append(place)
        above = end
        while above is not None:
            weights[above] = weights.get(above, 0) + 1
            above = above.parent
    order: list[int] = []
    left = [(root, False)]
    while left:
        node, is_walked = left.pop()
        if is_walked:
            order += waiting.get(node, ())
            continue
        left.append((node, True))
        branches = [child for child in node.children.values() if child in weights]
        branches.sort(key=weights.__getitem__, reverse=True)
        # Not `reversed` below: mypyc cannot compile it there.
        branches.reverse()
        left += [(child, False) for child in branches]
    return order


def nodes_below(root: Any) -> list[Any]:  # noqa: ANN401 - nodes of either tree
    """All nodes but the root."""
    found, left = [], list(root.children.values())
    while left:
        node = left.pop()
        found.append(node)
        left.extend(node.children.values())
    return found
