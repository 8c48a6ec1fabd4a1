# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # All schemes on one model and one cluster
#
# Engine x planner x model: throughput, utilization, memory, and how far the prediction was off. The same weights,
# batches and metrics everywhere (sweeps/schemes.yaml).

# %%
import torch
from torch import nn

from analysis import dataframe, scheme_comparison
from harness import simulate

# %% [markdown]
# ## Simulated
#
# A U-Net and a GPT on four Tesla P40, layer times counted. What is not counted (Python, processes) favours engines
# with many small messages.

# %%
scheme_comparison.section("simulated")

# %%
scheme_comparison.picture("simulated")

# %% [markdown]
# ## Measured
#
# A small U-Net and a small GPT on two CPU devices of the local machine, which share its cores. Predicted / measured
# says how far the simulator is to be trusted here.

# %%
scheme_comparison.section("measured")

# %%
scheme_comparison.picture("measured")

# %% [markdown]
# ## A module of one's own
#
# `harness.simulate` takes a module and a batch, and returns the same records (docs/howto/python.md); `harness.plan` and
# `harness.race` are called the same way. Here on the four P40 from above.


# %%
class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


with torch.device("meta"):  # no run trains it here, so it needs no memory
    network = nn.Sequential(nn.Linear(784, 2048), *(Residual(2048) for _ in range(8)), nn.Linear(2048, 10))
batch = torch.randn(64, 784), torch.randint(10, (64,))
engines = ["gpipe", "torch_pipelining", "ddp", "fsdp"]
records = simulate(network, batch, "cluster.devices=4", engine=engines, cluster="p40x8")

# %%
dataframe.runs(records)[["engine", "status", "throughput", "utilization", "peak_memory_bytes", "bubble"]]
