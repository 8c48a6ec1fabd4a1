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
from analysis.async_lab import plots, runs, tables
from analysis.paper_pages import Tables

# %%
Tables(tables.sections(runs.newest(runs.load())))

# %% [markdown]
# ## A GPT with real text
#
# 28 layers, on up to 32 stages. Left by updates (equal tokens), right by the time that a pipeline of 32 stages takes: a
# synchronous one has made half of the updates when the other one is through.

# %%
plots.picture("gpt_curves")

# %%
plots.picture("gpt_depth")

# %% [markdown]
# ## A ResNet with real images

# %%
plots.picture("resnet_curves")

# %%
plots.picture("resnet_depth")
