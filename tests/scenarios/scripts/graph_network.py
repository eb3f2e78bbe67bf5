"""A graph network without a library: messages by index_select, sums by index_add, pooling by scatter."""

import torch
from torch import nn

import trainfit


class GraphLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.update = nn.GRUCell(width, width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = self.message(torch.cat([nodes.index_select(0, source), nodes[target]], dim=1))
        gathered = torch.zeros_like(nodes).index_add_(0, target, messages)
        degree = torch.zeros(len(nodes), device=nodes.device).scatter_add_(
            0, target, torch.ones_like(target).float()
        )
        return self.update(gathered / degree.clamp(min=1).unsqueeze(1), nodes)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.layers = nn.ModuleList([GraphLayer(32) for _ in range(3)])
        self.head = nn.Linear(32, 1)

    def forward(self, atoms: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = self.embed(atoms)
        for layer in self.layers:
            x = layer(x, edges)
        pooled = x.new_zeros(int(graph.max()) + 1, 32).scatter_reduce(
            0, graph[:, None].expand_as(x), x, "mean"
        )
        return self.head(pooled).squeeze(1)


def build(device: str = "cpu") -> trainfit.Step:
    model = GraphNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sizes = torch.tensor([9, 14, 6, 11])
    graph = torch.repeat_interleave(torch.arange(4), sizes).to(device)
    atoms = torch.randint(0, 20, (40,), device=device)
    edges = torch.randint(0, 40, (2, 120), device=device)
    energy = torch.randn(4, device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.l1_loss(model(atoms, edges, graph), energy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
