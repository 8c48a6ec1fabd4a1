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
from analysis import scheme_comparison

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
