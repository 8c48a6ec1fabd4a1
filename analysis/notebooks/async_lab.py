# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The asynchronous laboratory
#
# Method x optimizer x depth: what the delay of gradients does to training, and what makes up for it. Losses are those
# of one device with the delays of a pipeline that does not drain (`engine=delayed`, sweeps/async_lab.yaml); how long an
# update takes in such a pipeline is simulated (sweeps/async_lab_pipelines.yaml). What the methods are:
# docs/explanation/asynchronous.md.

# %%
from analysis import async_lab
from analysis.paper_pages import Tables

# %%
Tables(async_lab.sections(async_lab.newest(async_lab.load())))

# %% [markdown]
# ## A GPT with real text
#
# 28 layers, on up to 32 stages. Left by updates (equal tokens), right by the time that a pipeline of 32 stages takes: a
# synchronous one has made half of the updates when the other one is through.

# %%
async_lab.picture("gpt_28_32_curves")

# %%
async_lab.picture("gpt_28_32_depth")

# %% [markdown]
# ## A ResNet with real images

# %%
async_lab.picture("resnet_curves")

# %%
async_lab.picture("resnet_depth")
