"""Trains a small network with PyTorch/XLA on all chips of all workers, data-parallel: one process for each chip.

No test runs this, since PyTorch/XLA needs chips (docs/unproved.md). Start it with PJRT_DEVICE=TPU, which the role jax
sets on a fleet with `jax_framework: torch_xla`.
"""

from __future__ import annotations

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

STEPS, ROWS, FEATURES = 200, 256, 64


def batches(rank: int):
    """Yield batches of the process: rows whose sign of a fixed sum is to be found."""
    generator = torch.Generator().manual_seed(rank)
    secret = torch.linspace(-1, 1, FEATURES)
    for _ in range(STEPS):
        rows = torch.randn(ROWS, FEATURES, generator=generator)
        yield rows, (rows @ secret > 0).float()


def train(_: int) -> None:
    """Train on one chip; gradients are averaged over all of them."""
    torch_xla.manual_seed(0)  # the same first parameters everywhere
    device, rank, ranks = torch_xla.device(), xr.global_ordinal(), xr.world_size()
    print(f"process {rank} of {ranks} on {device}", flush=True)
    network = torch.nn.Sequential(torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for step, (rows, wanted) in enumerate(batches(rank), 1):
        optimizer.zero_grad()
        scores = network(rows.to(device)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted.to(device))
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    # Moved to the CPU first: a checkpoint of XLA tensors needs XLA where it is read.
    parameters = {name: value.cpu() for name, value in network.state_dict().items()}
    if rank == 0:
        torch.save(parameters, "network.pt")


if __name__ == "__main__":
    torch_xla.launch(train)
