"""All states of a model, all runs of it: what must never happen, and what must in the end.

`explore` goes breadth first, so the trace of a broken rule is a shortest one. Then it looks for a
fair run in which some client waits for ever. With finitely many states such a run circles, from
some time on, in a set of states each of which is reachable from each other by steps that leave the
client waiting; and it exists just if that set is fair: whoever owes a step in all of its states
takes one within it. A set with no step at all is a deadlock, the simplest case of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from slot_model import BETWEEN_STEPS, SlotModel
from slot_state import READY, ProtocolBroken, Setup, State

MAX_STATES = 1_000_000


class Violation(Exception):
    """The message is the trace: the steps from the start, and the state they lead to."""


@dataclass
class Graph:
    """State `i` has the steps `first[i]` up to `first[i + 1]`."""

    model: SlotModel
    states: list[State]
    parent: list[int]
    first: list[int]
    owed: list[int]
    to: list[int]

    def violation(self, i: int, why: str) -> Violation:
        path = [i]
        while path[-1]:
            path.append(self.parent[path[-1]])
        lines = []
        for a, b in pairwise(reversed(path)):
            for what, _, after in self.model.steps(self.states[a]):
                if self.model.canonical(after) == self.states[b]:
                    lines.append(what)
                    break
        return Violation("\n".join([*lines, str(self.states[i]), why]))


def explore(setup: Setup) -> list[State]:
    """Every state that can be reached; raises Violation."""
    model = SlotModel(setup)
    start = model.start()
    number = {start: 0}
    graph = Graph(model, [start], [0], [0], [], [])
    for i, state in enumerate(graph.states):  # which grows meanwhile
        try:
            for _, owed, then in model.steps(state):
                after = model.canonical(then)
                j = number.setdefault(after, len(number))
                if j == len(graph.states):
                    graph.states.append(after)
                    graph.parent.append(i)
                graph.owed.append(owed)
                graph.to.append(j)
        except ProtocolBroken as broken:
            raise graph.violation(i, str(broken)) from None
        graph.first.append(len(graph.to))
        assert len(graph.states) <= MAX_STATES, "the setup is too large"
    for c in range(setup.clients):
        for component in _waiting_components(graph, c):
            if _fair(graph, component):
                raise graph.violation(min(component), f"client {c} may wait for ever from here")
    return graph.states


def _fair(graph: Graph, component: list[int]) -> bool:
    """Whether a fair run can stay in it.

    What the model lets happen only between two steps of the daemon is due during one as well.
    """
    members = set(component)
    always, taken = -1, 0
    for i in component:
        owed_here = 0
        for e in range(graph.first[i], graph.first[i + 1]):
            owed_here |= graph.owed[e]
            if graph.to[e] in members:
                taken |= graph.owed[e]
        always &= owed_here if graph.states[i].phase == READY else owed_here | BETWEEN_STEPS
    return not always & ~taken


def _waiting_components(graph: Graph, c: int) -> Iterator[list[int]]:
    """The strongly connected components of the states in which client `c` waits (Tarjan, 1972)."""
    inside = [graph.model.waits(s, c) for s in graph.states]
    order = [0] * len(inside)  # 0: not met yet
    low = [0] * len(inside)
    stack: list[int] = []
    met = 0
    for root, wanted in enumerate(inside):
        work = [(root, graph.first[root])] if wanted and not order[root] else []
        while work:
            i, start = work.pop()
            if not order[i]:
                met += 1
                order[i] = low[i] = met
                stack.append(i)
            for e in range(start, graph.first[i + 1]):
                j = graph.to[e]
                if not inside[j]:
                    continue
                if not order[j]:
                    work += [(i, e), (j, graph.first[j])]
                    break
                low[i] = min(low[i], low[j])
            else:
                if low[i] == order[i]:
                    component = [stack.pop()]
                    while component[-1] != i:
                        component.append(stack.pop())
                    for j in component:
                        inside[j] = False
                    yield component
