"""A script for the original Bagua 0.9, run on the CPU: ByteGrad, a checkpoint, an all_reduce.

python -m bagua.distributed.launch --nproc_per_node 2 examples/bagua_0_9.py
"""

import os
import shutil
import tempfile

import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import bytegrad
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Sequential(
    torch.nn.Linear(8, 64),
    torch.nn.ReLU(),
    torch.nn.Linear(64, 1),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
algorithm = bytegrad.ByteGradAlgorithm(hierarchical=False)
model = model.with_bagua([optimizer], algorithm)
for _ in range(100):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()

# All ranks save and load together, in one folder that all of them see.
folder = tempfile.mkdtemp() if bagua.get_rank() == 0 else ""
folder = bagua.communication.broadcast_object(folder)
save_checkpoint(100, os.path.join(folder, "run"), model, optimizer)
assert load_checkpoint(os.path.join(folder, "run"), model, optimizer) == 100

mean = loss.detach().clone()
bagua.allreduce_inplace(mean, op=bagua.ReduceOp.AVG)
weights = torch.cat([param.detach().flatten() for param in model.parameters()])
total = weights.sum().item()
print(f"rank {bagua.get_rank()}: loss {mean.item():.4f}, weights {total:.6f}")
bagua.barrier()
if bagua.get_rank() == 0:
    shutil.rmtree(folder)
