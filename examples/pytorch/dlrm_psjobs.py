"""Trains a DLRM, a recommender of embedding bags and two small networks, on clicks from a seeded generator."""

import psjobs
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DENSE, TABLES, ROWS, DIM, BAG = 13, 8, 2_000, 16, 3


class Clicks(Dataset):
    """Events whose click follows from hidden scores of their categories and numbers."""

    def __init__(self, events: int, seed: int) -> None:
        hidden = torch.Generator().manual_seed(0)
        scores = torch.randn(TABLES, ROWS, generator=hidden)
        weights = torch.randn(DENSE, generator=hidden)
        own = torch.Generator().manual_seed(seed)
        self.dense = torch.randn(events, DENSE, generator=own)
        self.sparse = (torch.rand(events, TABLES, BAG, generator=own).pow(3) * ROWS).long()
        score = self.dense @ weights * 0.3
        for table in range(TABLES):
            score += scores[table][self.sparse[:, table]].mean(1)
        self.clicks = (torch.rand(events, generator=own) < torch.sigmoid(score)).float()

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.dense[index], self.sparse[index], self.clicks[index]


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="mean") for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        low = self.bottom(dense)
        features = torch.stack([low, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], dim=1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        return self.top(torch.cat([low, products[:, rows, columns]], dim=1)).squeeze(1)


def auc(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    ranks = scores.argsort().argsort().double() + 1
    positive = clicks.sum()
    return ((ranks[clicks > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(clicks) - positive))).item()


if __name__ == "__main__":
    job = psjobs.join()
    model = DLRM()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loader = DataLoader(Clicks(60_000, seed=1), batch_size=128, shuffle=True)
    model, optimizer = job.attach(model, optimizer)
    loader = job.share(loader)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        for dense, sparse, clicks in loader:
            optimizer.zero_grad()
            loss = criterion(model(dense, sparse), clicks)
            loss.backward()
            optimizer.step()
    test = Clicks(20_000, seed=2)
    with torch.no_grad():
        scores = model(test.dense, test.sparse)
    print(f"auc {auc(scores, test.clicks):.4f}")
    job.report({"auc": auc(scores, test.clicks)})
