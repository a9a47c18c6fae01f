"""Costs that are read off a graph, in place of measured ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import tvm
from small_models import TARGET
from tvm import relax

from rlflow_tvm.cost import GraphCost
from rlflow_tvm.dataflow import Dataflow, Node
from rlflow_tvm.ir import detach
from rlflow_tvm.passes.graph import Graph

COSTS: dict[str, float] = {
    "relax.nn.conv2d": 100.0,
    "relax.matmul": 20.0,
    "relax.layout_transform": 3.0,
    "relax.permute_dims": 2.0,
    "relax.reshape": 0.0,
    "getitem": 0.0,
}
"""Microseconds by operator; any other operator 1."""

BLOCKED_CONV = 60.0


class FakeCostModel:
    """What `RewriteProblem` needs of a cost model.

    A graph that runs an operator for which `fails` holds costs infinity. The cost does not depend on shapes, so that
    what a rewrite gains can be worked out by hand. With `wrong_by` a cost that need not be measured is a prediction,
    off by up to that share of the true one, as the graph's hash has it.
    """

    def __init__(
        self,
        costs: Mapping[str, float] | None = None,
        blocked_conv: float = BLOCKED_CONV,
        fails: Callable[[Node], bool] = lambda node: False,
        wrong_by: float = 0.0,
    ) -> None:
        self.target = TARGET
        self.asked = 0
        self.run = 0
        """Modules run end to end."""
        self._known: dict[int, GraphCost] = {}
        self.closed = False
        self._costs = COSTS if costs is None else costs
        self._blocked_conv, self._fails, self._wrong_by = blocked_conv, fails, wrong_by
        self.predicted = self.revision = 0

    @property
    def measuring_secs(self) -> float:
        return 0.0

    @property
    def measured(self) -> int:
        """Graphs that were priced, each counted once."""
        return len(self._known)

    def reach(self, mod: tvm.IRModule | Dataflow) -> int:
        del mod
        return 0

    def cost(
        self,
        mod: tvm.IRModule | Dataflow,
        *,
        reach: int | None = None,
        confirmed: bool = False,
    ) -> GraphCost:
        del reach
        self.asked += 1
        graph = mod if isinstance(mod, Graph) else Graph.from_function(mod["main"])
        if graph.structural_hash not in self._known:
            if self._wrong_by and not confirmed:
                return self._guess(graph)
            self._known[graph.structural_hash] = self._graph_cost(graph)
        return self._known[graph.structural_hash]

    def _guess(self, graph: Graph) -> GraphCost:
        self.predicted += 1
        cost = self._graph_cost(graph)
        if cost.failed:  # nobody knows
            cost = replace(cost, run_secs=1e-6, failed=())
        error = self._wrong_by * cost.run_secs
        factor = 2.0 * (graph.structural_hash % 1000) / 999 - 1.0
        return replace(cost, run_secs=cost.run_secs + factor * error, predicted=1, deviation_secs=error)

    def end_to_end(self, mod: tvm.IRModule) -> float:
        self.run += 1
        return self.cost(detach(mod).mod).run_secs

    def _graph_cost(self, graph: Graph) -> GraphCost:
        nodes = [n for n in graph.nodes if n.var not in graph.weight_only and not isinstance(n.value, relax.Var)]
        failed = tuple(node.op for node in nodes if self._fails(node))
        total = sum(map(self._cost, nodes))
        return GraphCost(math.inf if failed else total * 1e-6, 0.0, len(nodes), 0, 0, 0, failed)

    def close(self) -> None:
        self.closed = True

    def _cost(self, node: Node) -> float:
        if node.op == "relax.nn.conv2d" and node.value.attrs.out_layout != "NCHW":
            return self._blocked_conv
        return self._costs.get(node.op, 1.0)
