"""Sums and maxima of segments, and messages along edges: against DGL's, values and gradients."""

from __future__ import annotations

import pytest
import torch

from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.encoder import BothWays
from rlflow_tvm.agents.segments import segment_max, segment_sum


def gradients(results: list[torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Of the sum of the results, each element weighted otherwise."""
    total = sum((result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum() for result in results)
    assert isinstance(total, torch.Tensor)
    return list(torch.autograd.grad(total, inputs))


@pytest.mark.parametrize("lengths", [(1,), (3, 1, 4), (2, 0, 5), (0, 1, 0)], ids=str)
def test_sums_are_dgls(lengths):
    generator, counts = torch.Generator().manual_seed(0), torch.tensor(lengths)
    rows = torch.randn(sum(lengths), 5, generator=generator, requires_grad=True)
    found, expected = segment_sum(rows, counts), dgl.ops.segment_reduce(counts, rows, "sum")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients([found], (rows,)), gradients([expected], (rows,)))


def test_a_row_belongs_to_its_segment_alone():
    rows, counts = torch.tensor([[1.0, -4.0], [3.0, -2.0], [-5.0, 6.0]]), torch.tensor([2, 1, 0])
    assert segment_sum(rows, counts).tolist() == [[4, -6], [-5, 6], [0, 0]]
    assert segment_max(rows, counts).tolist() == [[3, -2], [-5, 6], [0, 0]]


@pytest.mark.parametrize("lengths", [(1,), (3, 1, 4), (2, 0, 5), (0, 0), (40, 1, 0, 7)], ids=str)
def test_maxima_are_the_same_with_and_without_gradients(lengths):
    rows, counts = torch.randn(sum(lengths), 5, generator=torch.Generator().manual_seed(1)), torch.tensor(lengths)
    with_gradient = segment_max(rows.clone().requires_grad_(), counts)
    assert with_gradient.requires_grad
    assert torch.equal(segment_max(rows, counts), with_gradient.detach())


def test_one_of_equal_rows_has_the_gradient():
    rows = torch.tensor([[1.0], [2.0], [2.0], [0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(segment_max(rows, torch.tensor([3, 0, 1])).sum(), (rows,))
    assert gradient.squeeze(1).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 2), (6, 9), (30, 90)])
def test_messages_are_dgls(nodes, edges):
    """With edges from a node to itself, several between two nodes, and nodes without any."""
    generator = torch.Generator().manual_seed(nodes)
    sources, destinations = (torch.randint(nodes, (edges,), generator=generator) for _ in range(2))
    graph = dgl.graph((sources, destinations), num_nodes=nodes)
    drawn = [torch.randn(n, 4, generator=generator, requires_grad=True) for n in (nodes, nodes, edges, edges)]
    sent, told = (drawn[0], drawn[1]), (drawn[2], drawn[3])
    links = BothWays(graph, dgl.reverse(graph))
    assert links.producers.tolist() == graph.in_degrees().tolist()
    assert links.consumers.tolist() == graph.out_degrees().tolist()
    found = links.means(sent, told)
    ways = (graph, dgl.reverse(graph))
    expected = [
        dgl.ops.copy_e_mean(way, torch.relu(dgl.ops.u_add_e(way, each, edge)))
        for way, each, edge in zip(ways, sent, told, strict=True)
    ]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, tuple(drawn)), gradients(expected, tuple(drawn)))
